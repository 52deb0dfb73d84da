"""Stacks whose layers are of several types: attention windows, keys of some layers only, rotary positions by type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping import rope
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Address, Key, Values

FULL, SLIDING = "full_attention", "sliding_attention"
Side = Literal["encoder", "decoder"]
Rotations = dict[Literal["full_attention", "sliding_attention"], rope.RopeConfig | None]
"""The object with the rotary position of each type of layer."""


def attention(layer: spec.Layer) -> spec.Attention:
    """The self-attention of a layer."""
    function = layer.steps[0].branches[0].function
    assert isinstance(function, spec.Attention)
    return function


def attentions(model: spec.Model, side: Side = "decoder") -> list[spec.Attention]:
    """The self-attention of every layer of a stack."""
    stack: spec.Stack | None = getattr(model, side)
    assert stack is not None
    return [attention(layer) for layer in stack.layers]


def is_sliding(layer: spec.Layer) -> bool:
    """Whether a layer attends to a window only."""
    return isinstance(attention(layer).mask, spec.Window)


def is_full(layer: spec.Layer) -> bool:
    """Whether a layer has no window."""
    return not is_sliding(layer)


def types_of(side: Side = "decoder") -> Callable[[spec.Model], list[str]]:
    """The `layer_types` of a stack."""
    return lambda model: [SLIDING if isinstance(a.mask, spec.Window) else FULL for a in attentions(model, side)]


def window(model: spec.Model, side: Side = "decoder") -> int | None:
    """How many tokens a window reaches back; None where no layer has one."""
    return next((a.mask.before for a in attentions(model, side) if isinstance(a.mask, spec.Window)), None)


def read(c: Values, pattern: Sequence[bool]) -> list[bool]:
    """Whether each layer has a window: as `layer_types` says, else as the pattern does.

    Raises:
        InputError: an unknown type, or a list of another length.
    """
    types, count = c.get("layer_types"), c["num_hidden_layers"]
    if types is None:
        return list(pattern)
    if len(types) != count:
        raise InputError(f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {count}")
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if unknown:
        raise InputError(f"config.json: layer_types: {', '.join(unknown)} is not supported")
    return [kind == SLIDING for kind in types]


def only_in(is_chosen: Callable[[spec.Layer], bool], *keys: Key) -> tuple[Key, ...]:
    """The same keys, read off the first layer of a type; where there is none, they are not written."""

    def read_from_chosen(address: Address) -> Address:
        def read_value(model: spec.Model) -> Any:
            assert model.decoder is not None
            layers = tuple(layer for layer in model.decoder.layers if is_chosen(layer))
            if not layers:
                raise LookupError("no layer is of this type")
            decoder = model.decoder.model_copy(update={"layers": layers})
            return value_at(model.model_copy(update={"decoder": decoder}), address)

        return read_value

    return tuple(key if key.address is None else replace(key, address=read_from_chosen(key.address)) for key in keys)


def rotations(
    c: Values, *, head_size: int, full: float, sliding: float, scaled: tuple[str, ...] = (FULL,)
) -> dict[bool, spec.Rotary]:
    """Return the rotary position of layers with a window (True) and of those without one.

    Args:
        c: the values, those of `rope.keys` among them.
        head_size: of an attention.
        full, sliding: the theta of each type where its object has none.
        scaled: the types that an older `rope_scaling` is for.

    Raises:
        InputError: as for `rope.rotary`.
    """
    nested = c["rope_parameters"] or {}
    rotary_by_window = {}
    for kind, theta in ((FULL, full), (SLIDING, sliding)):
        settings: Mapping[str, Any] = nested.get(kind) or {"rope_type": "default"}
        settings = {**settings, **(c["rope_scaling"] or {})} if kind in scaled else settings
        rotary_by_window[kind == SLIDING] = rope.rotary(settings, c, theta=theta, head_size=head_size)
    return rotary_by_window


def rotation_config(
    model: spec.Model, side: Side = "decoder", thetas: Mapping[str, float] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the object with the rotary position of each type of layer.

    Args:
        model: the spec.
        side: its stack.
        thetas: of plain rotations, for types that must be in the object even where no layer is of this type.
    """
    config: dict[str, Any] = {}
    for node in attentions(model, side):
        if node.position is not None:
            scaling = rope.scaling_config(node.position) or {"rope_type": "default"}
            kind = SLIDING if isinstance(node.mask, spec.Window) else FULL
            config.setdefault(kind, scaling | {"rope_theta": node.position.theta})
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()} | config
