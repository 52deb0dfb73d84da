"""Batches: of similar lengths, within a budget of tokens, in an order that seed and epoch alone decide.

Shape suffixes: B rows of a batch, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor

from clearhead.data.stores.arrays import Indices, Ragged, Rows
from clearhead.errors import InputError
from clearhead.text.special_tokens import PrefixSuffix

NO_LABEL = -100
# In tokens: how far apart the length differences of neighbours may be, so that batches vary; more of it pads more.
_JITTER = 3.0


BatchT = TypeVar("BatchT")
Make = Callable[[Indices, int, int], BatchT]


@dataclass(frozen=True)
class Batch:
    """Some examples as rectangles of ids; masks are True at real tokens, and None where all are.

    Args:
        ids: what the first stack reads.
        mask: where `ids` is real.
        labels: what the model should say: an id for each token of the last stack with NO_LABEL where nothing is asked;
            or for each example a class, a number, or for each class 1 or 0.
        num_labels: labels that count.
        num_tokens: real tokens that the stacks read.
        rows: which examples of the store these are.
        target_ids: what the decoder of a two-stack model reads, already shifted.
        target_mask: where `target_ids` is real.
        documents: the document each of `ids` belongs to; None: each row is one.
        segments: the segment of each of `ids`.
        prefix: where `ids` is part of the prefix that everything may attend to.
    """

    ids: Int64[Tensor, "batch source"]
    mask: Bool[Tensor, "batch source"] | None
    labels: Int64[Tensor, "batch *labels"] | Float[Tensor, "batch *labels"]
    num_labels: int
    num_tokens: int
    rows: Int64[ndarray, " _"]
    target_ids: Int64[Tensor, "batch target"] | None = None
    target_mask: Bool[Tensor, "batch target"] | None = None
    documents: Int64[Tensor, "batch source"] | None = None
    segments: Int64[Tensor, "batch source"] | None = None
    prefix: Bool[Tensor, "batch source"] | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch with its tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def pad_rows(
    side: Ragged, rows: Indices, around: PrefixSuffix, *, fill: int
) -> tuple[Int64[ndarray, "batch length"], Bool[ndarray, "batch length"], int]:
    """Lay texts out as rows, with what stands around each.

    Args:
        side: the texts.
        rows: which of them, in order; at least one.
        around: what stands in front of each and behind it.
        fill: the id of the padding.

    Returns:
        The ids, True where they are real, and how many are.
    """
    starts = side.offsets[rows]
    lengths = side.offsets[rows + 1] - starts
    front = len(around.prefix)
    column = np.arange(int(lengths.max()) + len(around))
    mask = column < lengths[:, None] + len(around)
    rectangle = np.full((len(rows), len(column)), fill, dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    flat = side.ids[np.arange(int(lengths.sum())) + np.repeat(starts - begins, lengths)]
    rectangle[:, :front] = around.prefix
    rectangle[(column >= front) & (column < lengths[:, None] + front)] = flat
    for place, index in enumerate(around.suffix):
        rectangle[np.arange(len(rows)), lengths + front + place] = index
    return rectangle, mask, int(mask.sum())


class LengthSortedPlan:
    """Which pairs go together: in every batch, rows times the longest side stay within the budget.

    Args:
        source_lengths: tokens of each source as the model reads them, end token included.
        target_lengths: tokens of each target, end token included.
        batch_tokens: the budget: the most that rows * max(longest source, longest target) may be.
        seed: from 0; one seed gives one order for every epoch.
        shuffle: False gives the same batches in order of length in every epoch.

    Raises:
        InputError: there are no pairs, a pair is longer than the budget, or the seed is negative.
    """

    def __init__(
        self, source_lengths: Rows, target_lengths: Rows, *, batch_tokens: int, seed: int, shuffle: bool = True
    ) -> None:
        assert len(source_lengths) == len(target_lengths), "lengths come in pairs"
        if not len(source_lengths):
            raise InputError("there are no pairs to make batches of")
        if seed < 0:
            raise InputError(f"seed is {seed}; expected 0 or more")
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.shuffle = shuffle
        self._source = np.asarray(source_lengths, dtype=np.int64)
        self._target = np.asarray(target_lengths, dtype=np.int64)
        longest = int(max(self._source.max(), self._target.max()))
        if longest > batch_tokens:
            raise InputError(
                f"batch_tokens is {batch_tokens}, but the longest pair has {longest} tokens on one side; "
                f"raise batch_tokens to at least {longest}, or lower max_length"
            )

    def __len__(self) -> int:
        return len(self._source)

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch, each the indices of its pairs; every pair is in exactly one.

        Args:
            number: the epoch, counted from 0.
        """
        if not self.shuffle:
            order = self._order(np.zeros(len(self)), 1)
            return self._cut(order, 1.0)
        # Raw bits: numpy keeps this stream the same for ever, which it does not promise for its distributions.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(2 * len(self) + 2)
        draws = (bits >> np.uint64(11)) * 2.0**-53
        order = self._order(draws[: len(self)], 1 if draws[-1] < 0.5 else -1)
        batches = self._cut(order, float(draws[-2]))
        return [batches[index] for index in np.argsort(draws[len(self) : len(self) + len(batches)], kind="stable")]

    def _order(self, jitter: Float[ndarray, " pairs"], direction: int) -> Rows:
        """Sort so that neighbours agree in the longer side, and nearly so in the other one.

        The second key turns round from one length to the next, so that a batch across that border stays narrow too;
        the jitter gives pairs other neighbours in every epoch.
        """
        longest = np.maximum(self._source, self._target)
        turn = np.where(longest % 2 == 0, direction, -direction)
        return np.lexsort(((self._source - self._target) * turn + _JITTER * jitter, longest))

    def _cut(self, order: Rows, first_share: float) -> list[Indices]:
        """Cut an order into batches; the first takes only a share of what it could, which moves every border."""
        longest = np.maximum(self._source, self._target)[order]
        batches: list[Indices] = []
        start = 0
        while start < len(order):
            # Lengths ascend, so the last row of a batch is its longest: the largest count of rows that fits.
            window = longest[start : start + self.batch_tokens]
            areas = window * np.arange(1, len(window) + 1)
            count = int(np.searchsorted(areas, self.batch_tokens, side="right"))
            if not batches and count < len(order):
                count = max(1, round(count * first_share))
            batches.append(order[start : start + count])
            start += count
        return batches

    def padding_waste(self, number: int) -> float:
        """Return the share of padding among all positions of source and target in an epoch, 0 to 1."""
        positions = sum(
            len(rows) * int(self._source[rows].max() + self._target[rows].max()) for rows in self.epoch(number)
        )
        return 1 - int(self._source.sum() + self._target.sum()) / positions


@runtime_checkable
class BatchPlan(Protocol):
    """Which rows go together in each epoch."""

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch, counted from 0, each the indices of its rows."""


def random_stream(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the generator of one batch: what is drawn for it depends on nothing that happened before."""
    # The last number keeps these streams apart from that of the plan: trailing zeros would not count.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, index, 1])))


class EpochBatches(Generic[BatchT]):
    """Batches for training without end: epoch after epoch, from a place that a checkpoint can hold.

    Args:
        plan: which rows go together.
        make: makes a batch of some rows, given the numbers of the epoch and of the batch within it.
        identity: JSON values that tell these batches from others: data, seed, sizes.
    """

    def __init__(self, plan: BatchPlan, make: Make[BatchT], *, identity: Mapping[str, Any]) -> None:
        self.plan = plan
        self._make = make
        self._identity = dict(identity)
        self._epoch = 0
        self._place = 0
        self._batches = plan.epoch(0)

    @property
    def epoch(self) -> int:
        """The number of epochs that are complete."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of the current epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        batch = self.peek()
        self._place += 1
        if self._place == len(self._batches):
            self._go(self._epoch + 1, 0)
        return batch

    def peek(self) -> BatchT:
        """Return the next batch and stay in place."""
        return self._make(self._batches[self._place], self._epoch, self._place)

    def _go(self, epoch: int, place: int) -> None:
        if epoch != self._epoch:
            self._batches = self.plan.epoch(epoch)
        self._epoch, self._place = epoch, place

    def state(self) -> dict[str, Any]:
        """Return the place of the next batch, and what it is a place in, as JSON."""
        return {"epoch": self._epoch, "batch": self._place, **self._identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state` returned; the work does not grow with the batches already seen.

        Raises:
            InputError: the place belongs to other data or to another plan of batches.
        """
        own = self._identity
        faults = [f"{key} was {state.get(key)!r}, now {own[key]!r}" for key in own if state.get(key) != own[key]]
        if faults:
            raise InputError(f"the place in the training data belongs to another set of batches: {'; '.join(faults)}")
        epoch, place = int(state["epoch"]), int(state["batch"])
        self._go(epoch, place)
        assert 0 <= place < len(self._batches), "a place that state() returned is inside its epoch"
