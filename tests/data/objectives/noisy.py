"""Tokenizers of every kind with a mask token and sentinels, and pieces of text for the objectives."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache

import numpy as np

from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.text.corpus import make_corpus

SIZES = {
    "bpe": 331, "byte-bpe": 401, "unigram": 283, "wordpiece": 331, "word": 2003, "character": 211, "byte": 331,
    "split": 2003,
}  # fmt: skip
# Kinds in which a word is what white space separates, and those in which entries cut finer.
SPACED = ("bpe", "byte-bpe", "unigram", "character", "byte")
NUM_SENTINELS = 29


def lines(kind: str) -> list[str]:
    """The text that a tokenizer of this kind was trained on."""
    texts = make_corpus(101)
    return [split_words(text) for text in texts] if kind == "split" else texts


def split_words(text: str) -> str:
    """Cut some words in two with the mark that joins them again."""
    draw = random.Random(len(text))
    return re.sub(r"(\w)(?=\w)", lambda match: match[1] + ("@@ " if draw.random() < 0.2 else ""), text)


@cache
def tokenizer(kind: str, sentinels: int = NUM_SENTINELS) -> Tokenizer:
    return train_tokenizer(kind, lines(kind), vocab_size=SIZES[kind], mask=True, sentinels=sentinels)


def add_special_ids(ids: Sequence[int], of: Tokenizer) -> np.ndarray:
    return np.array([of.bos_id, *ids, of.eos_id])


def pieces(kind: str, count: int = 13, join: int = 1) -> list[np.ndarray]:
    """The first lines as pieces, several to a piece where asked."""
    texts = lines(kind)
    joined = [" ".join(texts[start : start + join]) for start in range(0, count * join, join)]
    return [add_special_ids(ids, tokenizer(kind)) for ids in tokenizer(kind).encode_batch(joined)]


def draw_ids(of: Tokenizer, count: int, seed: int) -> list[int]:
    """Ordinary ids at random."""
    special = [of.pad_id, of.unk_id, of.bos_id, of.eos_id, of.mask_id, *of.sentinel_ids]
    choices = np.setdiff1d(np.arange(of.vocab_size), special)
    return stream(seed).choice(choices, count).tolist()


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)
