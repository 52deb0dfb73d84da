"""Beam search in slots: each step extends the beams on the device, and the host finishes hypotheses one step later.

The beams of a sentence are adjacent slots, a group. A step writes the best extensions of each sentence and continues
with those that do not end. The next step gathers the keys of each beam from its parent. `Search` reads the extensions
one step late, and finishes hypotheses and sentences on the host. So a sentence that has ended computes one more step,
which is dropped.

Shapes: R rows (slots), M sentences (groups), B beams of a sentence, C extensions of a sentence.
V vocabulary, T tokens, K rows that join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.base.host_copy import HostCopy
from clearhead.core import Transformer
from clearhead.fast.cache import IndexedCache
from clearhead.generate.running import (
    Generated,
    Member,
    Paused,
    PrefilledMember,
    SequenceProgress,
    SurvivingRows,
)
from clearhead.generate.search.beam import (
    Extensions,
    Search,
    best_extensions,
    live_order,
    top_changed_log_probabilities,
)
from clearhead.generate.slots.batch import DecodingSlots, SlotBatch, SlotSize, can_hold, open_slots, power_of_two
from clearhead.generate.slots.choosing import END_FLAG, RowRequest, SlotProcessors, can_choose


class DeviceBeams(SlotProcessors):
    """Extends the beams of all groups on the device, with equal results to `Search`; see `SlotProcessors`.

    Args:
        rows: number of slots, a multiple of `beams`.
        capacity: maximum number of ids of a slot, prompt and generated.
        vocab: number of logits of a row.
        device: device of the logits.
        beams: number of beams of a sentence.
        num_extensions: number of extensions of each sentence in `results`; see `Search.num_extensions`.
    """

    def __init__(
        self, rows: int, capacity: int, vocab: int, device: torch.device, *, beams: int, num_extensions: int
    ) -> None:
        super().__init__(rows, capacity, vocab, device)
        self.beams: int = beams
        self.num_extensions: int = num_extensions
        self.parents: Tensor = torch.arange(rows, device=device)
        """The row that each row continues in the next step, int64 [R]."""
        self.results: Tensor = torch.zeros(
            rows // beams, 3 * num_extensions + beams, dtype=torch.float64, device=device
        )
        """Ids, parents and sums of the C best extensions, then the log-probability of the end in each beam."""
        self._sums = torch.zeros(rows, dtype=torch.float32, device=device)
        self._end_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._first_rows = torch.arange(rows, device=device) // beams * beams

    def join_search(self, slots: Sequence[int], search: Search) -> None:
        """Start the live hypotheses of a search in free slots; each sentence has a group of adjacent slots."""
        end_ids = tuple(search.ends_E.tolist())
        requests = [RowRequest(search.chain, row, None, end_ids, 0) for row in range(len(slots))]
        self.join(slots, requests, search.prefix_RT)
        slots_K = self._copy(slots)
        self.parents.index_copy_(0, slots_K, slots_K)
        self._sums.index_copy_(0, slots_K, search.sums_MB.flatten())
        self._end_ids.index_fill_(0, slots_K, search.eos_id)

    def move(self, slots: Sequence[int]) -> None:
        """Move rows to the first slots, whole groups: slot i continues the row of `slots[i]`."""
        super().move(slots)
        rows = len(slots)
        self.parents[:rows].remainder_(self.beams).add_(self._first_rows[:rows])

    def choose(self, logits_RV: Float[Tensor, "rows vocab"]) -> None:
        """Extend the beams of the first groups by one token, and write the results into the buffers.

        Args:
            logits_RV: fp32 or bf16 logits of the first R slots.
        """
        rows, count, beams = len(logits_RV), self.num_extensions, self.beams
        if {name for name, _ in self.kind} <= {"greedy", "early", "late"}:  # the rows only ban ids
            logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
            log_total_R = logits_RV.logsumexp(1)
            log_probs_RC, ids_RC = self.process(logits_RV).topk(min(count, self.vocab), dim=1)
            log_probs_RC = (log_probs_RC - log_total_R[:, None]).clamp_(max=0.0)
        else:
            logits_RV = logits_RV.float().log_softmax(1)
            log_probs_RC, ids_RC, log_total_R = top_changed_log_probabilities(self.process(logits_RV), count)
        ends_R = logits_RV.gather(1, self._end_ids[:rows, None])[:, 0].float() - log_total_R
        best = best_extensions(log_probs_RC, ids_RC, self._sums[:rows].view(-1, beams), count)
        is_end_MC = (self._flags[:rows:beams].gather(1, best.ids_MC) & END_FLAG) > 0
        live = best.take(live_order(is_end_MC & (best.sums_MC > -torch.inf), beams))
        extensions = (best.ids_MC, best.parents_MC, best.sums_MC, ends_R.view(-1, beams))
        torch.cat([tensor.double() for tensor in extensions], 1, out=self.results[: rows // beams])
        parents_R = live.parents_MC.flatten() + self._first_rows[:rows]
        self.parents[:rows].copy_(parents_R)
        self.tokens[:rows].copy_(live.ids_MC.flatten())
        self._sums[:rows].copy_(live.sums_MC.flatten())
        self.counts[:rows].add_(1)
        if self.reads_ids:
            ids_RT = self.ids[:rows].index_select(0, parents_R)[:, 1:]
            self.ids[:rows].copy_(torch.cat([ids_RT, self.tokens[:rows, None]], 1))

    def _buffers(self) -> list[Tensor]:
        return [*super()._buffers(), self.parents, self._sums, self._end_ids]


class BeamSlots(DecodingSlots):
    """Tensors of beam searches in slots: see `DecodingSlots`."""

    chooser: DeviceBeams

    def make_chooser(self, vocab: int, device: torch.device) -> DeviceBeams:
        """Return the object that extends the beams after each step of the model."""
        size, beams = self.size, self.beams
        chooser = DeviceBeams(
            size.rows, size.columns + 1, vocab, device, beams=beams, num_extensions=self.num_extensions
        )
        self.cache.parents_R = chooser.parents
        return chooser


@dataclass(eq=False)
class SeatedSearch:
    """A beam search in slots.

    Args:
        search: the search; it keeps its hypotheses on the host.
        groups: the group of each sentence that has not ended.
        first_step: number of the first step that extends it.
        num_read: number of tokens of the longest row in the cache before this step.
        num_sources: number of source tokens in the cache.
    """

    search: Search
    groups: list[int]
    first_step: int
    num_read: int
    num_sources: int


class BeamBatch(SlotBatch):
    """Running batch in slots whose beam searches run in slots too, if all have the same number of beams.

    Args:
        module, size, needs_every_token: arguments of `SlotBatch`.
    """

    def __init__(self, module: Transformer, size: SlotSize, *, needs_every_token: bool = False) -> None:
        super().__init__(module, size, needs_every_token=needs_every_token)
        self._beam_slots: BeamSlots | None = None
        self._searches: list[SeatedSearch] = []
        self._free_groups: list[int] = []
        self._search_step = 0  # number of the next step
        self._launched: tuple[int, HostCopy] | None = None  # the number of a step and its results

    @property
    def members(self) -> list[Member]:
        """The members that have rows."""
        return [*super().members, *(seated.search for seated in self._searches)]

    @property
    def num_rows(self) -> int:
        """Number of rows in the slots and in all groups of members."""
        beams = 1 if self._beam_slots is None else self._beam_slots.beams
        return super().num_rows + beams * sum(len(seated.groups) for seated in self._searches)

    @torch.inference_mode()
    def resume(self, paused: Sequence[PrefilledMember | Paused]) -> None:
        """Add paused or prefilled members that have already chosen a token to the batch."""
        super().resume([start for start in paused if not self._seat_search(start)])

    @torch.inference_mode()
    def drop(self, sequence: Generated) -> None:
        """Remove an unfinished sequence and its rows from the batch."""
        seated = next((each for each in self._searches if sequence in each.search.sequences), None)
        if seated is None:
            super().drop(sequence)
        else:
            self._free_ended(seated, seated.search.drop(sequence))

    @torch.inference_mode()
    def step(self) -> list[SequenceProgress]:
        """Launch the next step of the slots, and return what the step before has chosen; see `RunningBatch`."""
        launched = self._launch_searches()
        self._unreported += self._take_searches()
        self._launched = launched
        return super().step()

    def close(self) -> None:
        """End the batch; the model keeps its slots for later batches."""
        super().close()
        if self._beam_slots is not None:
            self._beam_slots.chooser.leave(range(self._beam_slots.size.rows))
            self._keep_idle(self._beam_slots)
        self._beam_slots, self._searches = None, []

    def _seat_search(self, start: PrefilledMember | Paused) -> bool:
        """Copy the keys of a search into free slots; return False if slots cannot hold it."""
        search, cache = start.member, start.cache
        if not isinstance(search, Search) or search.recorder is not None or not can_choose(search.chain):
            return False
        if not can_hold(cache):
            return False
        lengths, num_sources = cache.row_lengths, cache.source_length
        # The last token of a hypothesis is never read.
        needed = max(lengths) + max(sentence.limit for sentence in search.sequences) - search.length
        slots = self._find_beam_slots(search, cache)
        if slots is None or not slots.size.holds(SlotSize(len(lengths), needed, num_sources)):
            return False
        if search.num_sentences > len(self._free_groups):
            return False
        groups = self._free_groups[: search.num_sentences]
        del self._free_groups[: len(groups)]
        rows = _rows_of(groups, slots.beams)
        rows_K, lengths_K = torch.tensor([rows, lengths], device=cache.device)
        slots.cache.put(cache, rows_K, lengths_K, max(lengths))
        slots.chooser.join_search(rows, search)
        search.move_to_host()
        self._searches.append(SeatedSearch(search, groups, self._search_step, max(lengths), num_sources))
        return True

    def _find_beam_slots(self, search: Search, like: IndexedCache) -> BeamSlots | None:
        """Return the slots of the batch, which the first search allocates; None if they are not for such a search."""
        beams, count = search.options.beam_size, search.num_extensions
        slots = self._beam_slots
        if slots is not None and not self._searches and (slots.beams, slots.num_extensions) != (beams, count):
            self._beam_slots = self._launched = None
        size = replace(self.size, rows=self.size.rows // beams * beams)
        if self._beam_slots is None and size.rows > 0:
            self._beam_slots = open_slots(BeamSlots, self.module, size, like, beams, count)
            if self._beam_slots is not None:
                self._free_groups = list(range(self._beam_slots.size.rows // beams))
        slots = self._beam_slots
        return slots if slots is not None and (slots.beams, slots.num_extensions) == (beams, count) else None

    def _free_ended(self, seated: SeatedSearch, survivors: SurvivingRows) -> None:
        """Free the groups of the sentences that have left a search."""
        if survivors.sentences is None or self._beam_slots is None:
            return
        remaining = [seated.groups[index] for index in survivors.sentences.tolist()]
        gone = [group for group in seated.groups if group not in remaining]
        self._beam_slots.chooser.leave(_rows_of(gone, self._beam_slots.beams))
        self._free_groups, seated.groups = sorted([*self._free_groups, *gone]), remaining
        if not remaining:
            self._searches.remove(seated)

    def _launch_searches(self) -> tuple[int, HostCopy] | None:
        """Launch a step of all searches; return its number and its results."""
        slots = self._beam_slots
        if slots is not None and self._searches:
            self._compact_searches(slots)
        if slots is None or not self._searches:
            return None
        number, searches = self._search_step, self._searches
        num_groups = max(group for seated in searches for group in seated.groups) + 1
        keys = number + max(seated.num_read - seated.first_step for seated in searches) + 1
        sources = max(seated.num_sources for seated in searches)
        expected = max(max(seated.search.limits) - seated.search.length for seated in searches)
        self._search_step += 1
        return number, slots.step(num_groups * slots.beams, keys, sources, expected=expected)

    def _take_searches(self) -> list[SequenceProgress]:
        """Give the extensions of the step that was launched last to its searches, and return their progress."""
        launched, slots, progress = self._launched, self._beam_slots, list[SequenceProgress]()
        self._launched = None
        if launched is None or slots is None:
            return progress
        (number, results), count = launched, slots.num_extensions
        ids, parents, sums, ends = results.read().split([count, count, count, slots.beams], 1)
        for seated in [seated for seated in self._searches if seated.first_step <= number]:
            of = seated.groups
            best = Extensions(sums[of].float(), ids[of].long(), parents[of].long())
            done, survivors = seated.search.take(best, partial(ends[of].float().flatten().index_select, 0))
            progress += done
            self._free_ended(seated, survivors)
        return progress

    def _compact_searches(self, slots: BeamSlots) -> None:
        """Move the groups to the front, if a step of at most half the size then suffices."""
        order = [group for seated in self._searches for group in seated.groups]
        if 2 * power_of_two(len(order)) > power_of_two(max(order) + 1):
            return
        self._unreported += self._take_searches()  # the results of a step have the order of its groups
        order = [group for seated in self._searches for group in seated.groups]
        if order:
            slots.move(_rows_of(order, slots.beams))
        self._free_groups = list(range(len(order), slots.size.rows // slots.beams))
        numbers = iter(range(len(order)))
        for seated in self._searches:
            seated.groups = list(islice(numbers, len(seated.groups)))


def _rows_of(groups: Sequence[int], beams: int) -> list[int]:
    """Return the slots of groups."""
    return [group * beams + beam for group in groups for beam in range(beams)]
