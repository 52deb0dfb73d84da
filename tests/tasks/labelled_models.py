"""Tiny models of every family with heads for labels and tags, with fixed random weights."""

from __future__ import annotations

import random
from typing import Any

import torch

from clearhead.core import Transformer, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import label_head, token_head
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

WIDTH = 14
POOLS = {"encoder": ("mean", "first"), "decoder": ("last", "mean"), "encoder-decoder": ("last",)}
FAMILIES = [(family, pool) for family, pools in POOLS.items() for pool in pools]


def character_tokenizer() -> Tokenizer:
    return train_tokenizer("character", ["abcdefgh .,x"], vocab_size=40)


def model(family: Any, tokenizer: Tokenizer, *, count: int, pool: Any = None, **changes: Any) -> Transformer:
    """Build a model; without a pool its head gives one output per token."""
    torch.manual_seed(5)
    hparams = Hyperparameters(family=family, layers=2, width=WIDTH, heads=2, feedforward=19, dropout=0.3, **changes)
    head = token_head(count) if pool is None else label_head(WIDTH, count, pool=pool)
    size = tokenizer.vocab_size
    module = build(build_spec(hparams, source_vocab=size, target_vocab=size, head=head))
    # Fresh biases are zero and fresh norms one, which would hide mistakes; small outputs would all agree.
    for name, parameter in module.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.4)
    last = list(module.head.parameters())[-2:]  # type: ignore[union-attr]
    torch.nn.init.normal_(last[0], std=4.0)
    torch.nn.init.zeros_(last[1])
    return module


def random_texts(count: int, longest: int = 23, seed: int = 3) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh .,", k=draw.randint(1, longest))) + "x" for _ in range(count)]
