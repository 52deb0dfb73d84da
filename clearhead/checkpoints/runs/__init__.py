"""A run directory: its layout, lock, checkpoints and metrics, and how a model is loaded from it."""
