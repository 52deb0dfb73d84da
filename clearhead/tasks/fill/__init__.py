"""Masked language modelling: the hidden words of a text are found."""
