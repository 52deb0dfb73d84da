"""Optimizers, learning-rate schedules, gradient scaling and weight averages."""
