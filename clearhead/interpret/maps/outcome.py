"""The output whose probability is followed: a token or a label, at a position; or one rather than another.

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
"""How a user chooses an outcome: a position, one or two tokens or labels, both, or nothing."""


@dataclass(frozen=True)
class ModelOutcome:
    """An output of a model, or one rather than another: why A and not B.

    Args:
        position: where it stands among the tokens that the last stack reads, or behind them; None: it is of the whole
            text.
        token: the vocabulary's entry, or the label.
        id: its index among the logits.
        is_independent: its probability is its own sigmoid (one of several labels), not a share of a softmax.
        is_next: the position before it predicts it, as in a language model.
        other: the vocabulary's entry, or the label, that it is compared with; None: it is followed alone.
        other_id: its index among the logits.
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
        """The outputs that are followed, by their indices among the logits: 1 of the one, -1 of the other."""
        return {self.id: 1.0} if self.other_id is None else {self.id: 1.0, self.other_id: -1.0}

    @property
    def logits_position(self) -> int | None:
        """The position whose logits predict it; None: they are of the whole text."""
        return self.position if self.position is None else self.position - int(self.is_next)

    def log_probability(self, logits_BV: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows"]:
        """Return its natural logarithm in each row of logits; of two outputs, how much larger that of the first is."""
        found_BV = F.logsigmoid(logits_BV) if self.is_independent else logits_BV.log_softmax(-1)
        return found_BV[..., list(self.signs)] @ found_BV.new_tensor(list(self.signs.values()))


@dataclass(frozen=True)
class OutputNames:
    """The names of a model's outputs.

    Args:
        names: vocabulary entries or labels, in the order of the outputs.
        tokenizer: of the entries; None: they are labels.
        are_independent: each label has a probability of its own.
    """

    names: Sequence[str]
    tokenizer: Tokenizer | None = None
    are_independent: bool = False

    @classmethod
    def of(cls, module: Transformer, tokenizer: Tokenizer, record: TaskRecord) -> OutputNames:
        """Return the names of the outputs of a model.

        Args:
            module: the model.
            tokenizer: of what its last stack reads.
            record: the task that it was trained for.

        Raises:
            InputError: its outputs are vectors or numbers.
        """
        task = find_task(record.kind)
        has_numbers = task.outputs in ("vector", "span") or (task.has_labels and not record.labels)
        if module.head is None or has_numbers:
            raise InputError(
                "this model gives no probabilities of tokens or labels, so nothing can raise or lower them: effects, "
                "contributions and the lens need a language model, a masked model, a classifier or a tagger"
            )
        if record.labels:
            return cls(record.labels, None, record.label_kind == "multi_label")
        return cls(tokenizer.entries(), tokenizer)

    def probabilities(self, logits: Float[Tensor, "*axes outputs"]) -> Float[Tensor, "*axes outputs"]:
        """Return the probability of each output."""
        return logits.sigmoid() if self.are_independent else logits.softmax(-1)

    def name(self, index: int) -> str:
        """Return the name of an output; empty for one without (tables can be padded beyond the vocabulary)."""
        return self.names[index] if index < len(self.names) else ""

    def display_name(self, index: int) -> str:
        """Return an output as pages and messages write it: a label, or a token with signs for its blanks."""
        if self.tokenizer is None or not self.name(index):
            return self.name(index)
        return label_tokens(self.tokenizer, [index])[0]

    def difference(self, outcome: ModelOutcome, joint: str) -> str:
        """Return an outcome as pages write it: 'Mary', or with the other one behind some words, 'Mary' less 'John'."""
        return joint.join(f"'{self.display_name(index)}'" for index in outcome.signs)

    def find(self, token: str) -> int:
        """Return the index of an output.

        Args:
            token: a label; an entry of the vocabulary, as it is there or as pages write it; a text that is one token.

        Raises:
            InputError: there is no such output.
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
            raise InputError(f"'{token}' must be one token, but the tokenizer makes these of it: {pieces}; choose one")
        if ids[0] == self.tokenizer.unk_id:
            raise InputError(f"the vocabulary has no token '{token}'{did_you_mean(token, self.names)}")
        return ids[0]


def predicts_next(streams: Streams, names: OutputNames) -> bool:
    """Return whether the logits at a position are of the token behind it, as in a language model."""
    head = streams.module.head
    return names.tokenizer is not None and streams.top == "decoder" and head is not None and not head.is_pooled


def _position_and_tokens(of: OutcomeChoice) -> tuple[int | None, list[str]]:
    items = of if isinstance(of, tuple) else (of,)
    position = next((item for item in items if not isinstance(item, str)), None)
    return position, [item for item in items if isinstance(item, str)]


def choose_outcome(of: OutcomeChoice, streams: Streams, names: OutputNames, labels: Sequence[int] = ()) -> ModelOutcome:
    """Return the outcome that a user chose.

    A position counts the tokens that the last stack reads, from 0. In a language model the token at a position is
    predicted by the position before it, and the position behind the last token is that of the next one. In a masked
    model and in a tagger an output is predicted at its own position.

    Args:
        of: a position: the token that stands there in a language model, else what the model predicts there. A token:
            as the next one in a language model, at the first mask in a masked model. A label of a classifier. Two
            tokens or labels: how much more probable the first one is. A position in front of one or two: at this
            position. None: the last token of a language model that is no end token, what a masked model predicts at
            the first mask, the label that a classifier predicts.
        streams: of the text.
        names: of the outputs.
        labels: in a language model, the id behind each token that the last stack reads, as far as it is known.

    Raises:
        InputError: there is no such position, token or label.
    """
    assert streams.module.head is not None
    position, tokens = _position_and_tokens(of)
    length = streams.last.ids.shape[1]
    is_next = predicts_next(streams, names)
    if streams.module.head.is_pooled:
        if position is not None:
            raise InputError(
                key("of") + f" {of!r} names a position, but this model labels whole texts: name a label alone"
            )
    elif is_next:
        if position is None:
            position = length if tokens else _last_label(labels, names)
        _check_position(position, 1, length, "which a token before them predicts")
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
            raise InputError(key("of") + f" compares '{tokens[0]}' with itself: name two different ones, or one alone")
    else:
        others = []
        logits_position = ModelOutcome(position, "", 0, is_next=is_next).logits_position
        logits_V = streams.logits(streams.hidden, logits_position)[0, : len(names.names)].cpu()
        if names.tokenizer is not None and not is_next:
            # A mask stands for a part of a text, never for a special token.
            logits_V = logits_V.where(torch.from_numpy(word_boundaries(names.tokenizer).ordinary), -torch.inf)
        index = int(logits_V.argmax())
    outcome = ModelOutcome(position, names.name(index), index, names.are_independent, is_next)
    return replace(outcome, other=names.name(others[0]), other_id=others[0]) if others else outcome


def _last_label(labels: Sequence[int], names: OutputNames) -> int:
    """Return the position of the last label that is no end token; the first position behind the start without any."""
    end = None if names.tokenizer is None else names.tokenizer.eos_id
    return max((position for position, label in enumerate(labels, start=1) if label != end), default=1)


def _first_mask(streams: Streams, names: OutputNames) -> int:
    mask_id, ids = None if names.tokenizer is None else names.tokenizer.mask_id, streams.last.ids[0].tolist()
    if mask_id in ids:
        return ids.index(mask_id)
    raise InputError(
        "the text has no mask, so " + key("of") + " must name a position, such as 3, or in Python a pair (3, 'x')"
    )


def _check_position(position: int, first: int, last: int, what: str) -> None:
    if not first <= position <= last:
        raise InputError(key("of") + f" names position {position}; expected {first} to {last}, the positions {what}")
