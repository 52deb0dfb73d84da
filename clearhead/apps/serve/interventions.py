"""Edits of a run as JSON data, with the functions for `model.edit` and the lines of Python that do the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.core.attention import Attention
from clearhead.interpret.maps.hook_points import ActivationContext, addresses, edit, matching_addresses

BY_HEAD = ("queries", "keys", "values", "mixed", "scores", "weights")
"""Activations whose second axis counts heads."""
OUTPUTS = ("hidden", "logits")
Position = Annotated[int, Field(ge=0, lt=2**24)]


class Data(BaseModel):
    """Base of JSON objects in requests: unknown fields, infinity and NaN are refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Intervention(Data):
    """One edit of a run: an activation is scaled, or replaced by that of another text.

    Args:
        kind: "scale" multiplies the activation, "patch" replaces it by that of another text.
        address: the address of the activation, or a pattern of addresses.
        factor: the factor of "scale"; 0 switches the activation off.
        head: the only head that is edited. None means all heads.
        positions: the positions of the tokens that are edited; empty means all.
        depth: the only depth that is edited, if layers share weights. None means all depths.
        text, target: the other text of "patch", and the target text of an encoder-decoder.
    """

    kind: Literal["scale", "patch"] = "scale"
    address: Annotated[str, Field(min_length=1, max_length=300)]
    factor: Annotated[float, Field(ge=-1000, le=1000)] = 0.0
    head: Annotated[int, Field(ge=0, lt=2**16)] | None = None
    positions: Annotated[tuple[Position, ...], Field(max_length=256)] = ()
    depth: Annotated[int, Field(ge=0, lt=2**16)] | None = None
    text: Annotated[str, Field(max_length=1_000_000)] = ""
    target: Annotated[str, Field(max_length=1_000_000)] | None = None

    @property
    def has_heads(self) -> bool:
        """True if the activation has an axis of heads."""
        return self.address.rpartition(".")[2] in BY_HEAD


Edits = Annotated[tuple[Intervention, ...], Field(max_length=64)]


def check(intervention: Intervention, module: Transformer, lengths: Mapping[str, int]) -> None:
    """Refuse an edit that is not possible in a model.

    Args:
        intervention: the edit.
        module: the model.
        lengths: the number of tokens that each stack reads, by "encoder" and "decoder".

    Raises:
        InputError: the address, head or position does not exist; the message names the nearest address.
    """
    matches = matching_addresses(module, intervention.address)
    if intervention.kind == "patch" and len(matches) > 1:
        raise InputError(
            f"'{intervention.address}' matches {len(matches)} activations; a patch needs the address of one"
        )
    if intervention.head is not None:
        _check_head(intervention, module, matches)
    for address in matches if intervention.positions else ():
        stack = address.partition(".")[0]
        if ".layers." not in address:
            raise InputError(f"'{address}' is outside the layers, where positions are unknown: leave positions out")
        last = max(intervention.positions)
        if last >= lengths[stack]:
            raise InputError(f"position {last} is not in the {stack}, which ends at {lengths[stack] - 1}")


def _check_head(intervention: Intervention, module: Transformer, matches: Sequence[str]) -> None:
    assert intervention.head is not None
    if not intervention.has_heads:
        wanted = next((address for address in addresses(module) if address.endswith(".mixed")), "")
        raise InputError(
            f"'{intervention.address}' has no axis of heads: leave head out, or use an address such as '{wanted}'"
        )
    for address in matches:
        path, _, point = address.rpartition(".")
        attention = module.get_submodule(path)
        assert isinstance(attention, Attention)
        count = attention.spec.num_kv_heads if point in ("keys", "values") else attention.spec.num_heads
        if intervention.head >= count:
            raise InputError(f"'{address}' has no head {intervention.head}; it has 0 to {count - 1}")


def action(intervention: Intervention, other: Tensor | None = None) -> Callable[[Tensor, ActivationContext], Tensor]:
    """Return the function that changes an activation as an edit describes, for `model.edit`.

    Args:
        intervention: the edit, accepted by `check`.
        other: the activation of the other text of a patch, with one row. None for "scale".
    """
    return partial(_change, intervention, other)


def _change(intervention: Intervention, other: Tensor | None, x: Tensor, at: ActivationContext) -> Tensor:
    if intervention.depth is not None and at.depth != intervention.depth:
        return x
    axes = (slice(None), *(None,) * int(intervention.has_heads), slice(None), None)
    value, chosen = intervention.factor * x, torch.ones((), dtype=torch.bool, device=x.device)
    if intervention.positions or other is not None:
        _check_axis(intervention, x, at)
        assert at.positions is not None
        if intervention.positions:
            chosen = chosen & torch.isin(at.positions, at.positions.new_tensor(intervention.positions))[axes]
        if other is not None:
            last = other.shape[-2] - 1
            value = other[..., at.positions[0].clamp(max=last), :].to(x)
            chosen = chosen & (at.positions <= last)[axes]
    if intervention.head is not None:
        chosen = chosen & (torch.arange(x.shape[1], device=x.device) == intervention.head)[:, None, None]
    return torch.where(chosen, value, x)


def _check_axis(intervention: Intervention, x: Tensor, at: ActivationContext) -> None:
    rank = 4 if intervention.has_heads else 3
    if at.positions is None or x.dim() != rank or x.shape[-2] != at.positions.shape[1]:
        raise InputError(
            f"'{at.address}' has the shape {list(x.shape)}, without an axis for the tokens that the stack reads: "
            "leave positions out, or choose another activation"
        )


def editing(
    module: Transformer, edits: Sequence[Intervention], others: Sequence[Tensor | None]
) -> AbstractContextManager[object]:
    """Return a context manager in which a model runs with edits; infinite activations raise `InputError`.

    Args:
        module: the model.
        edits: the edits, in the order in which they are applied.
        others: the activation of the other text for each edit. None for edits that are not patches.
    """
    blocks, newest = ExitStack(), [0]

    def apply(
        number: int, change: Callable[[Tensor, ActivationContext], Tensor], x: Tensor, at: ActivationContext
    ) -> Tensor:
        newest[0] = number
        return change(x, at)

    def check_finite(x: Tensor, at: ActivationContext) -> Tensor:
        # The maximum ignores -inf, the score of a masked token.
        if not bool(x.amax(-1).isfinite().all()):
            last_edit = edits[newest[0]]
            raise InputError(
                f"edits[{newest[0]}] ('{last_edit.address}', factor {last_edit.factor:g}) makes numbers infinite or "
                f"NaN at '{at.address}': choose another factor"
            )
        return x

    for number, (intervention, other) in enumerate(zip(edits, others, strict=True)):
        change = partial(apply, number, action(intervention, other))
        blocks.enter_context(edit(module, {intervention.address: change}))
    watched = [name for name in addresses(module) if name in OUTPUTS or name.split(".")[1::2] == ["layers", "after"]]
    if edits:
        blocks.enter_context(edit(module, dict.fromkeys(watched, check_finite)))
    return blocks


def python_lines(edits: Sequence[Intervention], num_records: Sequence[int], call: str) -> list[str]:
    """Return lines of Python that run a model call with edits: captures for patches, a `with` statement, the call.

    Args:
        edits: the edits.
        num_records: the number of activations that one call captures at the address of each edit.
        call: the call of the model.
    """
    before, blocks = list[str](), list[str]()
    for number, (intervention, shared) in enumerate(zip(edits, num_records, strict=True)):
        name = f"other_{number}"
        if intervention.kind == "patch":
            before += _capture_lines(intervention, name, shared)
        blocks.append(f"model.edit({{{json.dumps(intervention.address)}: {_lambda(intervention, name)}}})")
    block = ", ".join(blocks)
    return [*before, *([f"with {block}:", f"    {call}"] if blocks else [call])]


def _capture_lines(intervention: Intervention, name: str, shared: int) -> list[str]:
    texts = ", ".join(map(repr, filter(None, (intervention.text, intervention.target))))
    record = -1 if intervention.depth is None else intervention.depth - shared
    return [
        f"with model.capture({json.dumps(intervention.address)}) as seen:",
        f"    model.attention({texts})",
        f"{name} = seen[{json.dumps(intervention.address)}][{record}].tensor",
    ]


def _lambda(intervention: Intervention, name: str) -> str:
    axes = "[:, None, :, None]" if intervention.has_heads else "[..., None]"
    value, chosen = f"{intervention.factor!r} * x", list[str]()
    if intervention.positions:
        equal = [f"(at.positions == {position})" for position in intervention.positions]
        chosen.append(f"{equal[0]}{axes}" if len(equal) == 1 else f"({' | '.join(equal)}){axes}")
    if intervention.kind == "patch":
        value = f"{name}[..., at.positions[0].clamp(max={name}.shape[-2] - 1), :]"
        chosen.append(f"(at.positions < {name}.shape[-2]){axes}")
    if intervention.head is not None:
        chosen.append(f"(torch.arange(x.shape[1], device=x.device) == {intervention.head})[:, None, None]")
    text = f"torch.where({' & '.join(chosen)}, {value}, x)" if chosen else value
    if intervention.depth is not None:
        text = f"{text} if at.depth == {intervention.depth} else x"
    return f"lambda x{', at' * ('at.' in text)}: {text}"


def finite_or_none(value: float) -> float | None:
    """Return a number that JSON can hold; None for NaN and infinity."""
    return value if math.isfinite(value) else None
