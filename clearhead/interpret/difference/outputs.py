"""Compare two models on texts: attention of each head, predictions, and KL divergence per token.

Both models read the same tokens, one text at a time, so no position is padding.
Legend: B texts, T positions, H heads, Q queries, S keys, V outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.core import Transformer
from clearhead.generate.batching import device_of
from clearhead.interpret.maps.head_statistics import query_chunks
from clearhead.interpret.maps.map_inputs import MapInputs
from clearhead.interpret.maps.outcome import OutputNames
from clearhead.interpret.maps.recording import AttentionRecord, record_states
from clearhead.interpret.maps.token_texts import label_tokens
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair

POSITIONS = 128
"""Number of positions whose logits are computed at once."""


@runtime_checkable
class TrainedModel(Protocol):
    """A model with its tokenizers and its task."""

    @property
    def module(self) -> Transformer:
        """The PyTorch module."""

    @property
    def tokenizers(self) -> TokenizerPair:
        """The tokenizers of the source and the target."""

    @property
    def task(self) -> TaskRecord:
        """The task that the model was trained for."""


@dataclass(frozen=True, repr=False)
class TokenChange(Printed):
    """Change of the prediction at one position of a text.

    Args:
        text: number of the text, from 0.
        position: position in the last stack. None means one prediction for the whole text.
        token: token that the last stack reads at this position; empty for a whole text.
        a, b: most probable output of model A and of model B.
        divergence: KL(A || B) of the two output distributions, in nats.
    """

    text: int
    position: int | None
    token: str
    a: str
    b: str
    divergence: float


@dataclass(frozen=True, repr=False)
class TextChanges(Printed):
    """Changes of attention and predictions over texts.

    Args:
        num_texts: number of texts.
        heads: (address of the attention, head) -> mean Jensen-Shannon divergence of the attention rows, in nats.
        tokens: one entry per predicted position, in the order of the texts; empty if outputs cannot be compared.
        reason: reason why outputs cannot be compared; empty if they can.
    """

    num_texts: int
    heads: Mapping[tuple[str, int], float]
    tokens: tuple[TokenChange, ...]
    reason: str = ""

    @property
    def num_different(self) -> int:
        """Number of positions at which the two models predict different outputs."""
        return sum(token.a != token.b for token in self.tokens)

    @property
    def divergence(self) -> float | None:
        """Mean KL divergence per token, in nats; None if outputs cannot be compared."""
        if not self.tokens:
            return None
        return math.fsum(token.divergence for token in self.tokens) / len(self.tokens)


def check_same_inputs(a: TrainedModel, b: TrainedModel) -> None:
    """Raise InputError unless two models can read the same tokens.

    Raises:
        InputError: the stacks or devices differ, or neither vocabulary is the beginning of the other.
    """
    families = a.module.spec.family, b.module.spec.family
    devices = device_of(a.module), device_of(b.module)
    if devices[0] != devices[1]:
        raise InputError(f"A is on {devices[0]} and B is on {devices[1]}: load both on the same device")
    if families[0] != families[1]:
        raise InputError(
            f"A and B have different stacks ({families[0]}; {families[1]}): compare only their weights, without texts"
        )
    for first, second in ((a.tokenizers.source, b.tokenizers.source), (a.tokenizers.target, b.tokenizers.target)):
        first_entries, second_entries = first.entries(), second.entries()
        length = min(len(first_entries), len(second_entries))
        if first_entries[:length] != second_entries[:length]:
            raise InputError(
                "A and B have different vocabularies, so they read different tokens: compare only their weights, "
                "without texts"
            )


def compare_texts(a: TrainedModel, b: TrainedModel, text_inputs: Iterable[MapInputs]) -> TextChanges:
    """Run both models on the same tokens and return the changes of attention and predictions from A to B.

    Args:
        a, b: models that can read the same tokens.
        text_inputs: inputs of each text; only one is held in memory at a time.
    """
    names, reason = _common_outputs(a, b)
    sums: dict[tuple[str, int], list[float]] = {}
    tokens: list[TokenChange] = []
    num_texts = 0
    for text, inputs in enumerate(text_inputs):
        num_texts += 1
        (records_a, hidden_a), (records_b, hidden_b) = (
            record_states(model.module, inputs.source, inputs.target) for model in (a, b)
        )
        others = {(record.address, record.layer): record for record in records_b}
        for record in records_a:
            other = others.get((record.address, record.layer))
            if other is not None and other.num_heads == record.num_heads:
                for head, divergence in enumerate(_head_divergences(record, other)):
                    sums.setdefault((record.address, head), []).extend(divergence)
        if names is not None:
            tokens += _token_changes((a.module, b.module), (hidden_a, hidden_b), inputs, names, text, a.tokenizers)
    return TextChanges(
        num_texts, {key: math.fsum(rows) / len(rows) for key, rows in sums.items()}, tuple(tokens), reason
    )


def _common_outputs(a: TrainedModel, b: TrainedModel) -> tuple[OutputNames | None, str]:
    """Return the names of the outputs that both models have; None and the reason if outputs cannot be compared."""
    names = []
    for model in (a, b):
        tokenizer = model.tokenizers.source if model.module.decoder is None else model.tokenizers.target
        try:
            names.append(OutputNames.of(model.module, tokenizer, model.task))
        except InputError:
            return None, "predictions are not compared: one model outputs no probabilities of tokens or labels"
    first, second = sorted(names, key=lambda name_list: len(name_list.names))
    is_same_kind = (first.tokenizer is None) == (second.tokenizer is None)
    if not is_same_kind or list(first.names) != list(second.names[: len(first.names)]):
        return None, "predictions are not compared: the models have different outputs"
    if first.tokenizer is None and (len(first.names), first.are_independent) != (
        len(second.names),
        second.are_independent,
    ):
        return None, "predictions are not compared: the models have different labels"
    return first, ""


def jensen_shannon(first: Float[Tensor, "*axes keys"], second: Float[Tensor, "*axes keys"]) -> Float[Tensor, "*axes"]:
    """Return the Jensen-Shannon divergence of two rows of attention weights, in nats, from 0 to ln 2.

    If a row sums to less than one, the rest counts as the weight of one more key, the attention sink.
    """
    first, second = (
        torch.cat([rows, (1.0 - rows.sum(-1, keepdim=True)).clamp(min=0.0)], -1).double() for rows in (first, second)
    )
    middle = (first + second) / 2
    entropies = torch.special.entr(torch.stack([middle, first, second])).sum(-1)
    divergence: Tensor = entropies[0] - (entropies[1] + entropies[2]) / 2
    return divergence.clamp(min=0.0)


def _head_divergences(record: AttentionRecord, other: AttentionRecord) -> list[list[float]]:
    """Return the Jensen-Shannon divergence of the attention rows of two models, for each head and query."""
    chunks = [
        jensen_shannon(weights_BHQS[0], other.weights(queries=queries)[0])
        for queries, weights_BHQS in query_chunks(record)
    ]
    divergences: list[list[float]] = torch.cat(chunks, 1).tolist()
    return divergences


@torch.no_grad()
def _token_changes(
    modules: tuple[Transformer, Transformer],
    hiddens: tuple[Tensor, Tensor],
    inputs: MapInputs,
    names: OutputNames,
    text: int,
    tokenizers: TokenizerPair,
) -> list[TokenChange]:
    """Return the prediction change from model A to model B at each position of one text."""
    head = modules[0].head
    assert head is not None, "a model with named outputs has a head"
    read = tokenizers.source if modules[0].decoder is None or inputs.target is None else tokenizers.target
    labels = [""] if head.is_pooled else label_tokens(read, inputs.last.ids[0].tolist())
    step = len(hiddens[0][0]) if head.is_pooled else POSITIONS
    changes: list[TokenChange] = []
    for start in range(0, hiddens[0].shape[1], step):
        first, second = (
            _log_probabilities(module, hidden[:, start : start + step], inputs, names)
            for module, hidden in zip(modules, hiddens, strict=True)
        )
        # 0 * -inf counts as 0: an output with probability 0 in A adds nothing.
        terms = torch.where(first > -torch.inf, first.exp() * (first - second), 0.0)
        divergences = terms.flatten(1).sum(1).clamp(min=0.0).tolist()
        for divergence, best_a, best_b in zip(
            divergences, _predicted_labels(first, names), _predicted_labels(second, names), strict=True
        ):
            position = None if head.is_pooled else len(changes)
            changes.append(TokenChange(text, position, labels[len(changes)], best_a, best_b, divergence))
    return changes


def _log_probabilities(module: Transformer, hidden: Tensor, inputs: MapInputs, names: OutputNames) -> Tensor:
    """Return log-probabilities [T, V] of the common outputs; for independent labels [T, V, 2], for yes and no."""
    assert module.head is not None
    logits: Tensor = module.head(hidden, inputs.last.mask) if module.head.is_pooled else module.head(hidden)[0]
    logits = logits[..., : len(names.names)].double().cpu()
    if names.are_independent:
        return torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)], -1)
    return logits.log_softmax(-1)


def _predicted_labels(log_probabilities: Tensor, names: OutputNames) -> list[str]:
    """Return the display name of the most probable output of each row; independent labels are joined by commas."""
    if names.are_independent:
        chosen = (log_probabilities[..., 0] > math.log(0.5)).tolist()
        return [", ".join(name for name, is_in in zip(names.names, row, strict=True) if is_in) for row in chosen]
    return [names.display_name(index) for index in log_probabilities.argmax(-1).tolist()]
