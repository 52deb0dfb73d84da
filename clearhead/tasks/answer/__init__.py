"""Extractive question answering: find the span of a text that answers a question."""
