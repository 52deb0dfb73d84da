"""Batches of similar lengths by token budget, packed where that helps, in an order that a seed fixes."""
