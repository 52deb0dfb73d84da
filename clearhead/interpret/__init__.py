"""Interpretability: hook points, attention maps, head effects, pictures, the explorer page and explanations."""
