"""Denoising: a corrupted text is restored, before a model is trained for another task."""
