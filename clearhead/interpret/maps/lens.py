"""Logit lens: the predictions of a model if it ended after each layer.

Legend: L depths, T positions, D width, V outputs, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from clearhead.base.errors import InputError, argument
from clearhead.core.stack import Stack
from clearhead.interpret.maps.outcome import ModelOutcome, OutputNames
from clearhead.interpret.maps.streams import Streams

_MOST_LOGITS = 2**26
"""Most logits that are computed at once."""


@dataclass(frozen=True)
class LogitLens:
    """Logit-lens predictions at every depth and position of the model's last stack.

    Depth 0 is the embedding and depth d the stream after d layers; the last depth is the model's prediction. If the
    head pools, there is one position for the whole text.

    Args:
        stack: stack of the positions, "encoder" or "decoder".
        ids: ids of the most probable outputs, the most probable first.
        probabilities: probabilities of these outputs.
        target_ids: id of the token that follows each position in the text of a language model. Where no token follows,
            the id that the model predicts.
        target_probabilities: probability of the target at every depth.
        names: id -> vocabulary entry or label, for all ids that occur.
        followed: log-probability of the followed output at every depth and position; for two outputs, the difference
            of their log-probabilities. None means that no output is followed.
    """

    stack: str
    ids: Int64[Tensor, "depths positions candidates"]
    probabilities: Float32[Tensor, "depths positions candidates"]
    target_ids: Int64[Tensor, " positions"]
    target_probabilities: Float32[Tensor, "depths positions"]
    names: dict[int, str]
    followed: Float32[Tensor, "depths positions"] | None = None


def logit_lens(
    streams: Streams, names: OutputNames, top_k: int, labels: Sequence[int] = (), outcome: ModelOutcome | None = None
) -> LogitLens:
    """Apply the final norm and the head to the residual stream at every depth, and return the predictions.

    Args:
        streams: residual streams of the text.
        names: names of the outputs.
        top_k: number of outputs for each position.
        labels: known ids of the tokens that follow each token of the last stack, in a language model; otherwise empty.
        outcome: output that is followed at every position; its position is ignored. None means no output.

    Raises:
        InputError: top_k is out of range.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    count = len(names.names)
    if not 1 <= top_k <= count:
        raise InputError(argument("top_k") + f" is {top_k}; expected 1 to {count}, the number of outputs")
    head, ids_T = streams.module.head, streams.last.ids[0]
    assert head is not None
    length = len(ids_T)
    size = length if head.is_pooled else max(1, _MOST_LOGITS // count)
    labels_T = ids_T.new_tensor(labels)
    with torch.no_grad():
        chunks = [
            _predictions(streams, names, slice(start, start + size), labels_T[start : start + size], top_k, outcome)
            for start in range(0, length, size)
        ]
    ids, probabilities, target_ids, target_probabilities, *followed = (
        torch.cat(chunk, dim=-1) for chunk in zip(*chunks, strict=True)
    )
    occurring = {*ids.flatten().tolist(), *target_ids.tolist()}
    return LogitLens(
        streams.top,
        ids.movedim(-1, 1),
        probabilities.movedim(-1, 1),
        target_ids,
        target_probabilities,
        {index: names.name(index) for index in sorted(occurring)},
        *followed,
    )


def _predictions(
    streams: Streams, names: OutputNames, positions: slice, labels: Tensor, top_k: int, outcome: ModelOutcome | None
) -> tuple[Tensor, ...]:
    """Return lens predictions: ids and probabilities [depths, top_k, positions], target ids, target probabilities.

    Target ids have the shape [positions], their probabilities [depths, positions].
    If an outcome is followed, its log-probabilities are the last element.
    """
    stack: Stack = getattr(streams.module, streams.top)
    head = streams.module.head
    assert head is not None
    ids: list[Tensor] = []
    probabilities: list[Tensor] = []
    targets: list[Tensor] = []
    followed: list[Tensor] = []
    target_ids = labels
    for x_BTD in reversed(streams.before[streams.top]):
        hidden_BTD = stack.final_norm(x_BTD[:, positions])
        logits = (head(hidden_BTD, streams.last.mask) if head.is_pooled else head(hidden_BTD)[0]).float()
        if outcome is not None:
            followed.append(outcome.log_probability(logits).cpu())
        probability_TV = names.probabilities(logits).cpu()
        best = probability_TV[:, : len(names.names)].topk(top_k, dim=-1)
        if not ids:  # the model's prediction replaces an unknown label
            target_ids = torch.cat([labels.cpu(), best.indices[len(labels) :, 0]])
        ids.append(best.indices.T)
        probabilities.append(best.values.T)
        targets.append(probability_TV.gather(1, target_ids[:, None])[:, 0])
    first = torch.stack(ids[::-1]), torch.stack(probabilities[::-1]), target_ids, torch.stack(targets[::-1])
    return (*first, torch.stack(followed[::-1])) if followed else first
