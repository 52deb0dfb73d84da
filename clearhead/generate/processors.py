"""Logits processors: functions that change the logits of the next token before it is chosen.

Each processor is a frozen dataclass. It is called with the logits and the ids so far, and returns new logits. Order and
results equal those of the transformers library, including ties, so settings can be copied from there.

A number of a processor, such as its penalty, may be a tensor with a number for each row.

Shapes: R rows, T prompt and generated tokens, S source tokens, V vocabulary, K remaining rows, N size of an n-gram.
W windows of that size, C candidates of a row, X banned ids, L length of the longest banned sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from clearhead.generate.options import GenerateOptions, SearchOptions

NO_ID = -1
"""Padding for the ids of shorter rows; it is not a token."""

Logits = Float[Tensor, "rows vocab"]
RowIds = Int[Tensor, "rows tokens"]
Processor = Callable[[Tensor, Tensor], Tensor]
"""Function of `Logits` and `RowIds` that returns new logits and leaves its arguments unchanged."""


def apply(chain: Sequence[Processor], logits_RV: Logits, ids_RT: RowIds) -> Logits:
    """Apply logits processors one after the other.

    Args:
        chain: processors in order; an empty list returns the logits unchanged.
        logits_RV: fp32 logits.
        ids_RT: prompt and generated ids; `NO_ID` marks padding.
    """
    for processor in chain:
        logits_RV = processor(logits_RV, ids_RT)
    return logits_RV


def is_timeless(processor: Processor) -> bool:
    """Return whether a logits processor changes a row in the same way in every batch.

    Processors that count tokens depend on the batch that a row started in. Processors that read sources store the rows
    of that batch.
    """
    if isinstance(processor, BannedIds):
        return processor.start == 0 and processor.stop is None
    return isinstance(processor, RepetitionPenalty | NoRepeatNGram | BannedSequences)


def only_banned(chain: Sequence[Processor], length: int, device: torch.device) -> Int[Tensor, " banned"] | None:
    """Return the ids (may repeat) that logits processors ban after `length` ids; None if they do more than ban."""
    banned = [processor.at_length(length, device) for processor in chain if isinstance(processor, BannedIds)]
    if len(banned) < len(chain):
        return None
    return banned[0] if len(banned) == 1 else torch.cat([torch.empty(0, dtype=torch.int64, device=device), *banned])


def select(chain: Sequence[Processor], rows_K: Int[Tensor, " kept"]) -> list[Processor]:
    """Return the logits processors of a batch that keeps only the rows `rows_K`, in this order."""
    return [processor.select(rows_K) if isinstance(processor, NoSourceNGram) else processor for processor in chain]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Makes ids that have occurred less likely: divides positive logits and multiplies negative ones.

    Args:
        penalty: factor above 0. 1 changes nothing; larger values discourage repetition more. A tensor is fp32 [R, 1].

    Source: arXiv 1909.05858, section 4.1, in the form that also lowers negative logits.
    """

    penalty: float | int | Float[Tensor, "rows 1"]

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        spare = logits_RV.shape[1]
        ids_RT = _with_spare(ids_RT, spare)
        logits_RW = functional.pad(logits_RV, (0, 1))
        seen_RT = logits_RW.gather(1, ids_RT)
        seen_RT = torch.where(seen_RT < 0, seen_RT * self.penalty, seen_RT / self.penalty)
        return logits_RW.scatter(1, ids_RT, seen_RT)[:, :spare]


@dataclass(frozen=True)
class NoRepeatNGram:
    """Bans every id that would complete an n-gram that has occurred.

    Args:
        size: n, at least 1; 1 bans every id that has occurred.

    Source: arXiv 1705.04304, section 2.5.
    """

    size: int

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        return _ban_completions(logits_RV, ids_RT, ids_RT, self.size)


@dataclass(frozen=True, eq=False)
class NoSourceNGram:
    """Bans every id that would complete an n-gram of the source.

    Args:
        size: n, at least 1; 1 bans every id of the source.
        source_RS: source of each row, or prompt for a decoder-only model; `NO_ID` marks padding.

    Source: arXiv 2004.13637, "subsequence blocking": a reply must not repeat the text that it answers.
    """

    size: int
    source_RS: Int[Tensor, "rows source"]

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        return _ban_completions(logits_RV, self.source_RS, ids_RT, self.size)

    def select(self, rows_K: Int[Tensor, " kept"]) -> NoSourceNGram:
        """Return the processor of a batch that keeps only the rows `rows_K`, in this order."""
        return NoSourceNGram(self.size, self.source_RS[rows_K])


@dataclass(frozen=True, eq=False)
class BannedIds:
    """Bans ids, either always or within a range of lengths.

    Args:
        ids: int64 ids; a tensor is on the device of the logits.
        start: number of ids so far, including prompt and padding, from which the ids are banned.
        stop: number of ids so far from which they are allowed again. None means that they stay banned.
    """

    ids: Int[Tensor, " banned"] | tuple[int, ...]
    start: int = 0
    stop: int | None = None
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        banned_X = self.at_length(ids_RT.shape[1], logits_RV.device)
        return logits_RV.index_fill(1, banned_X, -torch.inf) if len(banned_X) else logits_RV

    def at_length(self, length: int, device: torch.device) -> Int[Tensor, " banned"]:
        """Return the ids that may not follow a sequence of `length` ids."""
        if self.start <= length and (self.stop is None or length < self.stop):
            return self.index(device)
        return torch.empty(0, dtype=torch.int64, device=device)

    def index(self, device: torch.device) -> Int[Tensor, " banned"]:
        """Return the ids as a tensor; it is copied to the device once."""
        if isinstance(self.ids, Tensor):
            return self.ids
        if device not in self._on_device:
            self._on_device[device] = torch.tensor(self.ids, dtype=torch.int64, device=device)
        return self._on_device[device]


@dataclass(frozen=True)
class Temperature:
    """Divides all logits by the temperature: below 1 it sharpens the distribution, above 1 it flattens it.

    Args:
        temperature: divisor above 0. A tensor is fp32 [R, 1].
    """

    temperature: float | int | Float[Tensor, "rows 1"]

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        return logits_RV / self.temperature


@dataclass(frozen=True)
class TopK:
    """Keeps the k most probable ids, and all ids tied with the last of them.

    Args:
        count: k, at least 1; the largest k if `counts_R1` has a smaller one for some rows.
        counts_R1: k of each row, int64; 0 leaves the row unchanged. None means that all rows have the same k.

    Source: arXiv 1805.04833, section 5.
    """

    count: int
    counts_R1: Int[Tensor, "rows 1"] | None = None

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        top_RC = logits_RV.topk(min(self.count, logits_RV.shape[1]), dim=1).values
        if self.counts_R1 is None:
            return logits_RV.masked_fill(logits_RV < top_RC[:, -1:], -torch.inf)
        last_R1 = top_RC.gather(1, (self.counts_R1 - 1).clamp(0, top_RC.shape[1] - 1))
        return logits_RV.masked_fill((logits_RV < last_R1) & (self.counts_R1 > 0), -torch.inf)


@dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of most probable ids whose total probability reaches p; ties are broken arbitrarily.

    Args:
        share: p, above 0 and at most 1. A tensor is fp64 [R, 1]; 2 leaves a row unchanged.

    Source: arXiv 1904.09751, section 3.1.
    """

    share: float | int | Float[Tensor, "rows 1"]

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        sorted_RV, order_RV = logits_RV.sort(dim=1)
        rest = 1.0 - self.share
        rest = rest.to(logits_RV.dtype) if isinstance(rest, Tensor) else rest
        removed_RV = sorted_RV.softmax(1).cumsum(1) <= rest
        removed_RV[:, -1] = False
        return logits_RV.masked_fill(removed_RV.scatter(1, order_RV, removed_RV), -torch.inf)


@dataclass(frozen=True)
class MinP:
    """Keeps the ids whose probability is at least a given share of the largest probability.

    Args:
        share: minimum share of the largest probability, from 0 to 1. A tensor is fp32 [R, 1].

    Source: arXiv 2407.01082, section 3.
    """

    share: float | int | Float[Tensor, "rows 1"]

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        probs_RV = logits_RV.softmax(1)
        return logits_RV.masked_fill(probs_RV < self.share * probs_RV.amax(1, keepdim=True), -torch.inf)


@dataclass(frozen=True)
class ForcedAt:
    """Forces one id at a given length, with probability 1.

    Args:
        index: the forced id.
        length: number of ids so far, including prompt and padding, at which the id is forced.
    """

    index: int
    length: int

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        if ids_RT.shape[1] != self.length:
            return logits_RV
        return force(logits_RV, torch.full((1, 1), self.index, device=logits_RV.device))


@dataclass(frozen=True)
class BannedSequences:
    """Bans the last id of a sequence if the newest tokens are its other ids.

    Args:
        sequences: banned sequences, each of at least two ids.
    """

    sequences: tuple[tuple[int, ...], ...]
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        table_XL = self.table(ids_RT.device)
        before_XL, size = table_XL[:, :-1], table_XL.shape[1] - 1
        newest_RL = functional.pad(ids_RT, (max(size - ids_RT.shape[1], 0), 0), value=NO_ID)[:, -size:]
        matches_RX = ((before_XL == newest_RL[:, None]) | (before_XL == NO_ID)).all(2)
        return _ban_where(logits_RV, matches_RX, table_XL[:, -1])

    def table(self, device: torch.device) -> Int[Tensor, "banned length"]:
        """Return the sequences with `NO_ID` in front of the shorter ones; the table is copied to the device once."""
        if device not in self._on_device:
            longest = max(map(len, self.sequences))
            rows = [[NO_ID] * (longest - len(sequence)) + [*sequence] for sequence in self.sequences]
            self._on_device[device] = torch.tensor(rows, device=device)
        return self._on_device[device]


def force(logits_RV: Logits, forced_R1: Int[Tensor, "#rows 1"]) -> Logits:
    """Return logits that give the forced id of each row probability 1; `NO_ID` leaves a row unchanged."""
    columns_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    only_RV = torch.zeros_like(logits_RV).masked_fill(columns_V != forced_R1, -torch.inf)
    return torch.where(forced_R1 == NO_ID, logits_RV, only_RV)


def repetition_processors(
    options: GenerateOptions | SearchOptions, source_RS: Int[Tensor, "rows source"]
) -> list[Processor]:
    """Return the logits processors that the options set against repetition, in the order in which they run.

    Args:
        options: options of the call.
        source_RS: source of each row, as in `NoSourceNGram`.
    """
    chain: list[Processor] = []
    if options.repetition_penalty != 1:
        chain.append(RepetitionPenalty(options.repetition_penalty))
    if options.no_repeat_ngram_size > 0:
        chain.append(NoRepeatNGram(options.no_repeat_ngram_size))
    if options.encoder_no_repeat_ngram_size > 0:
        chain.append(NoSourceNGram(options.encoder_no_repeat_ngram_size, source_RS))
    return chain


def build_logits_processors(
    options: GenerateOptions | SearchOptions,
    end_ids: tuple[int, ...],
    prompt_length: int,
    banned_X: Int[Tensor, " banned"],
    source_RS: Int[Tensor, "rows source"],
) -> list[Processor]:
    """Return the logits processors for the options of a call, in the order that every method applies.

    Args:
        options: options of the call.
        end_ids: ids that end a sequence.
        prompt_length: number of tokens of the prompt, with padding.
        banned_X: ids that are never generated.
        source_RS: source of each row, as in `NoSourceNGram`.
    """
    chain = repetition_processors(options, source_RS)
    if options.tokens_before_end > 0:
        chain.append(BannedIds(end_ids, stop=prompt_length + options.tokens_before_end))
    if len(banned_X):
        chain.append(BannedIds(banned_X))
    return chain


def build_logits_warpers(options: GenerateOptions) -> list[Processor]:
    """Return the logits processors that shape the sampling distribution, in order; they run after the others."""
    chain: list[Processor] = []
    if options.divisor != 1:
        chain.append(Temperature(options.divisor))
    if options.top_k > 0:
        chain.append(TopK(options.top_k))
    if options.top_p < 1:
        chain.append(TopP(options.top_p))
    if options.min_p > 0:
        chain.append(MinP(options.min_p))
    return chain


def _ban_completions(logits_RV: Logits, known_RS: Int[Tensor, "rows known"], ids_RT: RowIds, size: int) -> Logits:
    """Ban the ids that would complete an n-gram of the known ids."""
    if ids_RT.shape[1] + 1 < size or known_RS.shape[1] < size:
        return logits_RV
    newest_RN = ids_RT[:, ids_RT.shape[1] + 1 - size :]
    windows_RWN = known_RS.unfold(1, size, 1)
    matches_RW = (windows_RWN[:, :, :-1] == newest_RN[:, None]).all(dim=2)
    return _ban_where(logits_RV, matches_RW, windows_RWN[:, :, -1])


def _ban_where(
    logits_RV: Logits, matches_RW: Bool[Tensor, "rows windows"], last_RW: Int[Tensor, "*#rows windows"]
) -> Logits:
    """Ban the last id of each window that matches the newest ids of its row."""
    spare = logits_RV.shape[1]
    completing_RW = torch.where(matches_RW, _with_spare(last_RW, spare), spare)
    banned_RV = logits_RV.new_zeros((len(logits_RV), spare + 1), dtype=torch.bool)
    return logits_RV.masked_fill(banned_RV.scatter_(1, completing_RW, True)[:, :spare], -torch.inf)


def _with_spare(ids: Int[Tensor, "*axes"], spare: int) -> Int[Tensor, "*axes"]:
    """Replace ids that are not outputs, such as padding, by the index of an extra last column."""
    return torch.where((ids < 0) | (ids >= spare), spare, ids)
