"""Batches of a text larger than memory and disk: pools of text are read, tokenized, used and dropped.

A pool is the text that is shuffled together. The ends of pools depend only on the text and on the size of a pool, so
every process makes the same pools. A position in the text is a few numbers. Each pool makes batches like one epoch of a
text on disk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged, Rows, id_dtype
from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import BatchPlan, EpochBatches
from clearhead.data.batches.text import View
from clearhead.data.sources.lines import size_and_ends
from clearhead.data.sources.texts import TextChunk, TextShard
from clearhead.data.stores.corpus import Documents
from clearhead.data.tokenize.document_chunks import cut_before, encode_chunks
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer

# Number of the random stream for the order of the files; other draws of the seed have other streams.
_ORDER_STREAM = 2
_MOST_SAMPLED = 1024
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class StreamPosition:
    """The position in a streamed text at which a pool begins.

    Args:
        epoch: the number of complete passes over the files.
        shard: the number of files that were read completely in this pass.
        chunk: the number of chunks that were read from the next file.
        character: the number of characters that were read from the next chunk.
        last_id: the id before this position, if it is inside a document. None means that a document begins here.
    """

    epoch: int = 0
    shard: int = 0
    chunk: int = 0
    character: int = 0
    last_id: int | None = None


class TextPool(Documents):
    """The tokenized documents of a pool; the first may have begun before the pool, and the last may continue after it.

    Args:
        documents: the ids of each document.
        tokenizer: the tokenizer that made the ids.
        position: the position at which the pool begins.
        text_bytes: the size of its text in bytes of UTF-8.
        special: the ids before and after those of each document.
    """

    def __init__(
        self,
        documents: Ragged,
        tokenizer: Tokenizer,
        *,
        position: StreamPosition,
        text_bytes: int,
        special: Sequence[PrefixSuffix],
    ) -> None:
        lengths = documents.lengths + np.array([len(around) for around in special], dtype=np.int64) - 1
        nonempty = np.flatnonzero((documents.lengths > 0) & (lengths > 0))
        super().__init__(documents.take(nonempty), tokenizer)
        self.position: StreamPosition = position
        self.text_bytes: int = text_bytes
        self._special: list[PrefixSuffix] = [special[index] for index in nonempty.tolist()]
        self._lengths = lengths[nonempty]

    def boundary_ids(self, document: int) -> PrefixSuffix:
        """Return the ids before and after the ids of a document in its sequence, such as special ids."""
        return self._special[document]

    @property
    def input_lengths(self) -> tuple[Rows]:
        """The number of input ids that the model reads for each document."""
        return (self._lengths,)


@dataclass(frozen=True)
class TextStream:
    """A text stream: yields the pools of some files, pass after pass; the seed decides the order of files in a pass.

    Args:
        shards: the files.
        tokenizer: the tokenizer of the text.
        characters: the maximum size of a pool in characters; a longer document is cut only where the tokenizer gives
            the same ids.
        seed: the seed of the order of files, at least 0.
    """

    shards: Sequence[TextShard]
    tokenizer: Tokenizer
    characters: int
    seed: int

    @property
    def identity(self) -> str:
        """A hash of the size, the first bytes and the last bytes of every file; checkpoints store it."""
        files = [[shard.path.name, *size_and_ends(shard.path)] for shard in self.shards]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()

    def pools(self, position: StreamPosition) -> Iterator[TextPool]:
        """Yield pools of text, starting at a position in the files, pass after pass without end.

        Raises:
            InputError: a file cannot be read, or no file has a token in it.
        """
        while True:
            count = 0
            for pool in self._epoch(position):
                if len(pool):
                    count += 1
                    yield pool
            if not count and position == StreamPosition(position.epoch):
                first = self.shards[0].path
                raise InputError(
                    f"{first}: expected text, found nothing but white space in all {len(self.shards)} files"
                )
            position = StreamPosition(position.epoch + 1)

    def _epoch(self, position: StreamPosition) -> Iterator[TextPool]:
        """Yield the pools of text of one pass over the files, starting at a position."""
        begin, held, room = position, list[TextChunk](), self.characters

        def close(shard: int, chunk: int, character: int, *, goes_on: bool) -> TextPool:
            nonlocal begin, held, room
            pool, last_id = self._tokenize_pool(held, begin, goes_on=goes_on)
            begin, held, room = StreamPosition(position.epoch, shard, chunk, character, last_id), [], self.characters
            return pool

        for (shard, index, taken, chunk), following in _with_next(self._chunks(position)):
            is_whole = chunk.starts and (following is None or following[-1].starts)
            text, starts = chunk.text, chunk.starts
            while len(text) > room:
                fits_alone = is_whole and starts and len(text) <= self.characters
                cut = None if fits_alone else cut_before(room, text, self.tokenizer)
                if cut is None and not held:
                    cut = (room, room)
                if cut is not None:
                    held.append(chunk._replace(text=text[: cut[0]], starts=starts))
                    text, starts, taken = text[cut[1] :], False, taken + cut[1]
                yield close(shard, index, taken, goes_on=not starts)
            if text:
                held.append(chunk._replace(text=text, starts=starts))
                room -= len(text)
        if held:
            yield close(len(self.shards), 0, 0, goes_on=False)

    def _chunks(self, position: StreamPosition) -> Iterator[tuple[int, int, int, TextChunk]]:
        """Yield the chunks of one pass from a position on: file number, chunk number, skipped characters, chunk."""
        order = self._order(position.epoch)
        for number in range(position.shard, len(order)):
            first = position.chunk if number == position.shard else 0
            chunks = itertools.islice(self.shards[order[number]].chunks(), first, None)
            for index, chunk in enumerate(chunks, start=first):
                taken = position.character if (number, index) == (position.shard, position.chunk) else 0
                if taken:
                    chunk = chunk._replace(text=chunk.text[taken:], starts=False)
                yield number, index, taken, chunk

    def _order(self, epoch: int) -> list[int]:
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch, 0, _ORDER_STREAM]))
        return [int(number) for number in np.argsort(bits.random_raw(len(self.shards)), kind="stable")]

    def _tokenize_pool(
        self, chunks: Sequence[TextChunk], position: StreamPosition, *, goes_on: bool
    ) -> tuple[TextPool, int | None]:
        """Return a pool made of some chunks of text, and its last id if the last document continues after the pool."""
        ids, lengths = [np.empty(0, dtype=id_dtype(self.tokenizer))], list[int]()
        for rows, starts in encode_chunks(chunks, self.tokenizer):
            ids.append(rows.ids)
            for length, is_new in zip(rows.lengths.tolist(), starts, strict=True):
                if is_new:
                    lengths.append(0)
                lengths[-1] += length
        around = self.tokenizer.special_tokens.for_target
        special = [around] * len(lengths)
        last_id = position.last_id
        if last_id is not None:
            special[0] = PrefixSuffix((last_id,), special[0].suffix)
        if goes_on:
            special[-1] = replace(special[-1], suffix=())
            if lengths[-1]:
                last_id = int(ids[-1][-1])
            elif len(lengths) > 1:
                last_id = None
        documents = Ragged.of(np.concatenate(ids), np.array(lengths, dtype=np.int64))
        num_bytes = sum(len(chunk.text.encode()) for chunk in chunks)
        pool = TextPool(documents, self.tokenizer, position=position, text_bytes=num_bytes, special=special)
        return pool, last_id if goes_on else None


def sample(shards: Sequence[TextShard], characters: int) -> Iterator[TextChunk]:
    """Yield the beginnings of evenly chosen files, each equally long, with at most `characters` characters together."""
    count = min(len(shards), _MOST_SAMPLED)
    for number in range(count):
        room = max(1, characters // count)
        for chunk in shards[number * len(shards) // count].chunks():
            yield chunk._replace(text=chunk.text[:room])
            room -= len(chunk.text)
            if room <= 0:
                break


def _with_next(items: Iterable[ItemT]) -> Iterator[tuple[ItemT, ItemT | None]]:
    """Yield each item with the item after it, or None after the last one."""
    iterator = iter(items)
    current = next(iterator, None)
    while current is not None:
        following = next(iterator, None)
        yield current, following
        current = following


class StreamedBatches(EpochBatches[Batch]):
    """Endless training batches of a streamed text; checkpoints save their position.

    A batch holds the rows of all processes, in an order that does not depend on the number of processes.

    Args:
        stream: the text stream.
        view: a function that returns the view of a pool.

    Attributes:
        reading_seconds: the time in seconds that reading and tokenizing the last pool took.

    Raises:
        InputError: the text cannot be read, or a row does not fit into a batch.
    """

    def __init__(self, stream: TextStream, view: Callable[[Documents], View]) -> None:
        self._stream, self._view = stream, view
        self._pools = stream.pools(StreamPosition())
        self.pool: TextPool = self._next_pool()
        first = view(self.pool)
        stream_identity = {"shuffle_buffer": stream.characters, "data": stream.identity}
        super().__init__(first.plan, first.make, identity={**first.identity, **stream_identity})

    @property
    def epoch(self) -> int:
        """The number of completed passes over the text."""
        return self.pool.position.epoch

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch, and the identity of the batches, as JSON values."""
        return {**super().state(), "place": asdict(self.pool.position)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state` returned; the file at that position is read from its beginning.

        Raises:
            InputError: the position belongs to other data or to another plan.
        """
        self.refuse_others(state)
        position = StreamPosition(**state["place"])
        if position != self.pool.position:
            self._pools = self._stream.pools(position)
            self._epoch = int(state["epoch"]) - 1
        self._move_to(int(state["epoch"]), int(state["batch"]))

    def _move_to(self, epoch: int, position: int) -> None:
        """Move to a batch of the current pool or of the next one; `epoch` is the number of the pool, not the pass."""
        if epoch != self._epoch:
            self.pool = self._next_pool()
            view = self._view(self.pool)
            self.plan: BatchPlan = view.plan
            self._make = view.make
        super()._move_to(epoch, position)

    def _next_pool(self) -> TextPool:
        began = time.perf_counter()
        pool = next(self._pools)
        self.reading_seconds: float = time.perf_counter() - began
        return pool
