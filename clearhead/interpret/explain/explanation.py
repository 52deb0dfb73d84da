"""What is explained of a forward pass: the layer, the head, the query and the key that someone looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from clearhead.base.errors import InputError, argument
from clearhead.interpret.explain.forward import Forward, sections
from clearhead.interpret.explain.score import NonlinearNorm, ScoreTerms, score_terms
from clearhead.interpret.explain.values import ExplanationSection, Value
from clearhead.interpret.maps.attention_maps import AttentionMaps

LONGEST = 512
"""The most tokens of a stack: every number of every layer is kept."""


@dataclass(frozen=True)
class ExplainSelection:
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
    selection: ExplainSelection
    sections: tuple[ExplanationSection, ...]

    @property
    def token(self) -> str:
        """The token that is looked at, and the one that the decoder writes at that step."""
        selection, forward = self.selection, self.forward
        token = forward.tokens[selection.stack][selection.token]
        if selection.stack == "encoder" or not forward.written:
            return token
        return f"{token}; this step writes {forward.written[selection.token]}"

    @cached_property
    def scores(self) -> dict[str, tuple[int, ScoreTerms | NonlinearNorm]]:
        """Return, by the address of a step that attends, the key with the largest weight and the terms of its score.

        Where it cannot be taken apart, there is the reason.
        """
        selection, scores = self.selection, dict[str, tuple[int, ScoreTerms | NonlinearNorm]]()
        for section in self.chosen:
            if section.keys is not None:
                source = "memory" if section.keys != section.stack else "self"
                weights_TS = section.value("weights").of_head(selection.head)
                key = int(weights_TS[selection.token].argmax())
                attention_key = (selection.stack, source, selection.layer)
                try:
                    scores[section.address] = (
                        key,
                        score_terms(self.forward, attention_key, selection.head, selection.token, key),
                    )
                except NonlinearNorm as reason:
                    scores[section.address] = key, reason
        return scores

    def rows(self, section: ExplanationSection, value: Value) -> tuple[tuple[str, ...], int]:
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
        is_shown = section.stack in (self.selection.stack, "head") and self.selection.token < len(section.rows)
        return section.rows, self.selection.token if is_shown else len(section.rows) - 1

    @property
    def chosen(self) -> list[ExplanationSection]:
        """The sections of the layer that is looked at."""
        return [
            section
            for section in self.sections
            if (section.stack, section.layer) == (self.selection.stack, self.selection.layer)
        ]


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
    lengths = {"source": maps.inputs.source.ids.shape[1]}
    if maps.inputs.target is not None:
        lengths["target"] = maps.inputs.target.ids.shape[1]
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
        affixes = maps.inputs.affixes[names.index(stack) :][:1]
        ending = max((_ending(forward.ids(stack).tolist(), affix.suffix) for affix in affixes), default=0)
        token = max(0, len(tokens) - 1 - ending)
    _check("token", token, len(tokens), f"the {stack} reads tokens")
    return Explanation(title, forward, ExplainSelection(stack, layer, head, token), tuple(sections(forward)))


def _check(name: str, number: int, count: int, what: str) -> None:
    if number not in range(count):
        raise InputError(argument(name) + f" is {number}, but {what} 0 to {count - 1}")


def _ending(ids: list[int], suffix: Sequence[int]) -> int:
    """Return how many special tokens end a text."""
    return len(suffix) if suffix and ids[-len(suffix) :] == list(suffix) else 0
