"""Log-probabilities of targets given their sources, and of texts under a decoder-only model.

Targets are scored as in beam search, from one uncached pass over whole sentences. Long texts are read by a sliding
window. A sequence is start token, text, end token. Every token except the first is scored once. The first window scores
all tokens that it predicts. Each later window starts `stride` tokens further and scores the `stride` tokens that no
window has scored. So each of them is predicted from at least `window` - `stride` tokens.

Shapes: B windows or sentence pairs of a batch, S source tokens, C scored tokens of a window, D width, V vocabulary.
T tokens of a window, or of a target with the end token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from numpy import ndarray
from torch import Tensor

from clearhead.base.errors import InputError, nth_text
from clearhead.base.hooks import naming_texts
from clearhead.base.printing import Printed
from clearhead.core import Transformer
from clearhead.data.batches.base import DeviceBatch
from clearhead.data.feed import compute_each, computes_late
from clearhead.fast.logits import top_and_log_total
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of, pad_ids, read_tokens
from clearhead.generate.prefill import check_model
from clearhead.generate.results import length_normalised
from clearhead.text.long_texts import LONGEST_PROMPT, refuse_enormous
from clearhead.text.tokenizer import Tokenizer

# Maximum number of fp32 logits in one batch, for any vocabulary size: 64 MiB, and 512 MiB on a GPU.
MOST_LOGITS = 2**24
_MOST_GPU_LOGITS = 2**27


@dataclass(frozen=True, repr=False)
class PairScore(Printed):
    """Log-probability of one target.

    Args:
        ids: ids of the target, with the end token.
        token_log_probabilities: natural-log probability of each of `ids`, given the tokens before it and the source.
        log_probability: sum of `token_log_probabilities`.
        score: `log_probability` / len(ids) ** length_penalty, as in beam search.
    """

    ids: tuple[int, ...]
    token_log_probabilities: tuple[float, ...]
    log_probability: float
    score: float

    @classmethod
    def of(cls, ids: Sequence[int], log_probabilities: Sequence[float], length_penalty: float) -> PairScore:
        """Return the score of a target from the log-probabilities of its tokens."""
        total = math.fsum(log_probabilities)
        score = length_normalised(total, len(ids), length_penalty)
        return cls(tuple(ids), tuple(log_probabilities), total, score)


def score_targets(
    module: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    length_penalty: float,
    forced: int = 0,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[PairScore]:
    """Return the log-probabilities of each target given its source, in the given order.

    Args:
        module: an encoder-decoder model. If it is in training mode, a replica in evaluation mode runs.
        sources: ids that the encoder reads, none empty.
        targets: ids with start and end token.
        pad_id: id of the padding token.
        length_penalty: exponent alpha of the score.
        forced: number of first predicted ids that count with probability 1.
        batch_size: maximum number of pairs in a batch. None means that only the tokens limit it.
        batch_tokens: maximum number of padded source and target tokens in a batch. None means 8,192, and `read_tokens`
            on a GPU.

    Raises:
        InputError: the counts differ, a source is empty, or a sequence exceeds the model's positions.
    """
    if len(sources) != len(targets):
        raise InputError(
            f"there are {len(sources)} sources but {len(targets)} targets: give one target for each source."
        )
    labels = [tuple(target[1:]) for target in targets]
    check_lengths(sources, module.spec.position_limit, noun="source")
    check_lengths(labels, module.spec.position_limit, noun="target")
    per_token: list[list[float]] = [[] for _ in labels]
    module, device = in_evaluation(module), device_of(module)
    # Every target token needs a row of logits, so a large vocabulary needs smaller batches.
    budget = batch_tokens or (read_tokens(module) if computes_late(device) else 8192)
    budget = max(min(budget, 2 * _most_logits(device) // module.num_target_ids), 1)
    costs = [2 * max(len(source), len(label)) for source, label in zip(sources, labels, strict=True)]

    def make_batches() -> Iterator[tuple[list[int], _PairBatch]]:
        for batch in batches_by_cost(costs, budget=budget, most_rows=batch_size):
            sides = [sources[i] for i in batch], [targets[i] for i in batch]
            yield batch, _PairBatch(*chain(*(pad_ids(side, pad_id, torch.device("cpu")) for side in sides)))

    def run(batch: list[int], pairs: _PairBatch) -> tuple[Tensor]:
        with torch.inference_mode(), naming_texts(batch):
            target_ids, target_mask = pairs.target_ids[:, :-1], pairs.target_mask[:, 1:]
            out = module(pairs.ids, target_ids, mask=pairs.mask, target_mask=target_mask)
            assert out.logits is not None, "the model must have a head over a vocabulary"
            return (_label_log_probabilities(out.logits, pairs.target_ids[:, 1:]),)

    for batch, (log_probs_BT,) in compute_each(make_batches(), run, device):
        for i, row in zip(batch, log_probs_BT.tolist(), strict=True):
            per_token[i] = [0.0] * forced + row[forced : len(labels[i])]
    return [PairScore.of(ids, row, length_penalty) for ids, row in zip(labels, per_token, strict=True)]


def _most_logits(device: torch.device) -> int:
    return _MOST_GPU_LOGITS if computes_late(device) else MOST_LOGITS


@dataclass(frozen=True)
class _PairBatch(DeviceBatch):
    """Batch of sources, and of targets with start and end token: padded ids, and masks that are True at real tokens."""

    ids: Int[Tensor, "batch source"]
    mask: Bool[Tensor, "batch source"]
    target_ids: Int[Tensor, "batch target"]
    target_mask: Bool[Tensor, "batch target"]


def _label_log_probabilities(
    logits_BTV: Float[Tensor, "batch target vocab"], labels_BT: Int[Tensor, "batch target"]
) -> Float[Tensor, "batch target"]:
    """Return the log-probability of each label in fp32."""
    logits_BTV = logits_BTV.float()
    log_total_BT = top_and_log_total(logits_BTV.flatten(0, 1), 1)[2].view(labels_BT.shape)
    return logits_BTV.gather(2, labels_BT[:, :, None])[:, :, 0] - log_total_BT


TokenIds = Sequence[int] | Integer[ndarray, " _"]


@dataclass(frozen=True)
class ScoreWindow:
    """Range of a sequence that the model reads in one pass.

    Args:
        sequence: index of the sequence.
        start: index of the first token that is read.
        stop: index after the last token that is read; also the index of the last token that is scored.
        first: index of the first token that is scored.
    """

    sequence: int
    start: int
    stop: int
    first: int


def windows(sequence: int, length: int, *, window: int, stride: int) -> Iterator[ScoreWindow]:
    """Yield the windows of a sequence in order; together they score every token except the first once.

    Args:
        sequence: index of the sequence.
        length: number of tokens of the sequence.
        window: maximum number of tokens that a window reads.
        stride: number of tokens between the starts of two windows, from 1 to `window`.
    """
    first = 1
    for start in range(0, length - 1, stride):
        stop = min(start + window, length - 1)
        yield ScoreWindow(sequence, start, stop, first)
        first = stop + 1
        if stop == length - 1:
            return


def score_sequences(
    module: Transformer,
    sequences: Sequence[TokenIds],
    *,
    pad_id: int,
    window: int | None = None,
    stride: int | None = None,
    length_penalty: float = 1.0,
    batch_size: int | None = None,
) -> list[PairScore]:
    """Return the log-probability of each token except the first of each sequence, in the given order.

    Args:
        module: a decoder-only model. If it is in training mode, a replica in evaluation mode runs.
        sequences: ids from the start token to the end token, at least two each.
        pad_id: id of the padding token.
        window: maximum number of tokens read at once. None means the model's positions, or without a limit whole
            sequences of at most `LONGEST_PROMPT` tokens.
        stride: number of tokens between the starts of two windows, from 1 to `window`. None means `window`.
        length_penalty: exponent alpha of the score.
        batch_size: maximum number of windows in a batch. None means that a token budget decides.

    Raises:
        InputError: the model does not predict next tokens, or a sequence has no token to score or too many. Also if a
            window or stride is out of range.
    """
    scored = [np.empty(len(ids) - 1) for ids in sequences]
    for span, log_probs in token_log_probabilities(module, sequences, pad_id, window, stride, batch_size=batch_size):
        scored[span.sequence][span.first - 1 : span.stop] = log_probs
    return [
        PairScore.of([int(index) for index in ids[1:]], row.tolist(), length_penalty)
        for ids, row in zip(sequences, scored, strict=True)
    ]


def token_log_probabilities(
    module: Transformer,
    sequences: Sequence[TokenIds],
    pad_id: int,
    window: int | None,
    stride: int | None,
    *,
    batch_size: int | None = None,
) -> Iterator[tuple[ScoreWindow, Float[ndarray, " scored"]]]:
    """Yield each window with the log-probabilities of its scored tokens, longest windows first."""
    window, stride = _check_windows(module, sequences, window, stride)
    spans: list[ScoreWindow] = []
    for number, ids in enumerate(sequences):
        spans += windows(number, len(ids), window=window, stride=stride)
    costs = [span.stop - span.start for span in spans]
    module, device = in_evaluation(module), device_of(module)
    most_states = max(_most_logits(device) // module.num_target_ids, 1)
    budget = read_tokens(module) if computes_late(device) else min(2**14, most_states)

    def make_batches() -> Iterator[tuple[list[ScoreWindow], _WindowBatch]]:
        for batch in batches_by_cost(costs, budget=budget, most_rows=batch_size):
            chosen = [spans[i] for i in batch]
            yield chosen, _WindowBatch.of(sequences, chosen, pad_id)

    def run(chosen: list[ScoreWindow], batch: _WindowBatch) -> tuple[Tensor]:
        with torch.inference_mode(), naming_texts(span.sequence for span in chosen):
            hidden_BTD = module(batch.ids, mask=batch.mask, head=False).hidden
            hidden_CD = hidden_BTD.flatten(0, 1)[batch.positions]
            return (_score_states(module, hidden_CD, batch.labels, most_states),)

    for chosen, (log_probs_C,) in compute_each(make_batches(), run, device):
        sizes = [span.stop + 1 - span.first for span in chosen]
        yield from zip(chosen, np.split(log_probs_C.numpy(), np.cumsum(sizes)[:-1]), strict=True)


@dataclass(frozen=True)
class _WindowBatch(DeviceBatch):
    """Batch of windows: padded ids, and the positions and labels of the scored tokens of all windows.

    Args:
        ids: the ids, padded on the right, where real tokens cannot see the padding.
        mask: True at real tokens: with it, padding is not even read. None means no padding.
        positions: the positions before the scored tokens, counted over all rows.
        labels: the scored tokens.
    """

    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None
    positions: Int[Tensor, " scored"]
    labels: Int[Tensor, " scored"]

    @classmethod
    def of(cls, sequences: Sequence[TokenIds], spans: Sequence[ScoreWindow], pad_id: int) -> _WindowBatch:
        """Return the batch of some windows, on the CPU."""
        lengths_B = np.array([span.stop - span.start for span in spans])
        ids_BT = np.full((len(spans), lengths_B.max()), pad_id, dtype=np.int64)
        labels, positions = [], []
        for row, span in enumerate(spans):
            ids = sequences[span.sequence]
            ids_BT[row, : lengths_B[row]] = ids[span.start : span.stop]
            labels.append(np.asarray(ids[span.first : span.stop + 1], dtype=np.int64))
            positions.append(row * ids_BT.shape[1] + np.arange(span.first - 1 - span.start, span.stop - span.start))
        mask_BT = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
        return cls(
            torch.from_numpy(ids_BT),
            None if mask_BT.all() else torch.from_numpy(mask_BT),
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(labels)),
        )


def _score_states(
    module: Transformer, hidden_CD: Float[Tensor, "scored width"], labels_C: Int[Tensor, " scored"], most_states: int
) -> Float[Tensor, " scored"]:
    """Return the log-probability of each label in fp64, computed for a limited number of hidden states at a time."""
    assert module.head is not None
    log_probs = []
    for some_CD, some_C in zip(hidden_CD.split(most_states), labels_C.split(most_states), strict=True):
        logits_CV = module.head(some_CD[:, None])[:, 0].float()
        log_probs.append(logits_CV.gather(1, some_C[:, None])[:, 0] - top_and_log_total(logits_CV, 1)[2])
    return torch.cat(log_probs).double()


def _check_windows(
    module: Transformer, sequences: Sequence[TokenIds], window: int | None, stride: int | None
) -> tuple[int, int]:
    """Return window and stride after checking them and the sequences.

    Raises:
        InputError: one report that names every fault.
    """
    if module.encoder is not None:
        raise InputError("scoring texts needs a decoder-only model; with an encoder, score targets given their sources")
    check_model(module, with_sources=False)
    most = module.max_positions
    faults = [
        nth_text(number) + f" has {len(ids)} tokens, start and end token included, but at least 2 are needed."
        for number, ids in enumerate(sequences, start=1)
        if len(ids) < 2
    ][:10]
    if window is None:
        lengths = [len(ids) - 1 for ids in sequences]
        window = module.spec.position_limit or max(lengths, default=1)
        if most is None and window > LONGEST_PROMPT:
            number = lengths.index(window) + 1
            faults.append(
                f"text {number} has {window:,} tokens, but at most {LONGEST_PROMPT:,} are read at once: split it, or "
                "evaluate it with a window."
            )
    stride = window if stride is None else stride
    if window < 1 or (most is not None and window > most):
        limit = "" if most is None else f" and at most the model's {most} positions"
        faults.append(f"window must be at least 1{limit}, got {window}.")
    elif not 1 <= stride <= window:
        faults.append(f"stride must be from 1 to the window of {window} tokens, got {stride}.")
    if faults:
        raise InputError.from_faults(faults, subject="the text")
    return window, stride


def score_texts(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    length_penalty: float = 1.0,
    batch_size: int | None = None,
) -> list[PairScore]:
    """Return the log-probabilities of texts under a decoder-only model, including the end token.

    Args:
        module: a decoder-only model. If it is in training mode, a replica in evaluation mode runs.
        tokenizer: tokenizer of the model.
        texts: texts to score; an empty text is the end token alone.
        window, stride, batch_size: the arguments of `score_sequences`.
        length_penalty: exponent alpha of the score.

    Raises:
        InputError: the model does not predict next tokens, or cannot read the window.
    """
    refuse_enormous(texts, module.max_positions)
    return score_sequences(
        module,
        with_special_tokens(tokenizer, texts),
        pad_id=tokenizer.pad_id,
        window=window,
        stride=stride,
        length_penalty=length_penalty,
        batch_size=batch_size,
    )


def with_special_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts with the special tokens of the training text."""
    return [tokenizer.special_tokens.for_target(ids) for ids in tokenizer.encode_batch(list(texts))]
