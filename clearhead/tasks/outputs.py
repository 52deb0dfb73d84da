"""What all predictions share: texts or pairs as ids, and the outputs of a model for them in batches of similar lengths.

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
from clearhead.generate.batching import batches_by_cost, default_batch_tokens, device_of
from clearhead.text.long_texts import encode_start, warn_of_long_texts
from clearhead.text.tokenizer import Tokenizer

# In tokens: what is read of a text where neither the model nor its training has a limit.
LONGEST_INPUT = 4096

Sides = list[list[Ids]]
"""The ids of single texts, or of the first and of the second texts of pairs, without special tokens."""


def split_pairs(texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[list[str]]:
    """Return single texts as one list, pairs as a list of the first and a list of the second texts.

    Args:
        texts: all texts, or all pairs.

    Raises:
        InputError: texts and pairs are mixed, or a pair is not of two texts.
    """
    single = [text for text in texts if isinstance(text, str)]
    pairs: list[Sequence[str]] = [text for text in texts if not isinstance(text, str)]
    if not pairs:
        return [single]
    if single:
        raise InputError(f"expected texts or pairs of texts, received {len(single)} texts among {len(pairs)} pairs")
    wrong = next((number for number, pair in enumerate(pairs, start=1) if len(pair) != 2), None)
    if wrong is not None:
        raise InputError(nth_text(wrong) + f" has {len(pairs[wrong - 1])} parts; expected a pair of two texts")
    return [[pair[side] for pair in pairs] for side in (0, 1)]


def truncate(sides: Sides, room: int) -> tuple[Sides, Bool[ndarray, " texts"]]:
    """Keep the first `room` ids of each text, or of each pair together; also say which texts were cut."""
    lengths = [np.array([len(ids) for ids in side], dtype=np.int64) for side in sides]
    kept_lengths = fitting_lengths(lengths, room)
    cut = [
        [ids[:count] for ids, count in zip(side, counts, strict=True)]
        for side, counts in zip(sides, kept_lengths, strict=True)
    ]
    return cut, np.any([counts < before for counts, before in zip(kept_lengths, lengths, strict=True)], axis=0)


def max_input_length(module: Transformer, max_length: int | None) -> int:
    """Return the longest sequence that a model reads, special tokens included.

    Args:
        module: the model.
        max_length: of its training texts; None: not known.
    """
    limits = [limit for limit in (max_length, module.max_positions) if limit is not None]
    longest = min(limits, default=LONGEST_INPUT)
    return min(longest, module.spec.position_limit or longest)


def encode_sides(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], max_length: int
) -> tuple[Sides, Bool[ndarray, " texts"]]:
    """Return the ids of texts, or of both texts of pairs, truncated; also say which were. A warning counts those.

    Args:
        tokenizer: of the model's input.
        texts: all texts, or all pairs.
        max_length: the longest sequence that the model reads, special tokens included.

    Raises:
        InputError: texts and pairs are mixed, or one of them cannot be tokenized.
    """
    columns = split_pairs(texts)
    room = max_length - tokenizer.special_tokens.num_added(paired=len(columns) == 2)
    encoded = [encode_start(tokenizer, column, room) for column in columns]
    sides, is_cut = truncate([list(ids) for ids, _ in encoded], room)
    is_cut |= np.any([flags for _, flags in encoded], axis=0)
    warn_of_long_texts(int(is_cut.sum()), max_length)
    return sides, is_cut


def run_batch(module: Transformer, batch: Batch | ModelInputs) -> Float[Tensor, "batch *outputs"]:
    """Return a model's logits for a batch on its device."""
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
    """Yield the texts of each batch, as indices, with their logits, float32 on the CPU.

    The longest texts come first. While the calling context watches a model, the texts keep their order.

    Args:
        module: one in training runs as a replica in evaluation mode.
        collator: how the model reads texts.
        firsts: ids of each text, or of the first text of each pair, without special tokens.
        seconds: ids of the second text of each pair; None: single texts.
        batch_size: most texts of one batch; None: no limit but the tokens.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer text is a batch of its own.
    """
    module = in_evaluation(module)
    extra, device = collator.special_tokens.num_added(paired=seconds is not None), device_of(module)
    lengths = [len(ids) + extra for ids in firsts]
    if seconds is not None:
        lengths = [length + len(ids) for length, ids in zip(lengths, seconds, strict=True)]
    for rows in batches_by_cost(lengths, budget=batch_tokens or default_batch_tokens(module), most_rows=batch_size):
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
    """Return one output vector for each text, or pair of texts, in order, float32 on the CPU.

    Args:
        module: its head pools.
        collator, batch_size, batch_tokens: as for `batch_outputs`.
        sides: ids of single texts, or of both texts of pairs.
        width: of an output.
    """
    found_ND = torch.zeros(len(sides[0]), width)
    for rows, out_BD in batch_outputs(module, collator, *sides, batch_size=batch_size, batch_tokens=batch_tokens):
        found_ND[rows] = out_BD
    return found_ND


def check_finite(outputs: Float[Tensor, "*shape"]) -> None:
    """Refuse outputs that are NaN or infinite.

    Raises:
        RunFailure: an output is not finite.
    """
    if not bool(torch.isfinite(outputs).all()):
        raise RunFailure(
            "the model's outputs are not finite: its weights are damaged or too large for this precision, or training "
            "diverged; try precision='fp32'"
        )
