"""Shared code of predictions: tokenize texts or pairs, and compute the outputs of a model in batches.

Shape suffixes: B texts of a batch, N texts, D width of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from clearhead.base.arguments import LARGEST_WINDOW, count_from
from clearhead.base.errors import InputError, RunFailure, nth_text, renaming
from clearhead.base.hooks import is_watching, naming_texts
from clearhead.core import Transformer
from clearhead.data.arrays import fitting_lengths
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import Ids, InputCollator, ModelInputs
from clearhead.data.feed import compute_each, computes_late
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import batches_by_cost, device_of, read_tokens
from clearhead.text.long_texts import encode_start, warn_of_long_texts
from clearhead.text.tokenizer import Tokenizer

# Maximum number of tokens that is read of a text if neither the model nor its training has a limit.
LONGEST_INPUT = 4096
BLOCK: Final = 4096
"""The number of texts that are tokenized and sorted together on a GPU."""

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
    sides, is_cut = _encode_columns(tokenizer, split_pairs(texts), max_length)
    warn_of_long_texts(int(is_cut.sum()), max_length)
    return sides, is_cut


def _encode_columns(
    tokenizer: Tokenizer, columns: Sequence[Sequence[str]], max_length: int
) -> tuple[Sides, Bool[ndarray, " texts"]]:
    room = max_length - tokenizer.special_tokens.num_added(paired=len(columns) == 2)
    encoded = [encode_start(tokenizer, column, room) for column in columns]
    sides, is_cut = truncate([list(ids) for ids, _ in encoded], room)
    return sides, is_cut | np.any([flags for _, flags in encoded], axis=0)


def run_batch(module: Transformer, batch: Batch | ModelInputs) -> Float[Tensor, "batch *outputs"]:
    """Return the logits of a model for a batch, which must be on the device of the model."""
    out = module(batch.ids, batch.target_ids, mask=batch.mask, target_mask=batch.target_mask, segments=batch.segments)
    logits: Tensor | None = out.logits
    assert logits is not None, "the model has a head"
    return logits


@dataclass(frozen=True)
class TextBlock:
    """Ids of some texts, which are sorted by length into batches together.

    Args:
        sides: the ids of single texts, or of both texts of pairs, without special tokens.
        numbers: the number of each text, from 0.
    """

    sides: Sequence[Sequence[Ids]]
    numbers: Sequence[int]


BlockT = TypeVar("BlockT", bound=TextBlock)


def texts_together(module: Transformer) -> int:
    """Return the number of texts of a file or an iterator that are predicted together: more on a GPU, in blocks."""
    return 2 * BLOCK if computes_late(device_of(module)) else LARGEST_WINDOW


def block_starts(count: int, module: Transformer) -> range:
    """Return the first text of each block of texts that are tokenized together; the step is the size of a block.

    On a GPU the next block is tokenized while the device computes. Elsewhere, and inside `capture` or `edit`, all texts
    are one block.

    Args:
        count: the number of texts.
        module: the model.
    """
    is_divided = computes_late(device_of(module)) and not is_watching()
    return range(0, count, BLOCK if is_divided else max(1, count))


def batch_outputs(
    module: Transformer,
    collator: InputCollator,
    blocks: Iterable[BlockT],
    *,
    total: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Iterator[tuple[BlockT, list[int], Float[Tensor, "batch *outputs"]]]:
    """Yield the outputs of batches: block, indices of the texts in the block, and their logits in float32 on the CPU.

    The longest texts of a block come first. While activations are captured or edited, the texts keep their order. On a
    GPU, blocks and batches are made in a thread, and outputs are read late: see `compute_each`.

    Args:
        module: the model; in training mode, a replica in evaluation mode runs in its place.
        collator: the collator of the model's inputs.
        blocks: the ids of the texts.
        total: the number of texts in all blocks, to report progress; None means that there is only one block.
        batch_size: the maximum number of texts in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; a longer text forms a separate batch. None means
            `read_tokens`.
    """
    module = in_evaluation(module)
    budget = batch_tokens or read_tokens(module)

    def make_batches() -> Iterator[tuple[tuple[BlockT, list[int]], ModelInputs]]:
        for block in blocks:
            extra = collator.special_tokens.num_added(paired=len(block.sides) == 2)
            lengths = [sum(map(len, ids)) + extra for ids in zip(*block.sides, strict=True)]
            before = block.numbers[0] if block.numbers else 0
            for rows in batches_by_cost(lengths, budget=budget, most_rows=batch_size, before=before, total=total):
                yield (block, rows), collator.collate(*([side[row] for row in rows] for side in block.sides))

    def run(key: tuple[BlockT, list[int]], batch: ModelInputs) -> tuple[Tensor]:
        block, rows = key
        with torch.inference_mode(), naming_texts(block.numbers[row] for row in rows):
            return (run_batch(module, batch).float(),)

    for (block, rows), (logits,) in compute_each(make_batches(), run, device_of(module)):
        yield block, rows, logits


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
    block = TextBlock(sides, range(len(sides[0])))
    outputs = batch_outputs(module, collator, [block], batch_size=batch_size, batch_tokens=batch_tokens)
    return _put_in_order(outputs, len(sides[0]), width)


def pooled_text_outputs(
    module: Transformer,
    collator: InputCollator,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    max_length: int,
    width: int,
    check: Callable[[Sides], None] | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> tuple[Float[Tensor, "texts width"], Bool[ndarray, " texts"]]:
    """Tokenize texts or pairs; return an output vector for each, and a mask of the truncated ones. Warn of these.

    Args:
        module, collator, width, batch_size, batch_tokens: the arguments of `pooled_outputs`.
        tokenizer, texts, max_length: the arguments of `encode_sides`.
        check: a function that refuses ids, such as those of an empty text.

    Raises:
        InputError: texts and pairs are mixed, a text cannot be tokenized, or `check` refuses it.
    """
    columns, starts = split_pairs(texts), block_starts(len(texts), module)
    is_cut_N = np.zeros(len(texts), dtype=bool)

    def encode_blocks() -> Iterator[TextBlock]:
        for start in starts:
            span = slice(start, start + starts.step)
            with renaming(partial(count_from, start)):
                sides, is_cut_N[span] = _encode_columns(tokenizer, [column[span] for column in columns], max_length)
                if check is not None:
                    check(sides)
            yield TextBlock(sides, range(start, start + len(sides[0])))

    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    outputs = batch_outputs(module, collator, encode_blocks(), total=len(texts), **sizes)
    outputs_ND = _put_in_order(outputs, len(texts), width)
    warn_of_long_texts(int(is_cut_N.sum()), max_length)
    return outputs_ND, is_cut_N


def _put_in_order(
    outputs: Iterable[tuple[TextBlock, list[int], Tensor]], count: int, width: int
) -> Float[Tensor, "texts width"]:
    """Return the output vectors of `count` texts in the order of the texts, from the batches of `batch_outputs`."""
    outputs_ND = torch.zeros(count, width)
    for block, rows, out_BD in outputs:
        outputs_ND[[block.numbers[row] for row in rows]] = out_BD
    return outputs_ND


def check_finite(outputs: Float[Tensor, "*shape"]) -> None:
    """Raise an error if an output is NaN or infinite.

    Raises:
        RunFailure: an output is not finite.
    """
    refuse_not_finite(bool(torch.isfinite(outputs).all()))


def refuse_not_finite(is_finite: bool) -> None:
    """Raise an error unless all outputs are finite.

    Raises:
        RunFailure: an output is not finite.
    """
    if not is_finite:
        raise RunFailure(
            "the model's outputs are not finite: its weights are damaged or too large for this precision, or training "
            "diverged; try precision='fp32'"
        )
