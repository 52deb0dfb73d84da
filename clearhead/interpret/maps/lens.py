"""The logit lens: what a model would predict if it ended after each layer.

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
"""Logits that are computed at once."""


@dataclass(frozen=True)
class LogitLens:
    """The predictions at every position of the last stack, or one for the whole text where the head pools.

    Depth 0 is the embedding, depth d the stream after d layers; the last one is the model's own prediction.

    Args:
        stack: whose positions these are, "encoder" or "decoder".
        ids: of the most probable outputs, the first the most probable.
        probabilities: of these.
        target_ids: of the token that follows each position in the text of a language model; where there is none, of
            what the model itself predicts.
        target_probabilities: of the targets at every depth.
        names: the vocabulary's entry or the label of each id that occurs.
        followed: of the outcome that was asked for, the log-probability at every position, or how much larger that of
            the first of two outputs is; None: none was.
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
    """Return what the final norm, the output projection and the head make of the stream at every depth.

    Args:
        streams: of the text.
        names: of the outputs.
        top_k: outputs for each position.
        labels: in a language model, the id behind each token that the last stack reads, as far as it is known.
        outcome: what is followed at every position, whatever its own is; None: nothing.

    Raises:
        InputError: top_k is out of range.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    count = len(names.names)
    if not 1 <= top_k <= count:
        raise InputError(argument("top_k") + f" is {top_k}; expected 1 to {count}, the outputs of the model")
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
    """Return ids and probabilities [depths, top_k, positions], target ids [positions], and their probabilities.

    Behind them, where an outcome is followed, its log-probabilities.
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
        if not ids:  # the model's own prediction stands in for an unknown label
            target_ids = torch.cat([labels.cpu(), best.indices[len(labels) :, 0]])
        ids.append(best.indices.T)
        probabilities.append(best.values.T)
        targets.append(probability_TV.gather(1, target_ids[:, None])[:, 0])
    first = torch.stack(ids[::-1]), torch.stack(probabilities[::-1]), target_ids, torch.stack(targets[::-1])
    return (*first, torch.stack(followed[::-1])) if followed else first
