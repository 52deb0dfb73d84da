"""Tokenizers: train them on text, load those of any checkpoint, and recognise them again by fingerprint."""

from clearhead.text.pair import TokenizerPair
from clearhead.text.published import PublishedText, load_published
from clearhead.text.roles import Roles
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.training import KINDS, train_tokenizer

__all__ = ["KINDS", "PublishedText", "Roles", "Tokenizer", "TokenizerPair", "load_published", "train_tokenizer"]
