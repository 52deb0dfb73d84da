"""Scores of known targets, as search reports them, from one uncached pass over whole sentences.

Shapes: B sentence pairs, S source tokens, T target tokens with the end token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.hooks import naming_texts
from clearhead.base.printing import Printed
from clearhead.core import Transformer
from clearhead.fast.logits import top_and_log_total
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of, pad_ids
from clearhead.generate.results import length_normalised

# fp32 logits of one batch: 64 MiB, for any vocabulary size.
MOST_LOGITS = 2**24


@dataclass(frozen=True, repr=False)
class PairScore(Printed):
    """The log-probability of one target.

    Args:
        ids: the target's tokens with the end token.
        token_log_probabilities: natural-log probability of each of `ids`, given the tokens before it and the source.
        log_probability: their sum.
        score: `log_probability` / len(ids) ** length_penalty, as search reports it.
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
    batch_tokens: int = 8192,
) -> list[PairScore]:
    """Return the log-probabilities of each target given its source, in the order given.

    Args:
        module: an encoder-decoder model; one in training runs as a replica in evaluation mode.
        sources: ids as the encoder reads them, none empty.
        targets: ids with start and end token.
        pad_id: padding id.
        length_penalty: exponent alpha of the score.
        forced: how many of the first predicted ids have probability 1.
        batch_size: most pairs scored together; None: no limit but the tokens.
        batch_tokens: most padded source + target tokens scored together.

    Raises:
        InputError: unequal counts, an empty source, or a sequence beyond the model's positions.
    """
    if len(sources) != len(targets):
        raise InputError(
            f"there are {len(sources)} sources but {len(targets)} targets: give one target for each source."
        )
    inputs, labels = [target[:-1] for target in targets], [tuple(target[1:]) for target in targets]
    check_lengths(sources, module.spec.position_limit, what="source")
    check_lengths(labels, module.spec.position_limit, what="target")
    per_token: list[list[float]] = [[] for _ in labels]
    module, device = in_evaluation(module), device_of(module)
    # Every target token takes a row of logits, so a large vocabulary needs smaller batches.
    budget = max(min(batch_tokens, 2 * MOST_LOGITS // module.num_target_ids), 1)
    costs = [2 * max(len(source), len(label)) for source, label in zip(sources, labels, strict=True)]

    def padded(rows: Sequence[Sequence[int]], batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        return pad_ids([rows[i] for i in batch], pad_id, device)

    with torch.inference_mode():
        for batch in batches_by_cost(costs, budget=budget, most_rows=batch_size):
            ids_BS, mask_BS = padded(sources, batch)
            labels_BT, mask_BT = padded(labels, batch)
            target_BT, _ = padded(inputs, batch)
            with naming_texts(batch):
                out = module(ids_BS, target_BT, mask=mask_BS, target_mask=mask_BT)
            assert out.logits is not None, "the model has no head"
            for i, row in zip(batch, label_log_probabilities(out.logits, labels_BT, mask_BT), strict=True):
                per_token[i] = [0.0] * forced + row[forced:]
    return [PairScore.of(ids, row, length_penalty) for ids, row in zip(labels, per_token, strict=True)]


def label_log_probabilities(
    logits_BTV: Float[Tensor, "batch target vocab"],
    labels_BT: Int[Tensor, "batch target"],
    mask_BT: Bool[Tensor, "batch target"],
) -> list[list[float]]:
    """Return the fp32 log-probability of each real label, row by row."""
    logits_BTV = logits_BTV.float()
    log_total_BT = top_and_log_total(logits_BTV.flatten(0, 1), 1)[2].view(labels_BT.shape)
    chosen_BT = logits_BTV.gather(2, labels_BT[:, :, None])[:, :, 0] - log_total_BT
    return [row[: int(count)] for row, count in zip(chosen_BT.tolist(), mask_BT.sum(1).tolist(), strict=True)]
