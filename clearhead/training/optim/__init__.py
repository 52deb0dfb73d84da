"""Optimizers, learning-rate schedules, gradients and averages of weights."""
