"""Tokenised data in memory-mapped files, prepared once and found again by fingerprint."""
