"""Sampling and search: continuations, translations and their scores."""
