"""Tokenizers: train, load and save them, and identify them by fingerprint."""
