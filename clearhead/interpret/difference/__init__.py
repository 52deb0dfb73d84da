"""Differences between two models: weights, heads and predictions."""
