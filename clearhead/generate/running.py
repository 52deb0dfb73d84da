"""A running batch: sequences of any length join it and leave it between two steps of the decoder.

Sequences that decode together form a member: sequences that choose their tokens alike, or a beam search over several
sentences. Members with a shared cache have their newest keys in the same column. Each step of the decoder reads the
newest token of all rows. A row counts its keys and positions from its own first token. So its result equals the result
of the row alone: exactly if `Runner.is_batch_invariant` is true, otherwise up to rounding.

Shapes: R rows of a member, V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.base.hooks import naming_texts
from clearhead.base.mapped_files import refuse_altered_weights
from clearhead.base.progress import update
from clearhead.core import Cache, Transformer
from clearhead.fast.cache import IndexedCache, concat_caches, copy_row
from clearhead.fast.native.load import uses_kernels
from clearhead.generate.batching import batch_costs
from clearhead.generate.results import GeneratedSequence, Sentence

Generated = GeneratedSequence | Sentence
"""A sequence that is generated, or a sentence that beam search translates or continues."""
GROUP_TOKENS: Final = 4096
"""Row length in tokens from which rows share a cache only with rows of up to twice their length.

A cache is padded to its longest row.
"""
CHECKED_TOKENS: Final = 64
"""Number of keys after which a cache group looks for rows that have outgrown it."""
LEAST_FREE_SHARE: Final = 0.25
"""Share of a batch that must be free before others join, since joining copies all keys and values."""


@dataclass(frozen=True)
class SurvivingRows:
    """Rows and encoder sentences of a batch member that remain after a decoding step.

    Args:
        rows: index of the earlier row that each row continues. None means that the rows are unchanged.
        sentences: indices of the encoder-memory sentences that still have rows. None means all.
    """

    rows: Int[Tensor, " rows"] | None = None
    sentences: Int[Tensor, " sentences"] | None = None


@dataclass(frozen=True)
class SequenceProgress:
    """Effect of one decoding step on a sequence: its new text, and whether it has ended.

    Args:
        sequence: the sequence.
        text: text that became final in this step.
        is_done: True if the sequence has ended.
    """

    sequence: Generated
    text: str
    is_done: bool


class Member(ABC):
    """Rows of a running batch that choose their tokens together, such as the beams of one search."""

    @property
    @abstractmethod
    def sequences(self) -> Sequence[Generated]:
        """The sequences that have not ended."""

    @property
    @abstractmethod
    def tokens(self) -> Int[Tensor, "rows 1"]:
        """The newest token of each row, which the model has not read yet."""

    @property
    @abstractmethod
    def num_sentences(self) -> int:
        """Number of encoder-memory sentences that the rows read."""

    @abstractmethod
    def advance(self, logits_RV: Float[Tensor, "rows vocab"]) -> tuple[list[SequenceProgress], SurvivingRows]:
        """Choose a token for each row; a member has no rows after all of its sequences have ended."""

    @abstractmethod
    def drop(self, sequence: Generated) -> SurvivingRows:
        """Remove a sequence from the batch before it has ended."""

    @abstractmethod
    def absorb(self, other: Member) -> bool:
        """Append the rows of another member, if both choose their tokens alike; return whether that was done."""

    def copy_row(self, sequence: Generated) -> tuple[int, Member] | None:
        """Return the index of a row and a member with this row alone; None if the rows cannot be separated."""
        return None


@dataclass(frozen=True)
class PrefilledMember:
    """A member whose prompts the model has read.

    Args:
        member: the member; its first tokens have not been chosen.
        cache: cache with the rows of the prompts; an `IndexedCache` if other members may join.
        logits: logits of the next token of each row.
    """

    member: Member
    cache: Cache
    logits: Float[Tensor, "rows vocab"]


@dataclass(frozen=True)
class Paused:
    """A member with one row that has left its batch and can rejoin with its keys and values."""

    member: Member
    cache: IndexedCache


class RunningBatch:
    """Members that decode together, in groups with a shared cache.

    Args:
        module: the model in evaluation mode, with a decoder.
    """

    def __init__(self, module: Transformer) -> None:
        self.module = module
        self._groups: dict[Hashable, SharedCacheGroup] = {}

    @property
    def members(self) -> list[Member]:
        """The members that have rows."""
        return [member for group in self._groups.values() for member in group.members]

    @property
    def num_rows(self) -> int:
        """Number of rows in all groups."""
        return sum(len(member.tokens) for member in self.members)

    def join(self, prefilled: Sequence[PrefilledMember]) -> list[SequenceProgress]:
        """Choose the first tokens of new members and add these members to the batch.

        Args:
            prefilled: new members; none has rows in this batch.

        Raises:
            InputError: a mapped file with the weights of the model was changed on disk.
        """
        refuse_altered_weights(self.module)
        progress: list[SequenceProgress] = []
        joining: list[PrefilledMember] = []
        for start in prefilled:
            before = len(start.logits), start.member.num_sentences
            done, survivors = start.member.advance(start.logits)
            progress += done
            _reorder_cache(start.cache, [_RowChange(start.member, survivors, *before)])
            if len(start.member.tokens):
                joining.append(start)
        self.resume(joining)
        return progress

    def pause(self, sequence: Generated) -> Paused | None:
        """Take a sequence out with its keys and values; return None if it is not in the batch or not separable."""
        paused = next(filter(None, (group.pause(sequence) for group in self._groups.values())), None)
        self._drop_empty_groups()
        return paused

    def resume(self, paused: Sequence[PrefilledMember | Paused]) -> None:
        """Add paused or prefilled members that have already chosen a token to the batch."""
        joining: dict[Hashable, list[PrefilledMember | Paused]] = {}
        for start in paused:
            joining.setdefault(_group_key(start), []).append(start)
        for kind, some in joining.items():
            if kind not in self._groups:
                # From here on the new group gets an equal share of the time.
                used = min((group.seconds for group in self._groups.values()), default=0.0)
                self._groups[kind] = SharedCacheGroup(self.module, _length_class(some[0].cache), used)
            self._groups[kind].join(some)

    def step(self) -> list[SequenceProgress]:
        """Choose the next token of each sequence in the groups that have used the least computation time.

        Raises:
            InputError: a mapped file with the weights of the model was changed on disk.
        """
        least = min((group.seconds for group in self._groups.values()), default=0.0)
        progress: list[SequenceProgress] = []
        for group in [group for group in self._groups.values() if group.seconds <= least]:
            progress += group.step()
            self.resume(group.pause_longest())
        self._drop_empty_groups()
        refuse_altered_weights(self.module)  # before anyone sees a wrong token
        return progress

    def drop(self, sequence: Generated) -> None:
        """Remove an unfinished sequence and its rows from the batch.

        Args:
            sequence: the sequence; ignored if no member has it.
        """
        for group in self._groups.values():
            group.drop(sequence)
        self._drop_empty_groups()

    def close(self) -> None:
        """End the batch and give back what it holds besides its groups."""

    def _drop_empty_groups(self) -> None:
        self._groups = {kind: group for kind, group in self._groups.items() if group.members}


def running_batch(
    module: Transformer, *, rows: int, tokens: int, sources: int = 0, needs_every_token: bool = False
) -> RunningBatch:
    """Return an empty running batch: in slots, with recorded steps, on a GPU; otherwise with a growing cache.

    Args:
        module: the model in evaluation mode.
        rows: number of rows that decode at the same time.
        tokens: maximum number of tokens of a row, prompt and generated.
        sources: maximum number of source tokens of a row; 0 for a decoder-only model.
        needs_every_token: True reports each token of each row. False may report rows without text at their end only.
    """
    device = next(module.parameters()).device
    if device.type != "cuda" or not uses_kernels():
        return RunningBatch(module)
    from clearhead.generate.slots.batch import SlotSize, slot_batch

    size = SlotSize(rows, tokens, sources)
    return slot_batch(module, size, needs_every_token=needs_every_token) or RunningBatch(module)


def _texts_of(member: Member) -> list[int]:
    """Return the prompt index of each row of a member."""
    each = len(member.tokens) // len(member.sequences)
    return [sequence.prompt for sequence in member.sequences for _ in range(each)]


def _group_key(start: PrefilledMember | Paused) -> Hashable:
    """Return a key that is equal for members that can share a cache.

    Beams share the keys of an encoder memory, so all sentences of a group have equally many rows. The axes of custom
    modules' state are unknown, so no member can join such a cache. The same holds for a decoder without attention.
    """
    beams, cache = len(start.member.tokens) // start.member.num_sentences, start.cache
    is_alone = isinstance(cache, IndexedCache) and not cache.is_separable
    return beams, id(start.member) if is_alone else _length_class(cache)


def _length_class(cache: Cache) -> int:
    """Return the length class of rows: 0 below `GROUP_TOKENS`, plus 1 for each doubling of the length."""
    return (cache.length // GROUP_TOKENS).bit_length()


@dataclass(frozen=True)
class _RowChange:
    """The rows and sentences of one member that survive a step, and their numbers before the step."""

    member: Member
    survivors: SurvivingRows
    rows: int
    sentences: int


class SharedCacheGroup:
    """Members that share one KV cache.

    Args:
        module: the model of the batch.
        length_class: length class of the rows when they join.
        seconds: time that the group's steps have taken; starts at the least time of the other groups.
    """

    def __init__(self, module: Transformer, length_class: int, seconds: float) -> None:
        self.module = module
        self.members: list[Member] = []
        self.seconds: float = seconds
        self._most_tokens = GROUP_TOKENS << length_class
        self._cache: Cache | None = None

    def join(self, prefilled: Sequence[PrefilledMember | Paused]) -> None:
        """Add members and their caches to the group."""
        caches = [] if self._cache is None else [self._cache]
        for start in prefilled:
            caches.append(start.cache)
            if not (self.members and self.members[-1].absorb(start.member)):
                self.members.append(start.member)
        self._cache = caches[0] if len(caches) == 1 else concat_caches(caches)

    def step(self) -> list[SequenceProgress]:
        """Choose the next token of each sequence in the group."""
        begun = time.perf_counter()
        tokens = torch.cat([member.tokens for member in self.members])
        with naming_texts(chain.from_iterable(map(_texts_of, self.members))):
            out = self.module.decode(tokens, cache=self._cache)
        assert out.logits is not None
        logits, progress, changes, first = out.logits[:, -1], [], [], 0
        for member in self.members:
            before = len(member.tokens), member.num_sentences
            done, survivors = member.advance(logits[first : first + before[0]])
            progress += done
            changes.append(_RowChange(member, survivors, *before))
            first += before[0]
        self._apply_changes(changes)
        self.seconds += time.perf_counter() - begun
        return progress

    def pause(self, sequence: Generated) -> Paused | None:
        """Take a sequence out with its keys and values; return None if that is impossible."""
        first = 0
        for member in self.members:
            copy = member.copy_row(sequence)
            if copy is not None and isinstance(self._cache, IndexedCache) and self._cache.is_separable:
                paused = Paused(copy[1], copy_row(self._cache, first + copy[0]))
                self.drop(sequence)
                self._cache = concat_caches([self._cache]) if self.members else None
                return paused
            first += len(member.tokens)
        return None

    def pause_longest(self) -> list[Paused]:
        """Pause rows that are too long for the group; checked only now and then, since it reads all masks."""
        cache = self._cache
        if not isinstance(cache, IndexedCache) or cache.length < self._most_tokens or cache.length % CHECKED_TOKENS:
            return []
        is_long = [length >= self._most_tokens for length in cache.row_lengths]
        leaving, first = list[Generated](), 0
        for member in self.members:
            if len(member.sequences) == len(member.tokens):
                leaving += itertools.compress(member.sequences, is_long[first:])
            first += len(member.tokens)
        return [paused for paused in map(self.pause, leaving) if paused is not None]

    def drop(self, sequence: Generated) -> None:
        """Remove a sequence from the batch before it has ended."""
        before = [(len(member.tokens), member.num_sentences) for member in self.members]
        survivors = [member.drop(sequence) for member in self.members]
        self._apply_changes(
            [_RowChange(*change) for change in zip(self.members, survivors, *zip(*before, strict=True), strict=True)]
        )

    def _apply_changes(self, changes: list[_RowChange]) -> None:
        self.members = [member for member in self.members if len(member.tokens)]
        if self.members and self._cache is not None:
            _reorder_cache(self._cache, changes)


def run_queue(
    batch: RunningBatch,
    costs: Sequence[int],
    start: Callable[[list[int]], list[PrefilledMember]],
    *,
    budget: int,
    most: int | None,
) -> Iterator[list[SequenceProgress]]:
    """Run prompts in one batch, costliest first, and yield the progress of each step.

    When prompts end, others take their rows. While the calling context watches a model, prompts keep their order: see
    `batch_costs`.

    Args:
        batch: an empty running batch.
        costs: cost of each prompt, in tokens.
        start: function that reads the prompts with these indices and returns their members.
        budget: maximum of count * greatest cost over the running prompts. A prompt above it runs alone.
        most: maximum number of running prompts. None means that only the budget limits them.
    """
    costs = batch_costs(costs)
    waiting = deque(sorted(range(len(costs)), key=lambda number: (-costs[number], number)))
    running: Counter[int] = Counter()  # number of unfinished sequences of each prompt
    while waiting or running:
        joining = _choose_joining(waiting, [costs[number] for number in running], costs, budget, most)
        for _ in joining:
            waiting.popleft()
        with torch.inference_mode():
            progress = _join_prefilled(batch, start(joining), running) if joining else []
        if progress:
            yield _count_running(progress, running)
        if batch.members:
            with torch.inference_mode():
                progress = batch.step()
            yield _count_running(progress, running)
        update(len(costs) - len(waiting) - len(running), len(costs), "examples")


def _choose_joining(
    waiting: deque[int], running: list[int], costs: Sequence[int], budget: int, most: int | None
) -> list[int]:
    """Return the prompts that join now: as many as fit, or none while too few fit to be worth a copy of the keys."""
    greatest = max([*running, *(costs[number] for number in list(waiting)[:1])], default=1)
    room = max(budget // max(greatest, 1), 1)
    room = room if most is None else min(room, most)
    free = room - len(running)
    is_worth = not running or free >= max(1, LEAST_FREE_SHARE * room) or free >= len(waiting)
    return list(waiting)[:free] if free > 0 and is_worth else []


def _join_prefilled(
    batch: RunningBatch, prefilled: list[PrefilledMember], running: Counter[int]
) -> list[SequenceProgress]:
    for start in prefilled:
        running.update(sequence.prompt for sequence in start.member.sequences)
    return batch.join(prefilled)


def _count_running(progress: list[SequenceProgress], running: Counter[int]) -> list[SequenceProgress]:
    for event in progress:
        if event.is_done:
            running[event.sequence.prompt] -= 1
    for prompt in [prompt for prompt, count in running.items() if not count]:
        del running[prompt]
    return progress


def _reorder_cache(cache: Cache, changes: Sequence[_RowChange]) -> None:
    """Reorder the rows of a cache to match the rows of its members after a step."""
    if all(change.survivors.rows is None and change.survivors.sentences is None for change in changes):
        return
    rows, sentences, first_row, first_sentence = [], [], 0, 0
    for change in changes:
        survivors, device = change.survivors, change.member.tokens.device
        kept_rows = torch.arange(change.rows, device=device) if survivors.rows is None else survivors.rows
        rows.append(kept_rows + first_row)
        memory = torch.arange(change.sentences, device=device) if survivors.sentences is None else survivors.sentences
        sentences.append(memory + first_sentence)
        first_row, first_sentence = first_row + change.rows, first_sentence + change.sentences
    is_same_memory = all(change.survivors.sentences is None for change in changes)
    cache.select(torch.cat(rows), memory_rows=None if is_same_memory else torch.cat(sentences))
