"""Explain a forward pass: every value of the model on a text, and the score terms of the selected head."""

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
"""Most tokens that a stack may read, since every number of every layer is kept in memory."""


@dataclass(frozen=True)
class ExplainSelection:
    """Layer, head and token that an explanation shows.

    Args:
        stack: "encoder" or "decoder".
        layer: number of the layer, from 0; shared layers count at every depth.
        head: number of the attention head, from 0.
        token: position of the query token in the stack, from 0.
    """

    stack: str
    layer: int
    head: int
    token: int


@dataclass(frozen=True)
class Explanation:
    """Explanation of a forward pass.

    Args:
        title: title with the model and its task.
        forward: captured forward pass.
        selection: the layer, head and token that are shown.
        sections: sections of values, in the order in which the model computes them.
    """

    title: str
    forward: Forward
    selection: ExplainSelection
    sections: tuple[ExplanationSection, ...]

    @property
    def token(self) -> str:
        """The selected token; in a decoder also the token that the decoder writes at that step."""
        selection, forward = self.selection, self.forward
        token = forward.tokens[selection.stack][selection.token]
        if selection.stack == "encoder" or not forward.written:
            return token
        return f"{token}; this step writes {forward.written[selection.token]}"

    @cached_property
    def scores(self) -> dict[str, tuple[int, ScoreTerms | NonlinearNorm]]:
        """Attention address in the selected layer -> key with the largest weight, and the terms of its score.

        If a custom norm may be nonlinear, a `NonlinearNorm` replaces the terms.
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
        """Return the tokens to which the rows of a value belong, and the row that is highlighted.

        Args:
            section: section of the explanation.
            value: value of this section.

        Returns:
            The tokens and the highlighted row. For keys and values it is the key with the largest weight.
        """
        if value.is_of_keys and section.keys is not None:
            known = self.scores.get(section.address)
            return self.forward.tokens[section.keys], 0 if known is None else known[0]
        is_shown = section.stack in (self.selection.stack, "head") and self.selection.token < len(section.rows)
        return section.rows, self.selection.token if is_shown else len(section.rows) - 1

    @property
    def chosen(self) -> list[ExplanationSection]:
        """The sections of the selected layer."""
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
    """Run the model once more on the text of attention maps, and explain every value of the forward pass.

    Args:
        maps: attention maps of the text.
        title: title with the model and its task.
        stack: stack of the selected layer, "encoder" or "decoder". None means the last stack.
        layer, head: selected layer and head, from 0.
        token: position of the selected query token. None means the last token before the final special tokens.

    Raises:
        InputError: the stack, layer, head or token does not exist, or the text is too long.
    """
    lengths = {"source": maps.inputs.source.ids.shape[1]}
    if maps.inputs.target is not None:
        lengths["target"] = maps.inputs.target.ids.shape[1]
    if max(lengths.values()) > LONGEST:
        raise InputError(
            f"the text has {max(lengths.values())} tokens, but an explanation covers at most {LONGEST}: "
            "give a shorter text"
        )
    names = [name for name in ("encoder", "decoder") if getattr(maps.module, name) is not None]
    if stack is not None and stack not in names:
        raise InputError(argument("stack") + f" is '{stack}', but this model has {' and '.join(names)}")
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
    """Return the number of special tokens at the end of a text: all of `suffix` if the ids end with it, otherwise 0."""
    return len(suffix) if suffix and ids[-len(suffix) :] == list(suffix) else 0
