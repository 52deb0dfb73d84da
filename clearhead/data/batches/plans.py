"""Batch plans, which choose the examples of each batch, and endless training batches of a plan.

A plan keeps every batch within a budget of tokens; its order depends only on the seed and the epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Indices, Rows
from clearhead.data.batches.base import padded_length, round_rows
from clearhead.data.stores.store import Store

# Random offset to the sort key, in tokens: batches vary from epoch to epoch; a larger one means more padding.
_JITTER = 3.0

BatchT = TypeVar("BatchT")


@runtime_checkable
class BatchPlan(Protocol):
    """Protocol of a plan that chooses the rows of each batch, for every epoch."""

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch, counted from 0; each is an array of row numbers."""

    def num_sizes(self) -> int:
        """Return the number of different batch sizes (in padded tokens of a stack) in the first epoch."""

    def has_one_length(self) -> bool:
        """Return whether the batches of the first epoch have one padded length, except at most one batch."""


class LengthPlan:
    """A plan that puts examples of similar lengths into a batch; rows times padded length stay within a budget.

    Args:
        lengths: the number of tokens of each example, special tokens included; for examples with two sides one array
            for the sources and one for the targets.
        batch_tokens: the budget: the maximum of rows * longest side in a batch, padding included.
        seed: the seed of the order, at least 0.

    Raises:
        InputError: there are too few examples, one is longer than the budget, or the seed is negative.
    """

    least_rows: ClassVar[int] = 1
    """The minimum number of rows in a batch."""

    def __init__(self, *lengths: Rows, batch_tokens: int, seed: int) -> None:
        self._source, self._target = (np.asarray(side, dtype=np.int64) for side in (lengths[0], lengths[-1]))
        assert len(self._source) == len(self._target), "sources and targets must be equally many"
        if len(self) < self.least_rows:
            raise InputError(f"there are {len(self)} examples; a batch needs at least {self.least_rows}: add examples")
        if seed < 0:
            raise InputError(f"seed is {seed}; expected 0 or more")
        self.batch_tokens = batch_tokens
        self.seed = seed
        self._longest = np.maximum(self._source, self._target)
        self._limits = int(self._source.max()), int(self._target.max())
        needed = self.least_rows * max(self._limits)
        if needed > batch_tokens:
            rows = f" and a batch needs at least {self.least_rows} examples" if self.least_rows > 1 else ""
            raise InputError(
                f"batch_tokens is {batch_tokens}, but the longest example has {max(self._limits)} tokens{rows}; "
                f"raise batch_tokens to at least {needed}, or lower max_length"
            )

    def __len__(self) -> int:
        return len(self._source)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all examples, both sides together."""
        return int(self._source.sum() + self._target.sum())

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify this plan."""
        return {"seed": self.seed, "batch_tokens": self.batch_tokens, "examples": len(self)}

    def num_positions(self, rows: Indices) -> int:
        """Return the number of positions of a batch, padding included, both sides together."""
        return len(rows) * sum(self._widths(rows))

    def _widths(self, rows: Indices) -> tuple[int, ...]:
        """Return the padded lengths of source and target in a batch."""
        longest = int(self._source[rows].max()), int(self._target[rows].max())
        return tuple(map(padded_length, longest, self._limits))

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch as arrays of row numbers; every example is in exactly one batch.

        Args:
            number: the number of the epoch, counted from 0.
        """
        raise NotImplementedError

    def _cut(self, order: Indices, first_share: float = 1.0) -> list[Indices]:
        """Cut sorted rows into batches, beginning with the longest rows.

        Args:
            order: the rows in ascending order of length: the last row of a batch is its longest and decides its shape.
            first_share: the size of the first batch, as a share of the largest possible one. It moves the borders of
                all batches, so that similar orders give different batches.
        """
        batches: list[Indices] = []
        end = len(order)
        while end:
            padded = padded_length(int(self._longest[order[end - 1]]), max(self._limits))
            count = round_rows(self.batch_tokens // padded)
            if not batches and count < end:
                count = round_rows(max(1, round(count * first_share)))
            start = max(0, end - count)
            batches.append(order[start:end])
            end = start
        return batches

    def num_sizes(self) -> int:
        """Return the number of different batch sizes (in padded tokens of a stack) in the first epoch."""
        return len({len(rows) * width for rows in self.epoch(0) for width in self._widths(rows)})

    def has_one_length(self) -> bool:
        """Return whether the batches of the first epoch have one padded length, except at most one batch."""
        widths = Counter(map(self._widths, self.epoch(0)))
        return widths.total() - max(widths.values()) <= 1

    def widest(self) -> Indices:
        """Return the row numbers of the batch with the most positions, padding included, in the first epoch."""
        return max(self.epoch(0), key=self.num_positions)

    def padding_waste(self, number: int) -> float:
        """Return the share of padding among all positions of an epoch, from 0 to 1."""
        return 1 - self.num_tokens / sum(map(self.num_positions, self.epoch(number)))


class LengthSortedPlan(LengthPlan):
    """A plan of batches that sorts rows by length; the sorted order varies a little from epoch to epoch.

    Args:
        lengths, batch_tokens, seed: the arguments of `LengthPlan`.
        shuffle: True if batches vary and are shuffled. False gives the same batches, in order of length, in every
            epoch.
    """

    def __init__(self, *lengths: Rows, batch_tokens: int, seed: int, shuffle: bool = True) -> None:
        super().__init__(*lengths, batch_tokens=batch_tokens, seed=seed)
        self.shuffle = shuffle

    def identity(self) -> dict[str, Any]:
        """Return JSON values that identify this plan."""
        return {**super().identity(), "shuffle": self.shuffle}

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch as arrays of row numbers; every example is in exactly one batch."""
        if not self.shuffle:
            return self._cut(self._order(np.zeros(len(self)), 1))[::-1]
        # Raw bits: numpy guarantees that this stream never changes, but not its distributions.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(2 * len(self) + 2)
        draws = (bits >> np.uint64(11)) * 2.0**-53
        order = self._order(draws[: len(self)], 1 if draws[-1] < 0.5 else -1)
        batches = self._cut(order, float(draws[-2]))
        return [batches[index] for index in np.argsort(draws[len(self) : len(self) + len(batches)], kind="stable")]

    def _order(self, jitter: Float[ndarray, " pairs"], direction: int) -> Rows:
        """Sort rows so that neighbours have equal lengths of the longer side, and similar lengths of the other side.

        Rows whose longer sides are equal are sorted by source length minus target length. The direction of this sort
        alternates from one length to the next, so that a batch across two lengths needs little padding. The random
        jitter gives examples other neighbours in every epoch.
        """
        turn = np.where(self._longest % 2 == 0, direction, -direction)
        return np.lexsort(((self._source - self._target) * turn + _JITTER * jitter, self._longest))


def random_stream(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one batch, which depends only on seed, epoch and index of the batch."""
    # The last number separates these streams from the stream of the plan; SeedSequence ignores trailing zeros.
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, index, 1])))


class EpochBatches(Generic[BatchT]):
    """Endless training batches, epoch after epoch; checkpoints save their position.

    Args:
        plan: the plan that chooses the rows of each batch.
        make: a function that makes a batch from row numbers, the number of the epoch, and the number of the batch.
        identity: JSON values that identify these batches, such as data, seed and sizes.
    """

    def __init__(
        self, plan: BatchPlan, make: Callable[[Indices, int, int], BatchT], *, identity: Mapping[str, Any]
    ) -> None:
        self.plan = plan
        self._make = make
        self._identity = {**identity, "shapes": "rounded"}
        self._epoch = 0
        self._position = 0
        self._batches = plan.epoch(0)

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of the current epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __next__(self) -> BatchT:
        batch = self.peek()
        self._position += 1
        if self._position == len(self._batches):
            self._move_to(self._epoch + 1, 0)
        return batch

    def peek(self) -> BatchT:
        """Return the next batch without moving the position past it."""
        return self._make(self._batches[self._position], self._epoch, self._position)

    def _move_to(self, epoch: int, position: int) -> None:
        if epoch != self._epoch:
            self._batches = self.plan.epoch(epoch)
        self._epoch, self._position = epoch, position

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch, and the identity of the batches, as JSON values."""
        return {"epoch": self._epoch, "batch": self._position, **self._identity}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state` returned, without making the batches before it.

        Raises:
            InputError: the position belongs to other data or to another plan.
        """
        self.refuse_others(state)
        epoch, position = int(state["epoch"]), int(state["batch"])
        self._move_to(epoch, position)
        assert 0 <= position < len(self._batches), "the batch number lies outside its epoch"

    def refuse_others(self, state: Mapping[str, Any]) -> None:
        """Refuse a position that belongs to other batches.

        Raises:
            InputError: the position belongs to other data or to another plan.
        """
        identity = self._identity
        changed = [key for key in identity if state.get(key) != identity[key]]
        if changed:
            faults = [
                "its content" if key == "data" else f"{key} was {state.get(key)!r}, now {identity[key]!r}"
                for key in changed
            ]
            raise InputError(
                f"the training data has changed since the checkpoint was written ({'; '.join(faults)}): restore it, or "
                "start anew in another run directory"
            )


def training_batches(store: Store, plan: LengthPlan, collate: Callable[[Indices], BatchT]) -> EpochBatches[BatchT]:
    """Return endless training batches of a store.

    Args:
        store: the examples.
        plan: the plan that chooses the examples of each batch.
        collate: a function that makes a batch from row numbers.
    """
    identity = {**plan.identity(), "data": store.identity}
    return EpochBatches(plan, lambda rows, epoch, index: collate(rows), identity=identity)


def validation_batches(store: Store, collate: Callable[[Indices], BatchT], *, batch_tokens: int) -> Iterator[BatchT]:
    """Yield validation batches: every example once, in order of length.

    Args:
        store: the examples.
        collate: a function that makes a batch from row numbers.
        batch_tokens: the budget of `LengthPlan`.

    Raises:
        InputError: an example is longer than the budget.
    """
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return map(collate, plan.epoch(0))
