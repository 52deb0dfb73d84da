"""Tokenizers: train them on text, load any `tokenizer.json`, and recognise them again by fingerprint."""

from clearhead.text.pair import TokenizerPair
from clearhead.text.roles import Roles
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.training import KINDS, train_tokenizer

__all__ = ["KINDS", "Roles", "Tokenizer", "TokenizerPair", "train_tokenizer"]
