"""Denoising: train a model to restore corrupted text, before it is trained for another task."""
