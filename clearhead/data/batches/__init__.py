"""Batches: rows of similar lengths within a token budget, in an order that a seed fixes."""
