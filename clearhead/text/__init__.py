"""Tokenizers: train them, load them, and recognise them again by fingerprint."""
