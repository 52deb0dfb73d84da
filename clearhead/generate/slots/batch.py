"""A running batch in slots: steps are recorded once and replayed, and the host reads their tokens one step later.

Each sequence occupies a slot: a row of a `SlotCache`. A row joins between two replays, by a copy of its keys. It leaves
without a copy. Model and choice of tokens run on the device. While the device computes a step, the host handles the
tokens of the step before. So a sequence that has ended computes one token more, which is dropped.

The choice of some rows needs the host, such as that of texts that follow a JSON schema. These rows use the recorded
step of the model. Then their member chooses as in `RunningBatch` and reads its tokens at once. Members that slots
cannot hold run as in `RunningBatch` too.

Shapes: R rows (slots), K some of them, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clearhead import spec
from clearhead.base.hooks import are_seen, is_watching
from clearhead.base.host_copy import HostCopy
from clearhead.base.mapped_files import refuse_altered_weights
from clearhead.base.progress import update
from clearhead.core import Cache, Transformer
from clearhead.core.attention import Attention
from clearhead.fast.cache import IndexedCache
from clearhead.fast.slots.cache import SlotCache
from clearhead.fast.slots.graph import REFUSED, Graphs, refuse_recordings
from clearhead.fast.slots.tree import SlotOwner, prepare_tree, slot_tree
from clearhead.fast.stack import PlannedStack, is_altered
from clearhead.generate.results import GeneratedSequence
from clearhead.generate.running import Generated, Member, Paused, PrefilledMember, RunningBatch, SequenceProgress
from clearhead.generate.search.sampling import Sampling
from clearhead.generate.slots.choosing import DeviceChooser, SlotProcessors, can_choose, sampling_requests
from clearhead.spec.registry import Part

LEAST_KEYS: Final = 64
"""Columns that a step reads at least."""
LEAST_COLUMNS: Final = 32
"""Columns of the smallest bucket. SDPA copies masks whose rows are no multiple of 8."""
SMALL_TOKENS, SMALL_COLUMNS = 2**14, 256
"""Slots of up to this number of tokens in all are made larger than a batch needs, so that later ones can use them."""
MOST_IDLE_TOKENS: Final = 2**17
"""Tokens of the largest slots that a model keeps for later batches; the memory of larger ones is freed."""
_LOGGER: Final = logging.getLogger("clearhead.generate")


def bucket(count: int) -> int:
    """Return the least of 32, 48, 64, 96, 128, 192, ... columns that is at least `count`."""
    size = LEAST_COLUMNS
    while size < count:
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return size


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def eager_reason(module: Transformer) -> str:
    """Return why a model decodes step by step instead of in recorded steps; an empty string if it is recorded."""
    nodes = [node for _, node in spec.walk(module.spec)]
    if module.decoder is None or module.head is None or module.head.is_pooled:
        return "it has no decoder with a head over a vocabulary"
    if any(isinstance(node, spec.MixtureOfExperts) for node in nodes):
        return "its experts read different numbers of tokens in each step"
    if any(isinstance(node, spec.DynamicScaling | spec.LongRopeScaling) for node in nodes):
        return "its RoPE scaling depends on the length of the sequence"
    if any(isinstance(node, Part) for node in nodes):
        return "it contains custom modules"
    if any(map(is_altered, module.modules())):
        return "one of its modules has another forward method"
    if isinstance(module.decoder, PlannedStack):
        return "compiled kernels compute its decoder"
    if is_watching() or are_seen(module.modules()):
        return "activations are captured or edited"
    return ""


@dataclass(frozen=True)
class SlotSize:
    """Size of the slots of a batch.

    Args:
        rows: number of slots.
        columns: maximum number of tokens in a slot.
        sources: maximum number of source tokens in a slot; 0 for a decoder-only model.
    """

    rows: int
    columns: int
    sources: int = 0

    def holds(self, other: SlotSize) -> bool:
        """Return whether slots of this size suffice for another size."""
        return self.rows >= other.rows and self.columns >= other.columns and self.sources >= other.sources


@dataclass(eq=False)
class SlotRow:
    """A sequence in a slot.

    Args:
        sequence: the sequence.
        member: the member that it joined with.
        num_read: number of tokens in the cache when it joined.
        num_sources: number of source tokens in the cache.
        num_before: number of tokens that it had when it joined.
        first_step: number of the first step that reads the sequence.
        slot: its present slot.
        is_quiet: True if its tokens are needed at its end only.
        is_hosted: True if its member chooses the tokens with the host, such as those that a JSON schema allows.
    """

    sequence: GeneratedSequence
    member: Sampling
    num_read: int
    num_sources: int
    num_before: int
    first_step: int
    slot: int
    is_quiet: bool
    is_hosted: bool

    @property
    def last_step(self) -> int:
        """Number of the step that chooses the last token that the limit allows, unless the row ends before."""
        return self.first_step + self.sequence.limit - self.num_before - 1


class Arrangement:
    """The rows of a step by slot, as arrays; it changes only when rows join, leave or move.

    Args:
        seats: the row of each slot, None for a free slot.

    Attributes:
        quiet, first_steps: the slot and the first step of each quiet row.
        ahead: number of tokens of the longest row minus the number of the step.
        last_step, num_sources, most_tokens: the largest of all rows.
        first_step: the smallest of all rows.
    """

    quiet: NDArray[np.int64]
    first_steps: NDArray[np.int64]
    ahead: int
    last_step: int
    num_sources: int
    most_tokens: int

    def __init__(self, seats: Sequence[SlotRow | None]) -> None:
        self.rows: dict[int, SlotRow] = {row.slot: row for row in seats if row is not None}
        rows = self.rows.values()
        self.loud: dict[int, SlotRow] = {row.slot: row for row in rows if not (row.is_quiet or row.is_hosted)}
        quiet = np.array([[row.slot, row.first_step] for row in rows if row.is_quiet], dtype=np.int64)
        self.quiet, self.first_steps = quiet.reshape(-1, 2).T
        self.num_slots: int = max(self.rows) + 1
        self.first_step: int = min(row.first_step for row in rows)
        numbers = [[row.num_read - row.first_step, row.last_step, row.num_sources, row.sequence.limit] for row in rows]
        self.ahead, self.last_step, self.num_sources, self.most_tokens = map(max, zip(*numbers, strict=True))
        self.hosted: dict[Sampling, list[SlotRow]] = {}
        for row in rows:
            if row.is_hosted:
                self.hosted.setdefault(row.member, []).append(row)


class DecodingSlots:
    """Tensors of a running batch in slots, with the recordings that use them; one batch at a time has them.

    Args:
        module: the model that prefills.
        size: number of slots, of tokens in a slot, and of source tokens in a slot.
        like: a prefilled cache of the model.
        beams: number of beams of a sentence; 1 without beam search.
        num_extensions: number of extensions of a sentence; see `DeviceBeams`. 0 without beam search.
    """

    def __init__(
        self, module: Transformer, size: SlotSize, like: IndexedCache, beams: int = 1, num_extensions: int = 0
    ) -> None:
        self.size: SlotSize = size
        self.beams: int = beams
        self.num_extensions: int = num_extensions
        self.tree: Transformer = slot_tree(module)
        pairs = zip(module.modules(), self.tree.modules(), strict=True)
        # Without the model itself, which has the slots: a cycle would hold their memory until a collection.
        twins: dict[nn.Module, nn.Module] = {old: new for old, new in pairs if isinstance(old, Attention)}
        self.cache: SlotCache = SlotCache(size.rows, size.columns, size.sources, like, twins, self.beams)
        device = like.device
        self.logits_RV: torch.Tensor = prepare_tree(self.tree, self.cache)
        self.chooser: SlotProcessors = self.make_chooser(self.logits_RV.shape[1], device)
        self.graphs: Graphs = Graphs(device)

    def make_chooser(self, vocab: int, device: torch.device) -> SlotProcessors:
        """Return what chooses the tokens after each step of the model."""
        return DeviceChooser(self.size.rows, self.size.columns + 1, vocab, device)

    def step(self, rows: int, keys: int, sources: int, *, expected: int) -> HostCopy:
        """Launch a step of the first slots, and return its results [R, numbers], which are copied to the host.

        Args:
            rows, keys, sources: least numbers of slots, columns and source tokens that the step reads.
            expected: number of steps expected to follow.
        """
        rows = min(power_of_two(-(-rows // self.beams)) * self.beams, self.size.rows)
        keys = min(max(bucket(keys), LEAST_KEYS), self.size.columns)
        sources = min(bucket(sources), self.size.sources)
        self.cache.use(rows, keys, sources)
        self.chooser.prepare()
        turn = self.cache.turn
        self.graphs.run(("model", rows, keys, sources, turn), self._compute_logits, expected=expected)
        self.cache.take_turns()
        self.graphs.run(("choice", rows, self.chooser.kind), self._choose, expected=expected)
        return HostCopy(self.chooser.results)

    def move(self, slots: Sequence[int]) -> None:
        """Move the rows of these slots into the first slots, in this order; the others are free."""
        self.cache.move(torch.tensor(slots, device=self.logits_RV.device))
        self.chooser.move(slots)

    def _compute_logits(self) -> None:
        self.tree.decode(self.chooser.tokens[: self.cache.num_rows, None], cache=self.cache)
        self.cache.advance()

    def _choose(self) -> None:
        self.chooser.choose(self.logits_RV[: self.cache.num_rows])


SlotsT = TypeVar("SlotsT", bound=DecodingSlots)
LaunchedStep = tuple[int, HostCopy, Arrangement]
"""The number of a step, its results, and its rows."""


class SlotBatch(RunningBatch):
    """Running batch whose sampled and greedy rows decode in slots; see `RunningBatch` for the methods.

    Args:
        module: the model in evaluation mode, for which `eager_reason` is empty.
        size: the slots that the batch needs.
        needs_every_token: True reports each token of each row. False reports rows without text at their end only.
    """

    def __init__(self, module: Transformer, size: SlotSize, *, needs_every_token: bool = False) -> None:
        super().__init__(module)
        self.size: SlotSize = size
        self.needs_every_token: bool = needs_every_token
        self.slots: DecodingSlots | None = None
        self._seats: list[SlotRow | None] = []
        self._history = np.zeros((2, 0, 0))  # tokens and log-probabilities of quiet rows by slot
        self._step_number = 0  # number of the next step
        self._arrangement: Arrangement | None = None
        self._pending: LaunchedStep | None = None
        self._unreported: list[SequenceProgress] = []
        self._unreported_rows: list[SlotRow] = []

    @property
    def members(self) -> list[Member]:
        """The members that have rows, or rows whose end the next step reports."""
        rows = [*self._seats, *self._unreported_rows]
        return [*super().members, *dict.fromkeys(row.member for row in rows if row is not None)]

    @property
    def num_rows(self) -> int:
        """Number of rows in the slots and in all groups."""
        in_groups = sum(len(member.tokens) for member in super().members)
        return in_groups + len(self._seats) - self._seats.count(None)

    @torch.inference_mode()
    def resume(self, paused: Sequence[PrefilledMember | Paused]) -> None:
        """Add paused or prefilled members that have already chosen a token to the batch."""
        super().resume([start for start in paused if not self._seat(start)])

    @torch.inference_mode()
    def pause(self, sequence: Generated) -> Paused | None:
        """Take a sequence out with its keys and values; return None if it is not in the batch or not separable."""
        self._catch_up()
        row = self._row_of(sequence)
        if row is None or self.slots is None:
            return super().pause(sequence)
        copied = row.member.copy_row(row.sequence)
        assert copied is not None
        count = self._step_number - row.first_step
        if row.is_quiet:
            self._note(row, count)
        if not row.is_hosted:
            _extend(copied[1], row.sequence.ids[row.num_before :])
        cache = self.slots.cache.copy(row.slot, row.num_read + count, row.num_sources)
        self.drop(sequence)
        return Paused(copied[1], cache)

    @torch.inference_mode()
    def drop(self, sequence: Generated) -> None:
        """Remove an unfinished sequence and its rows from the batch."""
        row = self._row_of(sequence)
        if row is None:
            super().drop(sequence)
            return
        if row.is_hosted:
            row.member.drop(sequence)
        self._leave(row)

    @torch.inference_mode()
    def step(self) -> list[SequenceProgress]:
        """Launch the next step of the slots, and return what the step before has chosen; see `RunningBatch`."""
        launched = self._launch()
        progress = self._unreported + self._take(self._pending)
        self._pending, self._unreported, self._unreported_rows = launched, [], []
        progress += self._advance_hosted(launched)
        if self._groups:
            progress += super().step()
        refuse_altered_weights(self.module)
        return progress

    def _launch(self) -> LaunchedStep | None:
        if self._arrangement is None and any(self._seats):
            self._compact()
        slots, number = self.slots, self._step_number
        if slots is None or not any(self._seats):
            return None
        rows = self._arrangement = self._arrangement or Arrangement(self._seats)
        keys, expected = number + rows.ahead + 1, rows.last_step - number + 1
        results = slots.step(rows.num_slots, keys, rows.num_sources, expected=expected)
        self._step_number += 1
        return number, results, rows

    def _compact(self) -> None:
        """Move the rows into the first slots, if a step of at most half the size then suffices."""
        occupied = [slot for slot, row in enumerate(self._seats) if row is not None]
        if 2 * power_of_two(len(occupied)) > power_of_two(occupied[-1] + 1):
            return
        self._catch_up()  # the results of a step have the order of its slots
        rows = [row for row in self._seats if row is not None]
        if self.slots is not None and rows:
            order = [row.slot for row in rows]
            self.slots.move(order)
            self._history[:, : len(rows)] = self._history[:, order]
        self._seats = [*rows, *[None] * (len(self._seats) - len(rows))]
        for slot, row in enumerate(rows):
            row.slot = slot

    def _take(self, pending: LaunchedStep | None) -> list[SequenceProgress]:
        """Give the results of a step to its rows, and return their progress."""
        if pending is None or self.slots is None:
            return []
        number, copied, arrangement = pending
        results, progress = copied.read().numpy().T, list[SequenceProgress]()
        tokens, log_probs, ends = results[0], results[1], results[2] != 0
        quiet = arrangement.quiet
        column = np.minimum(number - arrangement.first_steps, self._history.shape[2] - 1)
        self._history[:, quiet, column] = results[:2, quiet]
        for slot in quiet[ends[quiet] | ~np.isfinite(log_probs[quiet])].tolist():
            row = arrangement.rows[slot]
            if self._seats[slot] is row:
                self._note(row, number - row.first_step)
                progress.append(self._add(row, int(tokens[slot]), float(log_probs[slot])))
        for slot, row in arrangement.loud.items():
            if self._seats[slot] is row:
                progress.append(self._add(row, int(tokens[slot]), float(log_probs[slot])))
        update(number + 1 - min(arrangement.first_step, number), arrangement.most_tokens, "tokens")
        return progress

    def _advance_hosted(self, launched: LaunchedStep | None) -> list[SequenceProgress]:
        """Let members choose the tokens of their rows with the host, from the logits of the step that was launched."""
        progress, slots = list[SequenceProgress](), self.slots
        if launched is None or slots is None:
            return progress
        for member, hosted in launched[2].hosted.items():
            rows = [row for row in hosted if self._seats[row.slot] is row]
            if not rows:
                continue
            index_K = torch.tensor([row.slot for row in rows], device=slots.logits_RV.device)
            done, survivors = member.advance(slots.logits_RV[index_K])
            progress += done
            for row in rows:
                if row.sequence.is_done:
                    self._leave(row)
            index_K = index_K if survivors.rows is None else index_K[survivors.rows]
            slots.chooser.tokens.index_copy_(0, index_K, member.tokens[:, 0])
        return progress

    def _add(self, row: SlotRow, token: int, log_probability: float) -> SequenceProgress:
        """Add a token to the sequence of a row; a row that has ended leaves its slot."""
        sequence = row.sequence
        text = sequence.take(token, log_probability)
        if sequence.is_done:
            self._leave(row)
        return SequenceProgress(sequence, text, sequence.is_done)

    def _note(self, row: SlotRow, count: int) -> None:
        """Add the first tokens that a quiet row has chosen in its slot to its sequence, `count` in all."""
        tokens, log_probs = self._history[:, row.slot, :count]
        sequence = row.sequence
        sequence.ids += tokens.astype(np.int64).tolist()
        sequence.log_probabilities += log_probs.tolist()
        sequence.log_probability = float(np.cumsum([sequence.log_probability, *log_probs])[-1])

    def _catch_up(self) -> None:
        """Read the results of the step that was launched last; the next step reports them."""
        pending, self._pending = self._pending, None
        self._unreported += self._take(pending)
        if pending is not None and self._unreported:
            self._unreported_rows += pending[2].rows.values()

    def _row_of(self, sequence: Generated) -> SlotRow | None:
        return next((row for row in self._seats if row is not None and row.sequence is sequence), None)

    def _leave(self, row: SlotRow) -> None:
        """Free the slot of a row."""
        assert self.slots is not None
        self._seats[row.slot] = self._arrangement = None
        self.slots.chooser.leave([row.slot])

    def _find_slots(self, like: IndexedCache) -> DecodingSlots | None:
        """Return the slots of the batch, which the first call allocates; None if that is impossible."""
        if self.slots is None:
            self.slots = open_slots(DecodingSlots, self.module, self.size, like)
            if self.slots is not None:
                self.size = self.slots.size
                self._seats = [None] * self.size.rows
                self._history = np.zeros((2, self.size.rows, self.size.columns))
        return self.slots

    def close(self) -> None:
        """End the batch; the model keeps its slots for later batches."""
        for row in [row for row in self._seats if row is not None]:
            self._leave(row)
        if self.slots is not None:
            self._keep_idle(self.slots)
        self.slots = None

    def _keep_idle(self, slots: DecodingSlots) -> None:
        if isinstance(self.module, SlotOwner) and slots.size.rows * slots.size.columns <= MOST_IDLE_TOKENS:
            self.module.idle.append(slots)

    def _seat(self, start: PrefilledMember | Paused) -> bool:
        """Copy the keys of a member into free slots; return False if slots cannot hold it."""
        member, cache = start.member, start.cache
        if not isinstance(member, Sampling) or not can_hold(cache):
            return False
        lengths, sources = cache.row_lengths, cache.source_length
        # The last token of a row is never read.
        needed = [length + row.limit - len(row.ids) for length, row in zip(lengths, member.sequences, strict=True)]
        if not self.size.holds(SlotSize(len(lengths), max(needed), sources)):
            return False
        slots = self._find_slots(cache)
        numbers = [number for number, row in enumerate(self._seats) if row is None][: len(lengths)]
        if slots is None or len(numbers) < len(lengths):
            return False
        slots_K, lengths_K = torch.tensor([numbers, lengths], device=cache.device)
        slots.cache.put(cache, slots_K, lengths_K, max(lengths))
        is_hosted = not can_choose(member.chooser.chain)
        is_hosted |= any(row.constraint is not None or row.num_alternatives > 0 for row in member.sequences)
        if is_hosted:
            slots.chooser.tokens.index_copy_(0, slots_K, member.tokens[:, 0])
        else:
            slots.chooser.join(numbers, sampling_requests(member), member.ids_RT)
        for sequence, slot, length in zip(member.sequences, numbers, lengths, strict=True):
            is_quiet = sequence.decoder is None and not (is_hosted or self.needs_every_token)
            before, step = len(sequence.ids), self._step_number
            self._seats[slot] = SlotRow(sequence, member, length, sources, before, step, slot, is_quiet, is_hosted)
        self._arrangement = None
        return True


def _extend(member: Sampling, ids: list[int]) -> None:
    """Append tokens to the only row of a member, which a slot has chosen."""
    new_1T = torch.tensor([ids], dtype=torch.int64, device=member.ids_RT.device)
    member.ids_RT = torch.cat([member.ids_RT, new_1T], 1)
    for stream in member.streams:
        stream.skip(len(ids))


def can_hold(cache: Cache) -> TypeGuard[IndexedCache]:
    """Return whether the keys of a prefilled cache can be copied into slots, whatever its size."""
    return isinstance(cache, IndexedCache) and cache.is_separable and not cache.scales


def open_slots(
    kind: type[SlotsT],
    module: Transformer,
    size: SlotSize,
    like: IndexedCache,
    beams: int = 1,
    num_extensions: int = 0,
) -> SlotsT | None:
    """Return idle slots of a model that suffice, or new ones; None if nothing more is recorded in this process.

    Idle slots that are too small are dropped, to free their memory.

    Args:
        kind: class of the slots.
        module, size, like, beams, num_extensions: arguments of `DecodingSlots`.
    """
    if REFUSED.is_set():
        return None
    idle: list[SlotsT] = module.idle if isinstance(module, SlotOwner) else []
    for slots in [slots for slots in idle if (slots.beams, slots.num_extensions) == (beams, num_extensions)]:
        idle.remove(slots)
        if slots.size.holds(size):
            return slots
    try:
        return kind(module, size, like, beams, num_extensions)
    except torch.OutOfMemoryError as error:
        refuse_recordings(error)
        return None


def slot_batch(
    kind: type[SlotBatch], module: Transformer, size: SlotSize, *, needs_every_token: bool
) -> SlotBatch | None:
    """Return a batch in slots, or None if the model decodes step by step; one line says so.

    Args:
        kind: class of the batch.
        module: the model in evaluation mode.
        size: the slots that the batch needs.
        needs_every_token: True reports each token of each row. False reports rows without text at their end only.
    """
    reason = eager_reason(module)
    if reason:
        _report_eager(reason)
    if reason or REFUSED.is_set():
        return None
    position = module.spec.decoder and module.spec.decoder.embedding.position
    rows, columns = size.rows, bucket(size.columns)
    if power_of_two(rows) * power_of_two(columns) <= SMALL_TOKENS:
        rows, columns = power_of_two(rows), max(power_of_two(columns), SMALL_COLUMNS)
    if isinstance(position, spec.Learned):
        columns = min(columns, position.rows - position.offset)
    sources = bucket(size.sources) if module.encoder is not None else 0
    return kind(module, SlotSize(rows, columns, sources), needs_every_token=needs_every_token)


@cache
def _report_eager(reason: str) -> None:
    _LOGGER.info("decoding runs step by step, not in CUDA graphs: %s", reason)
