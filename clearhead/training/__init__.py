"""From data to weights: the loop, its checks before the first step, and what it is built of."""
