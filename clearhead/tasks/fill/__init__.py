"""Masked language modelling: predict the hidden words of a text."""
