"""Benchmark of a model on this machine, compared with the limits of the machine."""
