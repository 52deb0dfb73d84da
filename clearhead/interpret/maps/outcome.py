"""Model outputs to measure: the probability of a token or label at a position, or a comparison of two.

Legend: B rows, V outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from clearhead.base.errors import InputError, did_you_mean, key
from clearhead.core import Transformer
from clearhead.interpret.maps.streams import Streams
from clearhead.interpret.maps.token_texts import label_tokens, read_token
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import word_boundaries

OutcomeChoice = int | str | tuple[int, str] | tuple[str, str] | tuple[int, str, str] | None
"""Choice of an outcome by the user: a position, one or two tokens or labels, a position with these, or None."""


@dataclass(frozen=True)
class ModelOutcome:
    """Output of a model whose probability is measured; or two outputs to compare ("why A and not B").

    Args:
        position: position of the output among the tokens that the last stack reads, or just after them. None means
            that the output is for the whole text.
        token: vocabulary entry or label.
        id: index of the output among the logits.
        is_independent: True for a sigmoid (one of several labels), False for a softmax.
        is_next: True if the previous position predicts the output, as in a language model.
        other: vocabulary entry or label to compare with. None means no comparison.
        other_id: index of the other output among the logits. None means no comparison.
    """

    position: int | None
    token: str
    id: int
    is_independent: bool = False
    is_next: bool = False
    other: str | None = None
    other_id: int | None = None

    @property
    def signs(self) -> dict[int, float]:
        """Index of each output among the logits -> its sign: 1 for the output, -1 for the other one."""
        return {self.id: 1.0} if self.other_id is None else {self.id: 1.0, self.other_id: -1.0}

    @property
    def logits_position(self) -> int | None:
        """Position whose logits predict the output; None if the logits are for the whole text."""
        return self.position if self.position is None else self.position - int(self.is_next)

    def log_probability(self, logits_BV: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows"]:
        """Return the output's log-probability in each row of logits; for two outputs, their difference."""
        found_BV = F.logsigmoid(logits_BV) if self.is_independent else logits_BV.log_softmax(-1)
        return found_BV[..., list(self.signs)] @ found_BV.new_tensor(list(self.signs.values()))


@dataclass(frozen=True)
class OutputNames:
    """Names of a model's outputs.

    Args:
        names: vocabulary entries or labels, in the order of the outputs.
        tokenizer: tokenizer of the entries. None means that the names are labels.
        are_independent: True if each label has an independent probability (sigmoid).
    """

    names: Sequence[str]
    tokenizer: Tokenizer | None = None
    are_independent: bool = False

    @classmethod
    def of(cls, module: Transformer, tokenizer: Tokenizer, record: TaskRecord) -> OutputNames:
        """Return the names of the outputs of a model.

        Args:
            module: model.
            tokenizer: tokenizer of its last stack.
            record: task that the model was trained for.

        Raises:
            InputError: the outputs are vectors or numbers.
        """
        task = find_task(record.kind)
        has_numbers = task.outputs in ("vector", "span") or (task.has_labels and not record.labels)
        if module.head is None or has_numbers:
            raise InputError(
                "this model outputs no probabilities of tokens or labels, as effects, contributions and the lens need: "
                "use a language model, masked model, classifier or tagger"
            )
        if record.labels:
            return cls(record.labels, None, record.label_kind == "multi_label")
        return cls(tokenizer.entries(), tokenizer)

    def probabilities(self, logits: Float[Tensor, "*axes outputs"]) -> Float[Tensor, "*axes outputs"]:
        """Return the probability of each output."""
        return logits.sigmoid() if self.are_independent else logits.softmax(-1)

    def name(self, index: int) -> str:
        """Return the name of an output; empty for padding outputs beyond the vocabulary."""
        return self.names[index] if index < len(self.names) else ""

    def display_name(self, index: int) -> str:
        """Return the display name of an output: a label, or a token with visible signs for white space."""
        if self.tokenizer is None or not self.name(index):
            return self.name(index)
        return label_tokens(self.tokenizer, [index])[0]

    def difference(self, outcome: ModelOutcome, joint: str) -> str:
        """Return the quoted names of an outcome's outputs, joined by `joint`, such as "'Mary' less 'John'"."""
        return joint.join(f"'{self.display_name(index)}'" for index in outcome.signs)

    def find(self, token: str) -> int:
        """Return the index among the logits of the output with a name.

        Args:
            token: label; vocabulary entry or its display name; or a text that is one token.

        Raises:
            InputError: the output does not exist.
        """
        if token and token in self.names:
            return self.names.index(token)
        if self.tokenizer is None:
            known = ", ".join(f"'{name}'" for name in self.names)
            raise InputError(
                f"the model has no label '{token}'{did_you_mean(token, self.names)}; its labels are {known}"
            )
        ids = self.tokenizer.encode(token)
        if token and (len(ids) != 1 or ids[0] == self.tokenizer.unk_id):
            written = read_token(self.tokenizer, token)
            ids = ids if written is None else [written]
        if len(ids) != 1:
            pieces = ", ".join(f"'{piece}'" for piece in label_tokens(self.tokenizer, ids)) or "none"
            raise InputError(f"'{token}' must be one token, but the tokenizer splits it into {pieces}: choose one")
        if ids[0] == self.tokenizer.unk_id:
            raise InputError(f"the vocabulary has no token '{token}'{did_you_mean(token, self.names)}")
        return ids[0]


def predicts_next(streams: Streams, names: OutputNames) -> bool:
    """Return whether the logits at a position predict the next token, as in a language model."""
    head = streams.module.head
    return names.tokenizer is not None and streams.top == "decoder" and head is not None and not head.is_pooled


def _position_and_tokens(of: OutcomeChoice) -> tuple[int | None, list[str]]:
    items = of if isinstance(of, tuple) else (of,)
    position = next((item for item in items if not isinstance(item, str)), None)
    return position, [item for item in items if isinstance(item, str)]


def choose_outcome(of: OutcomeChoice, streams: Streams, names: OutputNames, labels: Sequence[int] = ()) -> ModelOutcome:
    """Return the model output that the user's choice means, such as the token "Mary" at position 7.

    A position is the index of a token that the last stack reads. In a language model, the token at a position is
    predicted by the previous position. The position after the last token is that of the next token. In a masked model
    and in a tagger, an output is predicted at the same position.

    Args:
        of: choice of the user. A position means the token there in a language model, otherwise the output predicted
            there. A token means the next token of a language model, or the token at the first mask. A label means that
            output of a classifier. Two tokens or labels mean the difference of their log-probabilities. A position may
            come before one or two of them. None means the last token of a language model (no end token), the prediction
            at the first mask, or the predicted label.
        streams: residual streams of the text.
        names: names of the outputs.
        labels: known ids of the tokens that follow each token of the last stack, in a language model; otherwise empty.

    Raises:
        InputError: the position, token or label does not exist.
    """
    assert streams.module.head is not None
    position, tokens = _position_and_tokens(of)
    length = streams.last.ids.shape[1]
    is_next = predicts_next(streams, names)
    if streams.module.head.is_pooled:
        if position is not None:
            raise InputError(
                key("of") + f" {of!r} has a position, but this model labels whole texts: give only a label"
            )
    elif is_next:
        if position is None:
            position = length if tokens else _last_label(labels, names)
        _check_position(position, 1, length, "that an earlier token predicts")
        if not tokens and position <= len(labels):
            index = labels[position - 1]
            return ModelOutcome(position, names.name(index), index, is_next=True)
    else:
        if position is None:
            position = _first_mask(streams, names)
        _check_position(position, 0, length - 1, "at which the model predicts")
    if tokens:
        index, *others = map(names.find, tokens)
        if index in others:
            raise InputError(key("of") + f" compares '{tokens[0]}' with itself: give two different outputs, or one")
    else:
        others = []
        logits_position = ModelOutcome(position, "", 0, is_next=is_next).logits_position
        logits_V = streams.logits(streams.hidden, logits_position)[0, : len(names.names)].cpu()
        if names.tokenizer is not None and not is_next:
            # A mask stands for text, never for a special token.
            logits_V = logits_V.where(torch.from_numpy(word_boundaries(names.tokenizer).ordinary), -torch.inf)
        index = int(logits_V.argmax())
    outcome = ModelOutcome(position, names.name(index), index, names.are_independent, is_next)
    return replace(outcome, other=names.name(others[0]), other_id=others[0]) if others else outcome


def _last_label(labels: Sequence[int], names: OutputNames) -> int:
    """Return the position of the last known next token that is no end token; 1 if there is none."""
    end = None if names.tokenizer is None else names.tokenizer.eos_id
    return max((position for position, label in enumerate(labels, start=1) if label != end), default=1)


def _first_mask(streams: Streams, names: OutputNames) -> int:
    mask_id, ids = None if names.tokenizer is None else names.tokenizer.mask_id, streams.last.ids[0].tolist()
    if mask_id in ids:
        return ids.index(mask_id)
    raise InputError("the text has no mask: give " + key("of") + " a position, such as 3, or in Python a pair (3, 'x')")


def _check_position(position: int, first: int, last: int, what: str) -> None:
    if not first <= position <= last:
        raise InputError(key("of") + f" has position {position}; expected {first} to {last}, the positions {what}")
