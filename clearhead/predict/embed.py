"""Texts to vectors: framed, sorted by length, read in batches, and given back in their order.

Shape suffixes: N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32
from numpy import ndarray

from clearhead import spec
from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.stores.labelled import truncate_pair
from clearhead.errors import InputError, RunFailure
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of, evaluation_mode, read_tokens
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer


def embed(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, str]],
    *,
    max_length: int | None = None,
    batch_tokens: int | None = None,
) -> Float32[ndarray, "texts width"]:
    """Return one vector for each text, pooled and normalised as the model's head says.

    A vector does not depend on which texts share a batch, up to the last bits of the arithmetic.

    Args:
        module: a model whose head makes one vector of a text; run in evaluation mode, its own mode is restored.
        tokenizer: of what the model reads.
        texts: texts, or pairs of texts that are read together; an empty text is read as its start and end token.
        max_length: what of a text is behind so many tokens, special ones with them, is cut off; None: nothing.
        batch_tokens: most padded tokens read together, None: `read_tokens`; a longer text is a batch of its own.

    Raises:
        InputError: the head does not pool, texts and pairs are mixed, or a text is longer than the model's positions.
        RunFailure: a vector is not finite.
    """
    width = vector_width(module)
    firsts, seconds = _encoded(tokenizer, texts)
    collator, device = InputCollator.of(module.spec, tokenizer), device_of(module)
    extra = collator.special_tokens.num_added(paired=seconds is not None)
    if max_length is not None:
        firsts, seconds = _cut(firsts, seconds, max_length - extra)
    lengths = [len(ids) + extra for ids in firsts]
    if seconds is not None:
        lengths = [length + len(second) for length, second in zip(lengths, seconds, strict=True)]
    check_lengths([range(length) for length in lengths], module.max_positions, what="text")
    vectors_ND = np.zeros((len(firsts), width), dtype=np.float32)
    with evaluation_mode(module), torch.inference_mode():
        for rows in batches_by_cost(lengths, budget=batch_tokens or read_tokens(module), most_rows=None):
            batch = collator.collate(
                [firsts[row] for row in rows], None if seconds is None else [seconds[row] for row in rows]
            ).to(device)
            found = module(batch.ids, batch.target_ids, mask=batch.mask, segments=batch.segments).logits
            vectors_ND[rows] = found.float().cpu().numpy()
    _refuse_broken(vectors_ND)
    return vectors_ND


def check_vectors(record: TaskRecord) -> None:
    """Refuse models whose head pools a text into something else than a vector.

    Raises:
        InputError: what comes out are scores of labels; the sentence says what to train.
    """
    if record.labels or record.label_kind is not None:
        raise InputError(
            f"this model was trained to '{record.kind}', so what it makes of a text are scores of labels, no vector: "
            'train it with [task] kind = "embed" and init = "…", the path of this model'
        )


def _encoded(
    tokenizer: Tokenizer, texts: Sequence[str | tuple[str, str]]
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Return the plain ids of texts, or of the first and of the second texts of pairs."""
    if isinstance(texts, str):
        raise InputError("embed() takes a list of texts; put the single text into a list")
    pairs: list[Sequence[str]] = [text for text in texts if not isinstance(text, str)]
    if not pairs:
        return tokenizer.encode_batch([text for text in texts if isinstance(text, str)]), None
    if len(pairs) < len(texts):
        raise InputError(
            f"expected texts or pairs of texts, received {len(texts) - len(pairs)} texts among {len(pairs)} pairs"
        )
    wrong = next((number for number, pair in enumerate(pairs, start=1) if len(pair) != 2), None)
    if wrong is not None:
        raise InputError(f"text {wrong} has {len(pairs[wrong - 1])} parts; expected a pair of two texts")
    firsts, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return tokenizer.encode_batch(firsts), tokenizer.encode_batch(seconds)


def _cut(
    firsts: list[list[int]], seconds: list[list[int]] | None, room: int
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Keep so many ids of each text, or of both of a pair together."""
    if seconds is None:
        return [ids[:room] for ids in firsts], None
    counts = [np.array([len(ids) for ids in side]) for side in (firsts, seconds)]
    kept = truncate_pair(counts[0], counts[1], room)
    first, second = (
        [ids[:count] for ids, count in zip(*side, strict=True)] for side in zip((firsts, seconds), kept, strict=True)
    )
    return first, second


def vector_width(module: Transformer) -> int:
    """Return the width of the vectors that a model makes of texts.

    Raises:
        InputError: its head does not make one vector of a text.
    """
    head = module.spec.head
    if head is None or not any(isinstance(layer, spec.Pool) for layer in head.layers):
        raise InputError(
            "embedding needs a model whose head pools a text into one vector, and the head of this one does not; "
            'train one with [task] kind = "embed"'
        )
    top = module.spec.decoder or module.spec.encoder
    assert top is not None, "a validated model has a stack"
    return next((layer.size for layer in reversed(head.layers) if isinstance(layer, spec.Linear)), top.output_width)


def _refuse_broken(vectors_ND: Float32[ndarray, "texts width"]) -> None:
    broken = np.flatnonzero(~np.isfinite(vectors_ND).all(1))
    if len(broken):
        raise RunFailure(
            f"the vector of text {broken[0] + 1} is not finite, and those of {len(broken) - 1} others: the weights are "
            "damaged or too large for this precision; try precision='fp32'"
        )
