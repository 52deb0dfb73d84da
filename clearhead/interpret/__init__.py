"""What a model does inside: hook points, heads, effects, pictures, pages and explanations."""
