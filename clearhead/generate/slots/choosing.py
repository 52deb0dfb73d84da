"""Choose the next token of each slot of a running batch on the device, without a host read and without Python per row.

`DeviceChooser` chooses the tokens that `TokenChooser` chooses, from buffers of fixed size. So a graph that recorded
`choose` can be replayed with other logits, and rows with different options share one batch.

Example:
    chooser.join([0, 1, 2], sampling_requests(member), member.ids_RT)
    chooser.prepare()              # before each step: random numbers for the rows that sample
    chooser.choose(logits_RV)      # or the replay of a graph for this number of rows and this `chooser.kind`
    chooser.results                # fp64 [R, 3]: tokens, their log-probabilities, whether the rows have ended

Shapes: R slots, or the first of them, which are in use. K rows that join, T their ids, V vocabulary.
C maximum number of ids of a slot, S ids of a source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

import numpy
import torch
from jaxtyping import Bool, Float, Int, UInt8
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from clearhead.generate.options import GenerateOptions
from clearhead.generate.processors import (
    NO_ID,
    BannedIds,
    BannedSequences,
    ForcedAt,
    MinP,
    NoRepeatNGram,
    NoSourceNGram,
    Processor,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    apply,
    force,
)
from clearhead.generate.search.sampling import RandomStream, Sampling, draw_open

NUMBERS_AHEAD: Final = 64
"""Random numbers of each row on the device; `prepare` copies the next ones after as many steps."""
ChooserKind = frozenset[tuple[str, int]]
"""Processors and samplers that the rows use, each with its number, such as the size of an n-gram or 0."""

# Bits of `SlotProcessors.flags`: banned before and after a token is forced, always or in a range of steps; end tokens.
_BANNED, _BANNED_LATE, _EARLY, _LATE, END_FLAG = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class RowRequest:
    """Choice of the tokens of one row: logits processors, sampling, end.

    Args:
        chain: logits processors. Their lengths count the columns of the ids with which the row joins.
        row: row of the sources of `NoSourceNGram` in the chain.
        options: options of sampling. None means greedy search.
        end_ids: ids that end the row.
        limit: maximum number of tokens that the row may still generate.
        stream: random numbers of the row, from its present position on. None means greedy search.
    """

    chain: Sequence[Processor]
    row: int
    options: GenerateOptions | None
    end_ids: tuple[int, ...]
    limit: int
    stream: RandomStream | None = None


def sampling_requests(member: Sampling) -> list[RowRequest]:
    """Return the request of each row of a member, which joins with the ids `member.ids_RT`."""
    streams: Sequence[RandomStream | None] = member.streams or [None] * len(member.sequences)
    return [
        RowRequest(
            member.chooser.chain,
            number,
            member.chooser.options,
            row.end_ids,
            row.limit - len(row.ids),
            stream,
        )
        for number, (row, stream) in enumerate(zip(member.sequences, streams, strict=True))
    ]


@dataclass
class _RowSettings:
    """Numbers of one row in the buffer of settings; the defaults change nothing.

    Attributes:
        early_start, early_stop, late_start, late_stop: steps after joining in which ids with these flags are banned.
        first_id, first_step, last_id, last_step: forced ids with their steps after joining; the last id has precedence.
        sequences: number of the table of banned sequences.
        limit: number of steps after which the row has ended.
    """

    penalty: float | int = 1.0
    ngram: int = 0
    source_ngram: int = 0
    sequences: int = -1
    early_start: float | int = 0
    early_stop: float | int = 0
    late_start: float | int = 0
    late_stop: float | int = 0
    first_id: int = NO_ID
    first_step: int = -1
    last_id: int = NO_ID
    last_step: int = -1
    divisor: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 2.0
    min_p: float | int = 0.0
    samples: bool = False
    limit: float | int = torch.inf

    def kind(self, bits: set[int], vocab: int) -> ChooserKind:
        """Return the processors and the sampler that the row uses; `bits` are the flags of its banned ids."""
        uses = {
            ("penalty", 0): self.penalty != 1,
            ("ngram", self.ngram): self.ngram > 0,
            ("source_ngram", self.source_ngram): self.source_ngram > 0,
            ("sequences", self.sequences): self.sequences >= 0,
            ("early", int(_EARLY in bits)): not bits.isdisjoint({_BANNED, _EARLY}),
            ("force", 0): self.last_id != NO_ID,
            ("late", int(_LATE in bits)): not bits.isdisjoint({_BANNED_LATE, _LATE}),
            ("sample" if self.samples else "greedy", 0): True,
            ("divisor", 0): self.divisor != 1,
            ("top_k", min(1 << self.top_k.bit_length(), vocab)): self.top_k > 0,
            ("top_p", 0): self.top_p < 1,
            ("min_p", 0): self.min_p > 0,
        }
        return frozenset(use for use, is_used in uses.items() if is_used)


_COLUMNS: Final = {field.name: number for number, field in enumerate(fields(_RowSettings))}


@dataclass(frozen=True)
class _RowRules:
    """A chain of logits processors as settings of a row.

    Args:
        settings: settings by name; those that are missing have their defaults.
        bans: banned ids, each with the bit of its flag.
        source: the processor that has the sources of the rows. None means that no source is needed.
    """

    settings: dict[str, Any]
    bans: list[tuple[BannedIds, int]]
    source: NoSourceNGram | None


_STAGES: Final = [("early", _BANNED, _EARLY), ("late", _BANNED_LATE, _LATE)]
"""Stages of the chain in which ids are banned: before and after the forced ids."""


def _read_ban(
    processor: BannedIds, length: int, stages: Sequence[tuple[str, int, int]], settings: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """Return the settings of banned ids, and the bit that marks the ids.

    Args:
        processor: the banned ids, and the lengths at which they are banned.
        length: number of ids, with padding, that the chain counts.
        stages: the possible stages.
        settings: the settings of the row until now; a stage whose range of steps is already set to others is left out.
    """
    start, stop = processor.start - length, (processor.stop or torch.inf) - length
    if start <= 0 and stop == torch.inf:
        return {}, stages[0][1]
    ranges = [({f"{name}_start": start, f"{name}_stop": stop}, bit) for name, _, bit in stages]
    return next((pair for pair in ranges if settings | pair[0] == pair[0] | settings), ranges[-1])


def _read_chain(chain: Sequence[Processor], length: int, tables: list[BannedSequences]) -> _RowRules | None:
    """Return the rules of rows that join with `length` ids, or None if a row has no settings for them.

    Args:
        chain: logits processors.
        length: number of ids, with padding, that the chain counts.
        tables: known banned sequences; new ones are appended.
    """
    settings, bans, source = dict[str, Any](), list[tuple[BannedIds, int]](), None
    chain = [processor for processor in chain if not _is_over(processor, length)]
    forced = [index for index, processor in enumerate(chain) if isinstance(processor, ForcedAt)]
    for index, processor in enumerate(chain):
        new: dict[str, Any] | None = None
        match processor:
            case RepetitionPenalty(penalty=float() | int()):
                new = {"penalty": processor.penalty}
            case NoRepeatNGram():
                new = {"ngram": processor.size}
            case NoSourceNGram():
                new, source = {"source_ngram": processor.size}, processor
            case BannedSequences():
                tables += [] if processor in tables else [processor]
                new = {"sequences": tables.index(processor)}
            case ForcedAt() if len(forced) <= 2:
                name = "last" if index == forced[-1] else "first"
                new = {f"{name}_id": processor.index, f"{name}_step": processor.length - length}
            case BannedIds():
                stages = [_STAGES[index > forced[-1]]] if forced else _STAGES
                new, bit = _read_ban(processor, length, stages, settings)
                bans.append((processor, bit))
        if new is None or settings | new != new | settings:
            return None
        settings |= new
    return _RowRules(settings, bans, source)


def _is_over(processor: Processor, length: int) -> bool:
    """Return whether a processor changes nothing from `length` ids on."""
    if isinstance(processor, BannedIds):
        return processor.stop is not None and processor.stop <= length
    return isinstance(processor, ForcedAt) and processor.length < length


def can_choose(chain: Sequence[Processor]) -> bool:
    """Return whether `DeviceChooser` supports a chain of logits processors."""
    return _read_chain(chain, 0, []) is not None


class SlotProcessors(ABC):
    """Base of what chooses tokens in slots: the logits processors of all slots, in buffers of fixed size.

    Args:
        rows: number of slots.
        capacity: maximum number of ids of a slot, prompt and generated.
        vocab: number of logits of a row.
        device: device of the logits.
    """

    def __init__(self, rows: int, capacity: int, vocab: int, device: torch.device) -> None:
        self.vocab: int = vocab
        self.device: torch.device = device
        self.results: Tensor
        """Results of a step, fp64 [rows, numbers], of which the host gets a copy; the first column has ids."""
        self.tokens: Tensor = torch.zeros(rows, dtype=torch.int64, device=device)
        """Newest token of each slot, int64 [R], which the model reads next."""
        self.ids: Tensor = torch.full((rows, capacity), NO_ID, device=device)
        """Ids of each slot, int64 [R, C], newest last; only current while `reads_ids` is true."""
        self.counts: Tensor = torch.zeros(rows, dtype=torch.int64, device=device)
        """Number of tokens that each row has chosen since it joined, int64 [R]."""
        self._settings = self._copy([astuple(_RowSettings())], torch.float64).repeat(rows, 1)
        self._flags = torch.zeros(rows, vocab, dtype=torch.uint8, device=device)
        self._sources = torch.full((rows, 1), NO_ID, device=device)
        self._tables: list[BannedSequences] = []
        self._kinds: list[ChooserKind] = [frozenset()] * rows
        self.kind: ChooserKind = frozenset()
        """Processors and samplers of the present rows; a graph recorded with another kind does not serve them."""

    @property
    def reads_ids(self) -> bool:
        """True if a processor of the present rows reads the ids so far."""
        return any(name in ("penalty", "ngram", "source_ngram", "sequences") for name, _ in self.kind)

    def join(self, slots: Sequence[int], requests: Sequence[RowRequest], prompts: Int[Tensor, "rows tokens"]) -> None:
        """Start rows in free slots.

        Args:
            slots: a free slot for each row.
            requests: request of each row; `can_choose` is true for its chain.
            prompts: ids so far of each row on the device, as wide as the chains count; `NO_ID` in front is padding.
        """
        slots_K, capacity, length = self._copy(slots), self.ids.shape[1], prompts.shape[1]
        flags, settings, sources = list[Tensor](), list[tuple[Any, ...]](), dict[int, Tensor]()
        known = dict[object, tuple[_RowRules, Tensor]]()
        for slot, request in zip(slots, requests, strict=True):
            name = id(request.chain), request.end_ids
            if name not in known:
                rules = _read_chain(request.chain, length, self._tables)
                assert rules is not None, "the chain is not supported: call can_choose first"
                known[name] = rules, self._flags_of(rules, request.end_ids)
            rules, flags_V = known[name]
            row = _RowSettings(**rules.settings, **_sampling_settings(request.options), limit=request.limit)
            flags.append(flags_V)
            settings.append(astuple(row))
            if rules.source is not None:
                sources[slot] = rules.source.source_RS[request.row]
            self._kinds[slot] = row.kind({bit for _, bit in rules.bans}, self.vocab)
        self.ids.index_copy_(0, slots_K, functional.pad(prompts, (capacity - length, 0), value=NO_ID))
        self._settings.index_copy_(0, slots_K, self._copy(settings, torch.float64))
        self._flags.index_copy_(0, slots_K, torch.stack(flags))
        self.tokens.index_copy_(0, slots_K, prompts[:, -1])
        self.counts.index_fill_(0, slots_K, 0)
        self._put_sources(sources)
        for table in self._tables:
            table.table(self.device)  # so that no step copies it
        self._update_kind()

    def leave(self, slots: Sequence[int]) -> None:
        """Free slots; the other rows compute the same as before."""
        for slot in slots:
            self._kinds[slot] = frozenset()
        self._update_kind()

    def move(self, slots: Sequence[int]) -> None:
        """Move rows to the first slots: slot i continues the row of `slots[i]`; the slots after them are free."""
        slots_K = self._copy(slots)
        for buffer in self._buffers():
            buffer[: len(slots)].copy_(buffer[slots_K])
        self._kinds = [*(self._kinds[slot] for slot in slots), *[frozenset[Any]()] * (len(self._kinds) - len(slots))]
        self._update_kind()

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Copy what the next step needs to the device; call this before each step."""

    @abstractmethod
    def choose(self, logits_RV: Float[Tensor, "rows vocab"]) -> None:
        """Choose the next tokens of the first rows, and write the results into the buffers.

        Launches O(1) operations, reads nothing on the host, and allocates no tensor whose size depends on values.

        Args:
            logits_RV: fp32 or bf16 logits of the first R slots.
        """

    def process(self, logits_RV: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the first rows, changed by the processors of each row, without a host read.

        Args:
            logits_RV: logits or log-probabilities, fp32.
        """
        rows, uses = len(logits_RV), sorted(self.kind)
        ids_RC, names = self.ids[:rows], {name for name, _ in uses}
        if "penalty" in names:
            logits_RV = RepetitionPenalty(self._setting("penalty", rows).to(logits_RV.dtype))(logits_RV, ids_RC)
        for name, number in uses:
            if name in ("ngram", "source_ngram", "sequences"):
                uses_R1 = self._setting(name, rows) == number
                if name == "sequences":
                    logits_RV = self._tables[number](logits_RV, torch.where(uses_R1, ids_RC, NO_ID))
                else:
                    known_RS = torch.where(uses_R1, ids_RC if name == "ngram" else self._sources[:rows], NO_ID)
                    logits_RV = NoSourceNGram(number, known_RS)(logits_RV, ids_RC)
        if "early" in names:
            logits_RV = self._ban(logits_RV, "early", _BANNED, _EARLY, is_ranged=("early", 1) in uses)
        if "force" in names:
            counts_R1, forced_R1 = self.counts[:rows, None], torch.full((1, 1), NO_ID, device=self.device)
            for name in ("first", "last"):
                is_due_R1 = self._setting(f"{name}_step", rows) == counts_R1
                forced_R1 = torch.where(is_due_R1, self._setting(f"{name}_id", rows).long(), forced_R1)
            logits_RV = force(logits_RV, forced_R1)
        if "late" in names:
            logits_RV = self._ban(logits_RV, "late", _BANNED_LATE, _LATE, is_ranged=("late", 1) in uses)
        return logits_RV

    def _ban(
        self, logits_RV: Float[Tensor, "rows vocab"], stage: str, always: int, ranged: int, *, is_ranged: bool
    ) -> Float[Tensor, "rows vocab"]:
        """Ban the ids with the flag `always`, and those with the flag `ranged` in the steps of their range."""
        flags_RV, counts_R1 = self._flags[: len(logits_RV)], self.counts[: len(logits_RV), None]
        if not is_ranged:
            return logits_RV.masked_fill((flags_RV & always > 0), -torch.inf)
        start_R1, stop_R1 = (
            self._setting(f"{stage}_start", len(counts_R1)),
            self._setting(f"{stage}_stop", len(counts_R1)),
        )
        is_due_R1 = (start_R1 <= counts_R1) & (counts_R1 < stop_R1)
        return logits_RV.masked_fill((flags_RV & (is_due_R1.view(torch.uint8) * ranged + always)) > 0, -torch.inf)

    def _setting(self, name: str, rows: int) -> Float[Tensor, "rows 1"]:
        """Return a setting of the first rows, fp64."""
        column = _COLUMNS[name]
        return self._settings[:rows, column : column + 1]

    def _flags_of(self, rules: _RowRules, end_ids: tuple[int, ...]) -> UInt8[Tensor, " vocab"]:
        flags_V = torch.zeros_like(self._flags[0])
        ends = self._copy([index for index in end_ids if index < self.vocab])
        for index, bit in [*((processor.index(self.device), bit) for processor, bit in rules.bans), (ends, END_FLAG)]:
            flags_V |= torch.zeros_like(flags_V).index_fill_(0, index, bit)
        return flags_V

    def _put_sources(self, sources: dict[int, Tensor]) -> None:
        """Store the sources of some slots; the buffer grows for a longer source, and the kind changes with it."""
        if not sources:
            return
        new_KS = pad_sequence([*sources.values()], batch_first=True, padding_value=NO_ID)
        longest, width = new_KS.shape[1], self._sources.shape[1]
        if longest > width:
            width = 1 << (longest - 1).bit_length()
            self._sources = functional.pad(self._sources, (0, width - self._sources.shape[1]), value=NO_ID)
        new_KS = functional.pad(new_KS, (0, width - longest), value=NO_ID)
        self._sources.index_copy_(0, self._copy([*sources]), new_KS)

    def _update_kind(self) -> None:
        kind = frozenset[tuple[str, int]]().union(*self._kinds)
        if any(name == "source_ngram" for name, _ in kind):
            kind |= {("source_width", self._sources.shape[1])}
        self.kind = kind

    def _buffers(self) -> list[Tensor]:
        """Return the tensors with an entry for each slot."""
        return [self.tokens, self.ids, self.counts, self._settings, self._flags, self._sources]

    def _copy(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return values of the host as a tensor on the device, without waiting for the device."""
        on_host: Tensor = torch.as_tensor(values, dtype=dtype)
        on_host = on_host.pin_memory() if self.device.type == "cuda" else on_host
        return on_host.to(self.device, non_blocking=True)


class DeviceChooser(SlotProcessors):
    """Chooses the next token of each slot on the device, with equal results to `TokenChooser`; see `SlotProcessors`.

    A row that has ended goes on until it leaves.

    Args:
        rows: number of slots.
        capacity: maximum number of ids of a slot, prompt and generated.
        vocab: number of logits of a row.
        device: device of the logits.
    """

    def __init__(self, rows: int, capacity: int, vocab: int, device: torch.device) -> None:
        super().__init__(rows, capacity, vocab, device)
        self.results: Tensor = torch.zeros(rows, 3, dtype=torch.float64, device=device)
        """Newest token, its log-probability, and 1 once the row has ended, fp64 [R, 3].

        A row ends with an end token, at its limit, and with a log-probability of NaN or -inf, which is a failure.
        """
        self._uniform = torch.zeros(rows, NUMBERS_AHEAD, dtype=torch.float64, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._next_column = 0
        self._generators: dict[int, Generator] = {}

    def join(self, slots: Sequence[int], requests: Sequence[RowRequest], prompts: Int[Tensor, "rows tokens"]) -> None:
        """Start rows in free slots; their newest tokens are the last ids of `prompts`. See `SlotProcessors.join`."""
        super().join(slots, requests, prompts)
        slots_K = self._copy(slots)
        self.results.index_fill_(0, slots_K, 0)
        streams = {slot: request.stream for slot, request in zip(slots, requests, strict=True)}
        new = {slot: stream.generator() for slot, stream in streams.items() if stream is not None}
        self._generators |= new
        if self._next_column > 0:
            self._draw_ahead([*new])

    def leave(self, slots: Sequence[int]) -> None:
        """Free slots. A row that continues elsewhere skips the numbers of its stream that it has used here."""
        super().leave(slots)
        for slot in slots:
            self._generators.pop(slot, None)

    def move(self, slots: Sequence[int]) -> None:
        """Move rows to the first slots: slot i continues the row of `slots[i]`; the slots after them are free."""
        super().move(slots)
        generators = self._generators
        self._generators = {new: generators[old] for new, old in enumerate(slots) if old in generators}

    def prepare(self) -> None:
        """Copy the next random numbers to the device if they are used up."""
        if self._next_column == 0:
            self._draw_ahead([*self._generators])
        if ("sample", 0) in self.kind:
            self._next_column = (self._next_column + 1) % NUMBERS_AHEAD

    def choose(self, logits_RV: Float[Tensor, "rows vocab"]) -> None:
        """Choose the next tokens of the first rows; see `SlotProcessors.choose`."""
        rows, names = len(logits_RV), {name for name, _ in self.kind}
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        log_total_R = logits_RV.logsumexp(1)
        changed_RV = self.process(logits_RV)
        if "sample" not in names:
            tokens_R, is_stuck_R = _most_probable(changed_RV)
        else:
            tokens_R, is_stuck_R = self._draw(changed_RV, names)
            is_stuck_R = is_stuck_R & ~log_total_R.isnan()
        if {"sample", "greedy"} <= names:
            samples_R, (best_R, is_best_stuck_R) = self._setting("samples", rows)[:, 0] > 0, _most_probable(changed_RV)
            tokens_R = torch.where(samples_R, tokens_R, best_R)
            is_stuck_R = torch.where(samples_R, is_stuck_R, is_best_stuck_R)
        log_probs_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] - log_total_R
        self._write(tokens_R, log_probs_R.masked_fill_(is_stuck_R, -torch.inf))

    def _draw(
        self, logits_RV: Float[Tensor, "rows vocab"], names: set[str]
    ) -> tuple[Int[Tensor, " rows"], Bool[Tensor, " rows"]]:
        """Return a token of each row, drawn with its next random number, and whether no token may follow."""
        uniform_R = self._uniform[: len(logits_RV)].index_select(1, self._column)[:, 0]
        self._column.add_(1).remainder_(NUMBERS_AHEAD)
        tokens_R = draw_open(self._warp(logits_RV, names), uniform_R)
        return tokens_R.clamp(min=0), tokens_R < 0

    def _warp(self, logits_RV: Float[Tensor, "rows vocab"], names: set[str]) -> Float[Tensor, "rows vocab"]:
        """Return the logits after the temperature and the filters of each row; a row without them stays unchanged."""
        chain, rows = list[Processor](), len(logits_RV)
        if "divisor" in names:
            chain.append(Temperature(self._setting("divisor", rows).to(logits_RV.dtype)))
        if "top_k" in names:
            most = max(number for name, number in self.kind if name == "top_k")
            chain.append(TopK(most, self._setting("top_k", rows).long()))
        if "top_p" in names:
            chain.append(TopP(self._setting("top_p", rows)))
        if "min_p" in names:
            chain.append(MinP(self._setting("min_p", rows).to(logits_RV.dtype)))
        return apply(chain, logits_RV, self.ids[:rows])

    def _write(self, tokens_R: Int[Tensor, " rows"], log_probs_R: Float[Tensor, " rows"]) -> None:
        """Write the chosen tokens and what follows from them into the buffers of the first rows."""
        rows = len(tokens_R)
        results_R3, counts_R, ids_RC = self.results[:rows], self.counts[:rows].add_(1), self.ids[:rows]
        is_full_R = counts_R >= self._setting("limit", rows)[:, 0]
        # A log-probability of NaN or -inf is not above -inf, and False <= True.
        is_over_R = (log_probs_R > -torch.inf) <= is_full_R
        is_end_R = self._flags[:rows].gather(1, tokens_R[:, None])[:, 0] & END_FLAG
        results_R3[:, 0].copy_(tokens_R)
        results_R3[:, 1].copy_(log_probs_R)
        results_R3[:, 2].logical_or_(is_over_R.logical_or_(is_end_R))
        self.tokens[:rows].copy_(tokens_R)
        if self.reads_ids:
            ids_RC.copy_(torch.cat([ids_RC[:, 1:], tokens_R[:, None]], 1))

    def _draw_ahead(self, slots: Sequence[int]) -> None:
        """Copy the random numbers of some slots from the next column to the last one to the device."""
        if slots:
            numbers = numpy.zeros((len(slots), NUMBERS_AHEAD))
            for row, slot in zip(numbers, slots, strict=True):
                row[self._next_column :] = self._generators[slot].random(NUMBERS_AHEAD - self._next_column)
            self._uniform.index_copy_(0, self._copy(slots), self._copy(numbers, torch.float64))

    def _buffers(self) -> list[Tensor]:
        return [*super()._buffers(), self.results, self._uniform]


def _most_probable(
    logits_RV: Float[Tensor, "rows vocab"],
) -> tuple[Int[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Return the most probable token of each row, and whether no token may follow."""
    best_R, tokens_R = logits_RV.max(1)
    return tokens_R, best_R == -torch.inf


def _sampling_settings(options: GenerateOptions | None) -> dict[str, Any]:
    """Return the settings of a row that samples with some options; None means greedy search."""
    if options is None:
        return {}
    shares = {"top_p": options.top_p if options.top_p < 1 else 2.0, "min_p": options.min_p}
    return {"samples": True, "divisor": options.divisor, "top_k": options.top_k, **shares}
