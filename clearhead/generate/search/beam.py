"""Batched beam search with a KV cache, for translations and continuations; beam size 1 is greedy search.

The rules, for one sentence with beam size B:

- Step t extends every live hypothesis by one token. Of all extensions, the best 2B are examined, by the sum of
  log-probabilities (more if there are several end tokens). An end token among the first B of them finishes that
  hypothesis. The best B that do not end stay live.
- Score = sum of log-probabilities / length ** alpha. The best `n_best` finished hypotheses are kept.
- Early stop: a sentence is done when it holds `n_best` finished hypotheses and no live one can still beat the worst of
  them. A live hypothesis with sum s <= 0 can reach at most s / limit ** alpha. Later tokens only lower the sum, and no
  hypothesis is longer than the limit. With alpha below 0, length lowers a score, and the bound is s / length ** alpha.
  So an early stop returns exactly the same result as a search up to the limit. With B = 1, the first finished
  hypothesis is the result: greedy search keeps no rival.
- `early_stopping` True ends the search with B finished hypotheses. False ends it with B finished hypotheses that no
  live one would beat if it ended at its present length.
- At the limit a sentence is done, and its live hypotheses are cut off with the `stop_reason` "length". In translation
  they count only if nothing has finished. The end token is then forced onto them, with the probability that the model
  gives it. Continuations of prompts (`open_ended`) compete without an end token.
- Ties: of equal sums, the extension of the better parent comes first. Of equal scores, the shorter hypothesis comes
  first, then the one with smaller ids.

A length is the number of generated tokens, including the end token. A prompt does not count.

Shapes: N all sentences (or prompts), M sentences still in the batch, B live hypotheses of each (1 before the first
step). R = M * B decoder rows. S source tokens, T prompt and generated tokens, V vocabulary, C examined extensions.
X banned ids, E end tokens.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from clearhead.base.errors import InputError, RunFailure, argument
from clearhead.base.progress import update
from clearhead.core import Transformer
from clearhead.fast.logits import top_and_log_total
from clearhead.generate.options import SearchOptions
from clearhead.generate.processors import Processor, apply, only_banned, select
from clearhead.generate.results import Continuation, Sentence, StopReason, length_normalised
from clearhead.generate.running import Generated, Member, SequenceProgress, SurvivingRows
from clearhead.generate.search.recorder import CUT_OFF, END, FORCED_END, BeamRecorder

EndLogProbs = Callable[[Tensor], Tensor]
"""Function that returns the log-probability of the end token in some rows, fp32."""


def target_limits(module: Transformer, source_lengths: Sequence[int], options: SearchOptions) -> list[int]:
    """Return the maximum length of a hypothesis for each source length.

    Raises:
        InputError: `max_length` or `min_length` exceeds the decoder's positions.
    """
    most = module.spec.position_limit
    lengths = {"max_length": options.max_length, "min_length": options.min_length}
    faults = [
        argument(name) + f" is {length}, but the model's decoder has {most} positions: set it to {most} or less."
        for name, length in lengths.items()
        if most is not None and length is not None and length > most
    ]
    if faults:
        raise InputError.from_faults(faults, subject="the search options")
    return [options.target_limit(length, most) for length in source_lengths]


@dataclass
class Finished:
    """The best finished hypotheses of one sentence, best first, at most `capacity`, and their total count."""

    capacity: int
    ranked: list[Continuation] = field(default_factory=list)
    count: int = 0

    def add(self, candidate: Continuation) -> None:
        """Count a finished hypothesis, and insert it if it is among the `capacity` best."""
        self.count += 1
        bisect.insort(self.ranked, candidate, key=lambda entry: (-entry.score, len(entry.ids), entry.ids))
        del self.ranked[self.capacity :]

    def open_to(self, score: float) -> bool:
        """Return whether a hypothesis with this score would enter the list of the best finished hypotheses."""
        return len(self.ranked) < self.capacity or score > self.ranked[-1].score


@dataclass(frozen=True)
class Extensions:
    """One-token extensions of the live hypotheses of each sentence, best first."""

    sums_MC: Float[Tensor, "sentences candidates"]
    ids_MC: Int[Tensor, "sentences candidates"]
    parents_MC: Int[Tensor, "sentences candidates"]

    def first(self, count: int) -> Extensions:
        """Return the best `count` extensions of each sentence."""
        return Extensions(self.sums_MC[:, :count], self.ids_MC[:, :count], self.parents_MC[:, :count])

    def take(self, order_MB: Int[Tensor, "sentences beams"]) -> Extensions:
        """Return the extensions at the given indices of each sentence, in their order."""
        return Extensions(*(tensor.gather(1, order_MB) for tensor in (self.sums_MC, self.ids_MC, self.parents_MC)))


def top_log_probabilities(
    logits_RV: Float[Tensor, "rows vocab"], banned_X: Int[Tensor, " banned"], count: int
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"], Float[Tensor, " rows"]]:
    """Return the log-probabilities and ids of each row's best tokens, and the log of its softmax denominator.

    Probabilities are relative to the whole vocabulary: a banned id is not chosen, but keeps its share.

    Args:
        logits_RV: fp32 or bf16 logits.
        banned_X: ids that must not be chosen.
        count: number of tokens to return; all tokens if the vocabulary is smaller.
    """
    top_RC, ids_RC, normaliser_R = top_and_log_total(logits_RV, min(count, logits_RV.shape[1]), banned_X)
    # Rounding can lift a probability above 1, but the early stop relies on sums that never grow.
    return (top_RC - normaliser_R[:, None]).clamp_(max=0.0), ids_RC, normaliser_R


def top_changed_log_probabilities(
    log_probs_RV: Float[Tensor, "rows vocab"], count: int
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"], Float[Tensor, " rows"]]:
    """Return each row's best log-probabilities and their ids, and zeros as denominators: the input is normalised."""
    top_RC, ids_RC = log_probs_RV.topk(min(count, log_probs_RV.shape[1]), dim=1)
    return top_RC.clamp_(max=0.0), ids_RC, log_probs_RV.new_zeros(len(log_probs_RV))


def best_extensions(
    log_probs_RC: Float[Tensor, "rows top"],
    ids_RC: Int[Tensor, "rows top"],
    sums_MB: Float[Tensor, "sentences beams"],
    count: int,
) -> Extensions:
    """Return the `count` best extensions of each sentence; missing ones have a sum of -inf."""
    num_sentences, num_top = len(sums_MB), log_probs_RC.shape[1]
    sums_MC = (log_probs_RC + sums_MB.reshape(-1, 1)).view(num_sentences, -1)
    ids_MC = ids_RC.reshape(num_sentences, -1)
    if sums_MC.shape[1] == count == num_top:  # all have one parent and are sorted already
        return Extensions(sums_MC, ids_MC, torch.zeros_like(ids_MC))
    missing = count - sums_MC.shape[1]
    if missing > 0:
        sums_MC = functional.pad(sums_MC, (0, missing), value=-torch.inf)
        ids_MC = functional.pad(ids_MC, (0, missing))
    # A stable sort, unlike topk, defines which of two equal sums comes first.
    sorted_MC = sums_MC.sort(dim=1, descending=True, stable=True)
    sums_MC, order_MC = sorted_MC.values[:, :count], sorted_MC.indices[:, :count]
    parents_MC = (order_MC // num_top).clamp_(max=sums_MB.shape[1] - 1)
    return Extensions(sums_MC, ids_MC.gather(1, order_MC), parents_MC)


def live_order(is_end_MC: Bool[Tensor, "sentences candidates"], beams: int) -> Int[Tensor, "sentences beams"]:
    """Return the indices of each sentence's best extensions that do not end, in their order."""
    return is_end_MC.to(torch.uint8).argsort(dim=1, stable=True)[:, :beams]


class Search(Member):
    """Beam search over sentences in a running batch: live hypotheses in tensors, finished ones in lists."""

    def __init__(
        self,
        sentences: Sequence[Sentence],
        end_ids: tuple[int, ...],
        options: SearchOptions,
        prompts_NT: Int[Tensor, "batch tokens"],
        *,
        chain: Sequence[Processor],
        open_ended: bool = False,
        recorder: BeamRecorder | None = None,
    ) -> None:
        """Start every sentence with one hypothesis: its prompt."""
        assert recorder is None or len(sentences) == 1, "a recorder supports a search for one sentence only"
        self.sentences: list[Sentence] = list(sentences)
        self.recorder = recorder
        self.options = options
        self.limits: list[int] = [sentence.limit for sentence in sentences]
        self.eos_id: int = end_ids[0]
        self.chain: Sequence[Processor] = chain
        self.open_ended = open_ended
        # A search that may stop while a live hypothesis could still win compares with `beam_size` finished ones.
        capacity = options.beam_size if options.early_stopping is False else options.n_best
        self.finished: list[Finished] = [Finished(capacity) for _ in sentences]
        self.alive: list[int] = list(range(len(sentences)))
        self.length: int = 0
        self.prompt_length: int = prompts_NT.shape[1]
        self.sums_MB: Tensor = torch.zeros(len(sentences), 1, device=prompts_NT.device)
        self.prefix_RT: Tensor = prompts_NT
        self.ends_E: Tensor = prompts_NT.new_tensor(end_ids)

    @property
    def sequences(self) -> list[Sentence]:
        """The sentences that are not done."""
        return [self.sentences[number] for number in self.alive]

    @property
    def tokens(self) -> Int[Tensor, "rows 1"]:
        """The newest token of each live hypothesis."""
        return self.prefix_RT[:, -1:]

    @property
    def num_sentences(self) -> int:
        """Number of unfinished sentences: the source texts in the encoder memory that the hypotheses read."""
        return len(self.alive)

    def absorb(self, other: Member) -> bool:
        """Return False: searches never merge, because each counts steps from its own start."""
        return False

    def drop(self, sequence: Generated) -> SurvivingRows:
        """Remove an unfinished sentence and its hypotheses from the search."""
        remaining = [index for index, number in enumerate(self.alive) if self.sentences[number] is not sequence]
        return self._leave(remaining) if len(remaining) < len(self.alive) else SurvivingRows()

    def advance(self, logits_RV: Float[Tensor, "rows vocab"]) -> tuple[list[SequenceProgress], SurvivingRows]:
        """Extend every live hypothesis by one token; a sentence fails alone if its logits are not numbers."""
        return self.take(*self._extend(logits_RV))

    @property
    def num_extensions(self) -> int:
        """Number of extensions of each sentence that are examined in a step."""
        # Each of B hypotheses has E end tokens, so (1 + E) * B extensions always include B that do not end. Greedy
        # search needs no rival.
        beams = self.options.beam_size
        return 1 if beams == 1 else (1 + len(self.ends_E)) * beams

    def move_to_host(self) -> None:
        """Keep the hypotheses on the host: from now on `take` gets extensions that were computed elsewhere."""
        self.sums_MB, self.prefix_RT, self.ends_E = self.sums_MB.cpu(), self.prefix_RT.cpu(), self.ends_E.cpu()
        self.chain = ()

    def _extend(self, logits_RV: Float[Tensor, "rows vocab"]) -> tuple[Extensions, EndLogProbs]:
        """Return the best extensions of each sentence, and a function that returns log-probabilities of the end."""
        count = self.num_extensions
        banned_X = only_banned(self.chain, self.prefix_RT.shape[1], logits_RV.device)
        if banned_X is None:
            logits_RV = logits_RV.float().log_softmax(1)
        unchanged_RV = logits_RV  # a processor may ban the end token that is forced at the limit
        if self.recorder is not None:
            before_RV = logits_RV.float().log_softmax(1)
            after_RV = apply(self.chain, before_RV, self.prefix_RT)
            self.recorder.look(self._generated_ids(self._rows_of(0)), self.sums_MB[0].tolist(), before_RV, after_RV)
        if banned_X is None:
            changed_RV = apply(self.chain, logits_RV, self.prefix_RT)
            log_probs_RC, ids_RC, normaliser_R = top_changed_log_probabilities(changed_RV, count)
        else:
            log_probs_RC, ids_RC, normaliser_R = top_log_probabilities(logits_RV, banned_X, count)
        best = best_extensions(log_probs_RC, ids_RC, self.sums_MB, count)
        return best, lambda rows_B: unchanged_RV[rows_B, self.eos_id].float() - normaliser_R[rows_B]

    def take(self, best: Extensions, end_log_probs: EndLogProbs) -> tuple[list[SequenceProgress], SurvivingRows]:
        """Finish hypotheses and sentences after a step, and continue with the live extensions.

        Args:
            best: the best `num_extensions` extensions of each sentence.
            end_log_probs: function that returns the log-probability of the end token in some rows.
        """
        before, beams = self.sequences, self.options.beam_size
        self.length += 1
        is_end_MC = (best.ids_MC[..., None] == self.ends_E).any(2) & (best.sums_MC > -torch.inf)
        live = best.first(beams)
        if bool(is_end_MC.any()):
            self._keep_finished(best, is_end_MC[:, :beams])
            live = best.take(live_order(is_end_MC, beams))
        survivors = self._advance(live, self._end_sentences(live, end_log_probs))
        alive = set(self.alive)
        for number, sentence in enumerate(self.sentences):
            if number not in alive and not sentence.is_done:
                sentence.candidates, sentence.is_done = self.finished[number].ranked[: self.options.n_best], True
        update(self.length, max(self.limits), "tokens")
        return [SequenceProgress(sentence, "", sentence.is_done) for sentence in before], survivors

    def _keep_finished(self, best: Extensions, is_end_MB: Bool[Tensor, "sentences beams"]) -> None:
        """Add the extensions that end to the finished hypotheses of their sentences."""
        sentences, columns = is_end_MB.nonzero(as_tuple=True)
        rows = sentences * self.sums_MB.shape[1] + best.parents_MC[sentences, columns]
        sums, ends = best.sums_MC[sentences, columns].tolist(), best.ids_MC[sentences, columns].tolist()
        prefixes = self._generated_ids(rows)
        for sentence, prefix, last, total in zip(sentences.tolist(), prefixes, ends, sums, strict=True):
            self._finish(sentence, prefix, last, total, cut_off=False)

    def _generated_ids(self, rows_R: Int[Tensor, " some_rows"]) -> list[list[int]]:
        """Return the generated ids of these rows."""
        return self.prefix_RT[rows_R, self.prompt_length :].tolist()

    def _finish(self, sentence: int, prefix: list[int], last: int, total: float, *, cut_off: bool) -> None:
        """Add prefix + last token to the finished list of the sentence with this batch index."""
        score = length_normalised(total, self.length, self.options.length_penalty)
        stop_reason: StopReason = "length" if cut_off else "end"
        self.finished[self.alive[sentence]].add(Continuation((*prefix, last), score, total, stop_reason))
        if self.recorder is not None:
            forced = CUT_OFF if self.open_ended else FORCED_END
            self.recorder.finish((*prefix, last), total, forced if cut_off else END)

    def _end_sentences(self, live: Extensions, end_log_probs: EndLogProbs) -> list[int]:
        """Return the batch indices of unfinished sentences; end the others, with cut-off hypotheses or a failure."""
        remaining = []
        for sentence, best_sum in enumerate(live.sums_MC[:, 0].tolist()):
            if math.isnan(best_sum):
                failed = self.sentences[self.alive[sentence]]
                failed.failure = RunFailure(f"the model's output at target token {self.length} is not a number.")
                continue
            finished = self.finished[self.alive[sentence]]
            stop_reason = self._stop_reason(self.alive[sentence], best_sum)
            if not stop_reason:
                remaining.append(sentence)
            elif self.open_ended:
                if self.options.beam_size > 1 or not finished.count:
                    self._cut_off_open(sentence, live)
            elif not finished.ranked:
                self._cut_off(sentence, end_log_probs)
            if self.recorder is not None:
                chosen = live.ids_MC[0], live.parents_MC[0], live.sums_MC[0]
                self.recorder.choose(*chosen, self.ends_E.tolist(), stop_reason)
        return remaining

    def _stop_reason(self, sentence: int, best_sum: float) -> str:
        """Return the reason why no live hypothesis can change the finished list, or an empty string if one can."""
        limit, finished = self.limits[sentence], self.finished[sentence]
        if self.length >= limit:
            return "the length limit is reached"
        if best_sum == -math.inf:
            return "no token may follow"
        if self._is_full(finished):
            return "enough hypotheses have finished"
        penalty = self.options.length_penalty
        length = limit if penalty > 0 and self.options.early_stopping is not False else self.length
        if not finished.open_to(length_normalised(best_sum, length, penalty)):
            return "no live hypothesis can reach the finished ones any more"
        return ""

    def _is_full(self, finished: Finished) -> bool:
        """Return whether the search of a sentence ends, regardless of the scores of its live hypotheses."""
        if self.options.beam_size == 1:
            return finished.count > 0
        return self.options.early_stopping is True and finished.count >= self.options.beam_size

    def _cut_off(self, sentence: int, end_log_probs: EndLogProbs) -> None:
        """Force the end token onto the hypotheses before this step, with its log-probability in each row."""
        rows_B = self._rows_of(sentence)
        totals = (self.sums_MB[sentence] + end_log_probs(rows_B)).tolist()
        for prefix, total in zip(self._generated_ids(rows_B), totals, strict=True):
            if total > -math.inf:
                self._finish(sentence, prefix, self.eos_id, total, cut_off=True)

    def _cut_off_open(self, sentence: int, live: Extensions) -> None:
        """Add the extensions that are live at the limit to the candidates, without an end token."""
        if self.length < self.limits[self.alive[sentence]]:
            return
        prefixes = self._generated_ids(self._rows_of(sentence)[live.parents_MC[sentence]])
        ends = zip(prefixes, live.ids_MC[sentence].tolist(), live.sums_MC[sentence].tolist(), strict=True)
        for prefix, last, total in ends:
            if total > -math.inf:
                self._finish(sentence, prefix, last, total, cut_off=True)

    def _rows_of(self, sentence: int) -> Int[Tensor, " beams"]:
        """Return the rows of the hypotheses of the sentence with this batch index."""
        beams = self.sums_MB.shape[1]
        return torch.arange(sentence * beams, (sentence + 1) * beams, device=self.sums_MB.device)

    def _advance(self, live: Extensions, remaining: list[int]) -> SurvivingRows:
        """Replace the hypotheses of the remaining sentences by their live extensions."""
        old_beams = self.sums_MB.shape[1]
        some_finished = len(remaining) < len(self.alive)
        if not some_finished and self.options.beam_size == 1:
            self.sums_MB, self.prefix_RT = live.sums_MC, torch.cat([self.prefix_RT, live.ids_MC], 1)
            return SurvivingRows()
        kept_M = torch.tensor(remaining, dtype=torch.int64, device=self.sums_MB.device)
        if some_finished:
            self.alive = [self.alive[sentence] for sentence in remaining]
            live = Extensions(live.sums_MC[kept_M], live.ids_MC[kept_M], live.parents_MC[kept_M])
        rows_R = (kept_M[:, None] * old_beams + live.parents_MC).flatten()
        self.sums_MB = live.sums_MC
        self.prefix_RT = torch.cat([self.prefix_RT.index_select(0, rows_R), live.ids_MC.reshape(-1, 1)], 1)
        self.chain = select(self.chain, rows_R)
        return SurvivingRows(rows_R, kept_M if some_finished else None)

    def _leave(self, remaining: list[int]) -> SurvivingRows:
        """Keep only the hypotheses of the sentences with these batch indices."""
        kept_M = torch.tensor(remaining, dtype=torch.int64, device=self.sums_MB.device)
        beams = self.sums_MB.shape[1]
        rows_R = (kept_M[:, None] * beams + torch.arange(beams, device=kept_M.device)).flatten()
        self.alive = [self.alive[index] for index in remaining]
        self.sums_MB, self.prefix_RT = self.sums_MB[kept_M], self.prefix_RT[rows_R]
        self.chain = select(self.chain, rows_R)
        return SurvivingRows(rows_R, kept_M)
