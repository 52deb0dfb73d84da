"""Logits processors: functions that change the logits of the next token before it is chosen.

Each processor is a frozen dataclass. It is called with the logits and the ids so far, and returns new logits. Order and
results equal those of the transformers library, including ties, so settings can be copied from there.

Shapes: R rows, T prompt and generated tokens, S source tokens, V vocabulary, K remaining rows, N size of an n-gram.
W windows of that size, C candidates of a row, X banned ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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
        penalty: factor above 0. 1 changes nothing; larger values discourage repetition more.

    Source: arXiv 1909.05858, section 4.1, in the form that also lowers negative logits.
    """

    penalty: float | int

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

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        banned_X = self.at_length(ids_RT.shape[1], logits_RV.device)
        return logits_RV.index_fill(1, banned_X, -torch.inf) if len(banned_X) else logits_RV

    def at_length(self, length: int, device: torch.device) -> Int[Tensor, " banned"]:
        """Return the ids that may not follow a sequence of `length` ids."""
        is_banned = self.start <= length and (self.stop is None or length < self.stop)
        if is_banned and isinstance(self.ids, Tensor):
            return self.ids
        return torch.tensor(self.ids if is_banned else (), dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Temperature:
    """Divides all logits by the temperature: below 1 it sharpens the distribution, above 1 it flattens it.

    Args:
        temperature: divisor above 0.
    """

    temperature: float | int

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        return logits_RV / self.temperature


@dataclass(frozen=True)
class TopK:
    """Keeps the k most probable ids, and all ids tied with the last of them.

    Args:
        count: k, at least 1.

    Source: arXiv 1805.04833, section 5.
    """

    count: int

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        top_RC = logits_RV.topk(min(self.count, logits_RV.shape[1]), dim=1).values
        return logits_RV.masked_fill(logits_RV < top_RC[:, -1:], -torch.inf)


@dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of most probable ids whose total probability reaches p; ties are broken arbitrarily.

    Args:
        share: p, above 0 and at most 1.

    Source: arXiv 1904.09751, section 3.1.
    """

    share: float | int

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        sorted_RV, order_RV = logits_RV.sort(dim=1)
        removed_RV = sorted_RV.softmax(1).cumsum(1) <= 1.0 - self.share
        removed_RV[:, -1] = False
        return logits_RV.masked_fill(removed_RV.scatter(1, order_RV, removed_RV), -torch.inf)


@dataclass(frozen=True)
class MinP:
    """Keeps the ids whose probability is at least a given share of the largest probability.

    Args:
        share: minimum share of the largest probability, from 0 to 1.

    Source: arXiv 2407.01082, section 3.
    """

    share: float | int

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
        forced_RV = torch.full_like(logits_RV, -torch.inf)
        forced_RV[:, self.index] = 0.0
        return forced_RV


@dataclass(frozen=True)
class BannedSequences:
    """Bans the last id of a sequence if the newest tokens are its other ids.

    Args:
        sequences: banned sequences, each of at least two ids.
    """

    sequences: tuple[tuple[int, ...], ...]

    def __call__(self, logits_RV: Logits, ids_RT: RowIds) -> Logits:
        """Return the changed logits."""
        banned_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
        for sequence in self.sequences:
            size = len(sequence) - 1
            if size <= ids_RT.shape[1]:
                before_X = torch.tensor(sequence[:-1], device=ids_RT.device)
                banned_RV[:, sequence[-1]] |= (ids_RT[:, ids_RT.shape[1] - size :] == before_X).all(1)
        return logits_RV.masked_fill(banned_RV, -torch.inf)


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
    spare = logits_RV.shape[1]
    newest_RN = ids_RT[:, ids_RT.shape[1] + 1 - size :]
    windows_RWN = known_RS.unfold(1, size, 1)
    matches_RW = (windows_RWN[:, :, :-1] == newest_RN[:, None]).all(dim=2)
    completing_RW = torch.where(matches_RW, _with_spare(windows_RWN[:, :, -1], spare), spare)
    banned_RV = logits_RV.new_zeros((len(logits_RV), spare + 1), dtype=torch.bool)
    return logits_RV.masked_fill(banned_RV.scatter_(1, completing_RW, True)[:, :spare], -torch.inf)


def _with_spare(ids: Int[Tensor, "*axes"], spare: int) -> Int[Tensor, "*axes"]:
    """Replace ids that are not outputs, such as padding, by the index of an extra last column."""
    return torch.where((ids < 0) | (ids >= spare), spare, ids)
