"""Stores: tokenized data in memory-mapped files, prepared once and cached by fingerprint."""
