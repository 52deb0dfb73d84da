"""Tiny models of all three families that vary every option the laws must not depend on, and batches for them.

Legend: B batch, S source tokens, T tokens, D width. Sizes are distinct primes where heads need not divide the width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Cache, Output, Transformer, build
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.batches.base import Batch, find_label_rows
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

VOCAB, TARGET_VOCAB, MAX_POSITIONS = 29, 23, 17
POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "buckets")
FAMILIES = ("encoder", "decoder", "encoder-decoder")
SMALL = Hyperparameters(
    layers=2, encoder_layers=3, width=14, heads=6, head_size=10, feedforward=19, dropout=0.0, output_bias=True,
    max_positions=MAX_POSITIONS, tie="decoder",
)  # fmt: skip
STYLES = {
    "post": replace(SMALL, activation="gelu"),
    "pre-grouped": replace(
        SMALL, norm_place="pre", norm="rms", kv_heads=2, gated=True, activation="silu", bias=False, qk_norm=True
    ),
}
MODELS = [f"{family}/{style}/{position}" for family in FAMILIES for style in STYLES for position in POSITIONS]


def hparams(name: str) -> Hyperparameters:
    family, style, position = name.split("/")
    return replace(STYLES[style], family=family, positions=position)


def resolve_spec(chosen: Hyperparameters) -> spec.Model:
    return build_spec(chosen, source_vocab=VOCAB, target_vocab=VOCAB if chosen.tie == "all" else TARGET_VOCAB)


def tiny(name: str, **changes: object) -> Transformer:
    """Build the model of a name like "decoder/post/rotary", in evaluation mode; changes are fields of its hparams."""
    return build(resolve_spec(replace(hparams(name), **changes))).eval()


def with_mask(model: spec.Model, mask: spec.Full | spec.Causal | spec.Window, stack: str) -> spec.Model:
    """Replace the structure of every self-attention of a stack."""
    tree = model.model_dump(mode="json")
    for layer in tree[stack]["layers"]:
        for step in layer["steps"]:
            for branch in step["branches"]:
                if branch["function"].get("source") == "self":
                    branch["function"]["mask"] = mask.model_dump(mode="json")
    return spec.Model.from_json(json.dumps(tree))


def difference(actual: Tensor, expected: Tensor, real: Tensor | None = None) -> float:
    """Return max|a-b| / max|b| over the real positions."""
    if real is not None:
        actual, expected = actual[real], expected[real]
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True)
class Reader:
    """Callable for models of all families; `ids` is the input of the stack under test."""

    module: Transformer
    memory: Tensor | None = None
    memory_mask: Tensor | None = None

    @staticmethod
    def of(module: Transformer, rows: int) -> Reader:
        """Return a reader with a padded memory for each row, if the model has two stacks."""
        if module.encoder is None or module.decoder is None:
            return Reader(module)
        lengths = torch.tensor([5, 11, 3, 7, 2])[torch.arange(rows) % 5]
        mask = torch.arange(11) < lengths[:, None]
        with torch.no_grad():
            memory = module.encode(torch.randint(VOCAB, (rows, 11)), mask=mask).memory
        return Reader(module, memory, mask)

    @property
    def vocab(self) -> int:
        return self.module.num_target_ids

    def row(self, index: int) -> Reader:
        """Return a reader with one row of the memory, without its padding."""
        if self.memory is None:
            return self
        return Reader(self.module, self.memory[index : index + 1, self.memory_mask[index]])

    def __call__(
        self, ids: Tensor, mask: Tensor | None = None, *, documents: Tensor | None = None, cache: Cache | None = None
    ) -> Output:
        if self.memory is None:
            return self.module(ids, mask=mask, documents=documents, cache=cache)
        memory = self.memory if cache is None or cache.length == 0 else None
        memory_mask = None if memory is None else self.memory_mask
        return self.module.decode(ids, memory, memory_mask=memory_mask, target_mask=mask, cache=cache)


def pad_rows(rows: Iterable[Tensor], side: str, length: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Pad rows of unequal lengths on one side."""
    rows = list(rows)
    ids, mask = torch.full((len(rows), length), filler), torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        columns = slice(length - len(row), None) if side == "left" else slice(0, len(row))
        ids[index, columns], mask[index, columns] = row, True
    return ids, mask


def random_rows(vocab: int, lengths: tuple[int, ...] = (7, 11, 3, 1, 5)) -> list[Tensor]:
    return [torch.randint(vocab, (length,)) for length in lengths]


def token_batch(name: str) -> Batch:
    """Return a padded batch for the model of a name, with a label at each real token of its last stack."""
    vocab = VOCAB if name.startswith("encoder/") else TARGET_VOCAB
    mask = torch.arange(7) < torch.tensor([7, 5, 3])[:, None]
    labels = torch.randint(vocab, (3, 7)).masked_fill(~mask, NO_LABEL)
    sides = {"target_ids": torch.randint(vocab, (3, 7)), "target_mask": mask} if name.count("-decoder") else {}
    counts = {"num_labels": int(mask.sum()), "num_tokens": 30}
    ids, rows = torch.randint(vocab, (3, 7)), find_label_rows(labels)
    return Batch(ids, mask, labels, **counts, rows=np.arange(3), label_rows=rows, **sides)
