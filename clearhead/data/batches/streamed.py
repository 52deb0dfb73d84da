"""Batches of a streamed text: each pool of it is laid out like an epoch of a text on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import BatchPlan, EpochBatches
from clearhead.data.batches.text import View
from clearhead.data.batches.text_stream import Place, Pool, TextStream
from clearhead.data.stores.documents import Documents


class StreamedBatches(EpochBatches[Batch]):
    """Endless training batches of a streamed text, whose position is saved in checkpoints.

    Batches hold the rows of all processes together, in an order that does not depend on how many there are.

    Args:
        stream: the text.
        view: gives a pool as batches.

    Attributes:
        reading_seconds: that reading and tokenizing the last pool took.

    Raises:
        InputError: the text cannot be read, or a row does not fit into a batch.
    """

    def __init__(self, stream: TextStream, view: Callable[[Documents], View]) -> None:
        self._stream, self._view = stream, view
        self._pools = stream.pools(Place())
        self.pool: Pool = self._next_pool()
        first = view(self.pool)
        own = {"shuffle_buffer": stream.characters, "data": stream.identity}
        super().__init__(first.plan, first.make, identity={**first.identity, **own})

    @property
    def epoch(self) -> int:
        """The number of passes over the text that are complete."""
        return self.pool.place.epoch

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch, and the identity of the batches, as JSON values."""
        return {**super().state(), "place": asdict(self.pool.place)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned; the file of that position is read from its beginning.

        Raises:
            InputError: the position belongs to other data or to another plan.
        """
        self.refuse_others(state)
        place = Place(**state["place"])
        if place != self.pool.place:
            self._pools = self._stream.pools(place)
            self._epoch = int(state["epoch"]) - 1
        self._go(int(state["epoch"]), int(state["batch"]))

    def _go(self, epoch: int, position: int) -> None:
        """Go to a batch of this pool or of the next one; pools are counted in place of epochs."""
        if epoch != self._epoch:
            self.pool = self._next_pool()
            view = self._view(self.pool)
            self.plan: BatchPlan = view.plan
            self._make = view.make
        super()._go(epoch, position)

    def _next_pool(self) -> Pool:
        began = time.perf_counter()
        pool = next(self._pools)
        self.reading_seconds: float = time.perf_counter() - began
        return pool
