"""Extractive question answering: the span of a text that answers a question."""
