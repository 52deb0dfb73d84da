"""What is explained of a forward pass: the layer, the head, the query and the key that someone looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from clearhead.base.errors import InputError, argument
from clearhead.interpret.explain.forward import Forward, sections
from clearhead.interpret.explain.score import NotTakenApart, ScoreTerms, score_terms
from clearhead.interpret.explain.values import Section, Value
from clearhead.interpret.maps.attention_maps import AttentionMaps

LONGEST = 512
"""The most tokens of a stack: every number of every layer is kept."""


@dataclass(frozen=True)
class Choice:
    """What someone looks at.

    Args:
        stack: "encoder" or "decoder".
        layer: how many layers of the stack run before it.
        head: of its attentions.
        token: the position of the query, in the stack.
    """

    stack: str
    layer: int
    head: int
    token: int


@dataclass(frozen=True)
class Explanation:
    """A forward pass, taken apart.

    Args:
        title: names model and task.
        forward: the forward pass.
        choice: what is looked at.
        sections: all parts of the model, in the order in which they run.
    """

    title: str
    forward: Forward
    choice: Choice
    sections: tuple[Section, ...]

    @property
    def token(self) -> str:
        """The token that is looked at, and the one that the decoder writes at that step."""
        choice, forward = self.choice, self.forward
        token = forward.tokens[choice.stack][choice.token]
        if choice.stack == "encoder" or not forward.written:
            return token
        return f"{token}; this step writes {forward.written[choice.token]}"

    @cached_property
    def scores(self) -> dict[str, tuple[int, ScoreTerms | NotTakenApart]]:
        """Return, by the address of a step that attends, the key with the largest weight and the terms of its score.

        Where it cannot be taken apart, there is the reason.
        """
        choice, found = self.choice, dict[str, tuple[int, ScoreTerms | NotTakenApart]]()
        for section in self.chosen:
            if section.keys is not None:
                source = "memory" if section.keys != section.stack else "self"
                weights_TS = section.value("weights").of_head(choice.head)
                key = int(weights_TS[choice.token].argmax())
                place = (choice.stack, source, choice.layer)
                try:
                    found[section.address] = key, score_terms(self.forward, place, choice.head, choice.token, key)
                except NotTakenApart as reason:
                    found[section.address] = key, reason
        return found

    def rows(self, section: Section, value: Value) -> tuple[tuple[str, ...], int]:
        """Return the tokens that the rows of a value belong to, and which of them is looked at.

        Args:
            section: the part of the model.
            value: of the part.

        Returns:
            for keys and values of the layer that is looked at, the one with the largest weight.
        """
        if value.is_of_keys and section.keys is not None:
            known = self.scores.get(section.address)
            return self.forward.tokens[section.keys], 0 if known is None else known[0]
        is_shown = section.stack in (self.choice.stack, "head") and self.choice.token < len(section.rows)
        return section.rows, self.choice.token if is_shown else len(section.rows) - 1

    @property
    def chosen(self) -> list[Section]:
        """The sections of the layer that is looked at."""
        return [one for one in self.sections if (one.stack, one.layer) == (self.choice.stack, self.choice.layer)]


def explain_text(
    maps: AttentionMaps,
    title: str,
    *,
    stack: str | None = None,
    layer: int = 0,
    head: int = 0,
    token: int | None = None,
) -> Explanation:
    """Take the forward pass of a model on a text apart.

    Args:
        maps: of the text.
        title: names model and task.
        stack: whose layer is looked at; None: the last one.
        layer, head: counted from 0.
        token: the position of the query; None: the last token that is no special token behind the text.

    Raises:
        InputError: there is no such stack, layer, head or token, or the text is too long.
    """
    lengths = {"source": maps.reading.source.ids.shape[1]}
    if maps.reading.target is not None:
        lengths["target"] = maps.reading.target.ids.shape[1]
    if max(lengths.values()) > LONGEST:
        raise InputError(
            f"the text has {max(lengths.values())} tokens, and at most {LONGEST} are explained number by number: "
            "shorten it"
        )
    names = [name for name in ("encoder", "decoder") if getattr(maps.module, name) is not None]
    if stack is not None and stack not in names:
        raise InputError(argument("stack") + f" is '{stack}', and this model has {' and '.join(names)}")
    stack = stack or names[-1]
    depths = len(getattr(maps.module, stack).order)
    _check("layer", layer, depths, f"the {stack} has layers")
    forward = Forward.of(maps)
    heads = [record.num_heads for (name, depth), record in forward.records.items() if name.startswith(stack)]
    _check("head", head, min(heads, default=1), f"the {stack} has heads")
    tokens = forward.tokens[stack]
    if token is None:
        affixes = maps.reading.affixes[names.index(stack) :][:1]
        ending = max((_ending(forward.ids(stack).tolist(), one.suffix) for one in affixes), default=0)
        token = max(0, len(tokens) - 1 - ending)
    _check("token", token, len(tokens), f"the {stack} reads tokens")
    return Explanation(title, forward, Choice(stack, layer, head, token), tuple(sections(forward)))


def _check(name: str, number: int, count: int, what: str) -> None:
    if number not in range(count):
        raise InputError(argument(name) + f" is {number}, but {what} 0 to {count - 1}")


def _ending(ids: list[int], suffix: Sequence[int]) -> int:
    """Return how many special tokens end a text."""
    return len(suffix) if suffix and ids[-len(suffix) :] == list(suffix) else 0
