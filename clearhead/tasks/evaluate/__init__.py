"""Metrics of models: one file per kind of metric."""
