"""Compare runs: sizes, costs and results in a table, unfair differences, and learning curves."""
