"""Tokenization of texts: tokenizers trained once and cached, and documents of any length."""
