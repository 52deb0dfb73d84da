"""Sweeps: one run for each of several changes to a run file, at an equal budget, and their comparison."""
