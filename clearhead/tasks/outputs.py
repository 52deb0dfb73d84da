"""Shared code of predictions: tokenize texts or pairs, and compute the outputs of a model in batches.

Shape suffixes: B texts of a batch, N texts, D width of an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from clearhead.base.errors import InputError, RunFailure, nth_text
from clearhead.base.hooks import naming_texts
from clearhead.core import Transformer
from clearhead.data.arrays import fitting_lengths
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import Ids, InputCollator, ModelInputs
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import batches_by_cost, device_of, read_tokens
from clearhead.text.long_texts import encode_start, warn_of_long_texts
from clearhead.text.tokenizer import Tokenizer

# Maximum number of tokens that is read of a text if neither the model nor its training has a limit.
LONGEST_INPUT = 4096

Sides = list[list[Ids]]
"""The ids of single texts, or of the first and of the second texts of pairs, without special tokens."""


def split_pairs(texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return single texts as one list, or pairs as a list of first texts and a list of second texts.

    Args:
        texts: the texts, or the pairs of texts; not mixed.

    Raises:
        InputError: texts and pairs are mixed, or a pair does not have two texts.
    """
    single = [text for text in texts if isinstance(text, str)]
    pairs: list[Sequence[str]] = [text for text in texts if not isinstance(text, str)]
    if not pairs:
        return [single]
    if single:
        raise InputError(f"expected only texts or only pairs, got {len(single)} texts among {len(pairs)} pairs")
    wrong = next((number for number, pair in enumerate(pairs, start=1) if len(pair) != 2), None)
    if wrong is not None:
        raise InputError(nth_text(wrong) + f" has {len(pairs[wrong - 1])} texts; expected a pair of two texts")
    return [[pair[side] for pair in pairs] for side in (0, 1)]


def truncate(sides: Sides, room: int) -> tuple[Sides, Bool[ndarray, " texts"]]:
    """Truncate each text or pair to `room` ids, and return the ids with a mask that is True for truncated ones."""
    lengths = [np.array([len(ids) for ids in side], dtype=np.int64) for side in sides]
    kept_lengths = fitting_lengths(lengths, room)
    cut = [
        [ids[:count] for ids, count in zip(side, counts, strict=True)]
        for side, counts in zip(sides, kept_lengths, strict=True)
    ]
    return cut, np.any([counts < before for counts, before in zip(kept_lengths, lengths, strict=True)], axis=0)


def max_input_length(module: Transformer, max_length: int | None) -> int:
    """Return the maximum number of tokens that a model reads, special tokens included.

    Args:
        module: the model.
        max_length: the longest sequence in its training; None means unknown.
    """
    limits = [limit for limit in (max_length, module.max_positions) if limit is not None]
    longest = min(limits, default=LONGEST_INPUT)
    return min(longest, module.spec.position_limit or longest)


def encode_sides(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], max_length: int
) -> tuple[Sides, Bool[ndarray, " texts"]]:
    """Return the ids of texts or pairs, truncated to fit, and a mask of the truncated ones; warn with their number.

    Args:
        tokenizer: the tokenizer of the model's input.
        texts: the texts, or the pairs of texts; not mixed.
        max_length: the maximum number of tokens that the model reads, special tokens included.

    Raises:
        InputError: texts and pairs are mixed, or a text cannot be tokenized.
    """
    columns = split_pairs(texts)
    room = max_length - tokenizer.special_tokens.num_added(paired=len(columns) == 2)
    encoded = [encode_start(tokenizer, column, room) for column in columns]
    sides, is_cut = truncate([list(ids) for ids, _ in encoded], room)
    is_cut |= np.any([flags for _, flags in encoded], axis=0)
    warn_of_long_texts(int(is_cut.sum()), max_length)
    return sides, is_cut


def run_batch(module: Transformer, batch: Batch | ModelInputs) -> Float[Tensor, "batch *outputs"]:
    """Return the logits of a model for a batch, which must be on the device of the model."""
    out = module(batch.ids, batch.target_ids, mask=batch.mask, target_mask=batch.target_mask, segments=batch.segments)
    logits: Tensor | None = out.logits
    assert logits is not None, "the model has a head"
    return logits


def batch_outputs(
    module: Transformer,
    collator: InputCollator,
    firsts: Sequence[Ids],
    seconds: Sequence[Ids] | None = None,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Iterator[tuple[list[int], Float[Tensor, "batch *outputs"]]]:
    """Yield batches of outputs: the indices of the texts in the batch, and their logits in float32 on the CPU.

    The longest texts come first. While activations are captured or edited, the texts keep their order.

    Args:
        module: the model; in training mode, a replica in evaluation mode runs in its place.
        collator: the collator of the model's inputs.
        firsts: the ids of each text, or of the first text of each pair, without special tokens.
        seconds: the ids of the second text of each pair; None means single texts.
        batch_size: the maximum number of texts in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; a longer text forms a separate batch. None means
            `read_tokens`.
    """
    module = in_evaluation(module)
    extra, device = collator.special_tokens.num_added(paired=seconds is not None), device_of(module)
    lengths = [len(ids) + extra for ids in firsts]
    if seconds is not None:
        lengths = [length + len(ids) for length, ids in zip(lengths, seconds, strict=True)]
    for rows in batches_by_cost(lengths, budget=batch_tokens or read_tokens(module), most_rows=batch_size):
        second_rows = None if seconds is None else [seconds[row] for row in rows]
        batch = collator.collate([firsts[row] for row in rows], second_rows)
        with torch.inference_mode(), naming_texts(rows):
            logits = run_batch(module, batch.to(device)).float().cpu()
        yield rows, logits


def pooled_outputs(
    module: Transformer,
    collator: InputCollator,
    sides: Sides,
    *,
    width: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Float[Tensor, "texts width"]:
    """Return one output vector per text or pair of texts, in order, float32 on the CPU.

    Args:
        module: a model whose head pools each text or pair into one vector.
        collator, batch_size, batch_tokens: the arguments of `batch_outputs`.
        sides: the ids of single texts, or of both texts of pairs.
        width: the width of an output vector.
    """
    found_ND = torch.zeros(len(sides[0]), width)
    for rows, out_BD in batch_outputs(module, collator, *sides, batch_size=batch_size, batch_tokens=batch_tokens):
        found_ND[rows] = out_BD
    return found_ND


def check_finite(outputs: Float[Tensor, "*shape"]) -> None:
    """Raise an error if an output is NaN or infinite.

    Raises:
        RunFailure: an output is not finite.
    """
    if not bool(torch.isfinite(outputs).all()):
        raise RunFailure(
            "the model's outputs are not finite: its weights are damaged or too large for this precision, or training "
            "diverged; try precision='fp32'"
        )
