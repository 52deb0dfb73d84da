"""How a hand-written model is called: its ids, those of its source, and its masks in the form that it takes.

Legend: B batch, T tokens of the text or target, S tokens of the source.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.apps.check.handwritten.calling import parameters_of
from clearhead.apps.check.handwritten.report import CannotCompare

Shape = Literal["row", "query", "head", "square"]
Meaning = Literal["attend", "block", "additive"]
_IS_MASK = re.compile("mask|pad|block(?!_size)|keep")
_OF_SOURCE = re.compile("src|source|enc|mem|cross|input")
_OF_TARGET = re.compile("tgt|trg|target|dec|output|^y$")
_OF_VECTORS = re.compile("^enc(oder|oded)?(_|$)(?!.*(id|tok|inp))|mem|hidden|states")


@dataclass(frozen=True)
class Inputs:
    """The arguments of a model.

    Args:
        ids: the name of the text's ids, or of the target's.
        source: the name of the source's ids; None: one stack.
        masks: the names of its masks, with whether each is required.
    """

    ids: str
    source: str | None
    masks: dict[str, bool]

    def is_of_source(self, mask: str) -> bool:
        """Whether a mask hides tokens of the source."""
        if self.source is None or _OF_TARGET.search(mask.lower()):
            return False
        return _OF_SOURCE.search(mask.lower()) is not None or mask == next(iter(self.masks))


def model_inputs(part: Callable[..., Any]) -> Inputs:
    """Return the arguments of a model.

    Raises:
        CannotCompare: what one of them is does not show.
    """
    parameters = parameters_of(part)
    masks = {one.name: one.default is one.empty for one in parameters[1:] if _IS_MASK.search(one.name.lower())}
    others = {one.name: one.default is one.empty for one in parameters if one.name not in masks}
    if not others:
        raise CannotCompare("it takes no argument that could be the ids")
    passed = [name for name, is_required in others.items() if is_required] or list(others)[:1]
    if "decoder_input_ids" in others and "decoder_input_ids" not in passed:
        passed.append("decoder_input_ids")
    if len(passed) == 1:
        return Inputs(passed[0], None, _usual_masks(masks))
    ids, source = _target_and_source(passed)
    return Inputs(ids, source, masks)


def _target_and_source(names: list[str]) -> tuple[str, str]:
    """Return which of two arguments or more are the ids of the target and of the source.

    Raises:
        CannotCompare: what one of them is does not show.
    """
    first, second, *more = names
    first_is_target, second_is_target = (_OF_TARGET.search(name.lower()) is not None for name in (first, second))
    if _OF_VECTORS.search(second.lower()) or (_OF_VECTORS.search(first.lower()) and not first_is_target):
        raise CannotCompare(f"its argument '{second}' is a memory of vectors: compare the whole model, or its layers")
    if more or not (first_is_target or second_is_target):
        unknown = more[0] if more else second
        raise CannotCompare(f"what to pass for its argument '{unknown}' is not known; give it a default")
    return (first, second) if first_is_target and not second_is_target else (second, first)


def _usual_masks(masks: dict[str, bool]) -> dict[str, bool]:
    """Return the masks of one stack: those that it requires, or the one that hides padding."""
    required = {name: True for name, is_required in masks.items() if is_required}
    usual = next((name for name in masks if "attn" not in name), next(iter(masks), None))
    return required or ({} if usual is None else {usual: False})


@dataclass(frozen=True)
class MaskForm:
    """The shape and the meaning of masks.

    Args:
        shape: "row" [B, T], "query" [B, T or 1, T], "head" [B, 1, T or 1, T], or "square" [T, T] without padding.
        meaning: True = may attend, True = hidden, or 0 and -inf.
        is_causal: whether masks of the text or target, except rows, hide the future as well.
    """

    shape: Shape = "row"
    meaning: Meaning = "attend"
    is_causal: bool = False

    def hides_padding(self, name: str) -> bool:
        """Whether a mask of this name can hide padding."""
        return self.shape != "square" or "pad" in name

    def mask(self, name: str, real: Tensor, is_causal: bool) -> Tensor:
        """Return a mask of tokens [B, T], True = real."""
        length = real.shape[1]
        allowed = real
        future = torch.ones(length, length, dtype=torch.bool)
        future = future.tril() if is_causal else future
        if self.shape == "square" and "pad" not in name:
            allowed = future
        elif self.shape in ("query", "head"):
            allowed = real[:, None] & future if is_causal else real[:, None]
            allowed = allowed[:, None] if self.shape == "head" else allowed
        if self.meaning == "additive":
            return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
        return ~allowed if self.meaning == "block" else allowed

    def __str__(self) -> str:
        sizes = {"row": "[B, T]", "query": "[B, 1 or T, T]", "head": "[B, 1, 1 or T, T]", "square": "[T, T]"}
        says = {"attend": "True = may attend", "block": "True = hidden", "additive": "0 and -inf"}
        return f"{sizes[self.shape]}, {says[self.meaning]}"


def mask_forms(is_causal: bool) -> Iterator[MaskForm]:
    """Yield forms of masks, the usual ones first; rows mean what they mean in most files."""
    shapes: tuple[Shape, ...] = ("row", "query", "head", "square")
    meanings: tuple[Meaning, ...] = ("attend", "block", "additive")
    for meaning, shape in itertools.product(meanings, shapes):
        yield MaskForm(shape, meaning, is_causal)
