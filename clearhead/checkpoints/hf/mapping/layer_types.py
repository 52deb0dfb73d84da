"""Helpers for stacks whose layers have different attention types: full attention or a sliding window."""

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
"""Type of the config object with the RoPE settings of each type of layer."""


def attention(layer: spec.Layer) -> spec.Attention:
    """Return the self-attention node of a layer's spec."""
    function = layer.steps[0].branches[0].function
    assert isinstance(function, spec.Attention)
    return function


def attentions(model: spec.Model, side: Side = "decoder") -> list[spec.Attention]:
    """Return the self-attention nodes of all layers of an encoder or decoder."""
    stack: spec.Stack | None = getattr(model, side)
    assert stack is not None
    return [attention(layer) for layer in stack.layers]


def is_sliding(layer: spec.Layer) -> bool:
    """Return whether the self-attention of a layer has a sliding window."""
    return isinstance(attention(layer).mask, spec.Window)


def is_full(layer: spec.Layer) -> bool:
    """Return whether the self-attention of a layer has no sliding window."""
    return not is_sliding(layer)


def types_of(side: Side = "decoder") -> Callable[[spec.Model], list[str]]:
    """Return a function that gets a spec and returns the config value `layer_types` of its encoder or decoder."""
    return lambda model: [SLIDING if isinstance(a.mask, spec.Window) else FULL for a in attentions(model, side)]


def window(model: spec.Model, side: Side = "decoder") -> int | None:
    """Return the number of tokens before the query in a stack's attention window; None if no layer has a window."""
    return next((a.mask.before for a in attentions(model, side) if isinstance(a.mask, spec.Window)), None)


def read(c: Values, pattern: Sequence[bool]) -> list[bool]:
    """Return for each layer whether it has an attention window: from `layer_types` of the config, else from `pattern`.

    Raises:
        InputError: a type is not known, or the list has a wrong length.
    """
    types, count = c.get("layer_types"), c["num_hidden_layers"]
    if types is None:
        return list(pattern)
    if len(types) != count:
        raise InputError(f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {count}")
    unknown = sorted({str(kind) for kind in types} - {FULL, SLIDING})
    if unknown:
        raise InputError(
            f"config.json: layer_types: {', '.join(unknown)} is not supported; expected full_attention or "
            "sliding_attention"
        )
    return [kind == SLIDING for kind in types]


def only_in(is_chosen: Callable[[spec.Layer], bool], *keys: Key) -> tuple[Key, ...]:
    """Return config keys that take their values from the first layer that `is_chosen` accepts.

    If it accepts no layer, saving does not write the keys."""

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
    """Return the RoPE of layers with an attention window (key True) and of layers without a window (key False).

    Args:
        c: the config values, with those of `rope.keys`.
        head_size: the size of an attention head.
        full, sliding: the default RoPE theta of layers without and with a window.
        scaled: the types of layers that an older `rope_scaling` applies to.

    Raises:
        InputError: same cases as in `rope.rotary`.
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
    """Return the config object `rope_parameters` with the RoPE settings of each type of layer.

    Args:
        model: the spec of the model.
        side: the stack, "encoder" or "decoder".
        thetas: the RoPE theta of each type that must be in the object even if no layer has this type.
    """
    config: dict[str, Any] = {}
    for node in attentions(model, side):
        if node.position is not None:
            scaling = rope.scaling_config(node.position) or {"rope_type": "default"}
            kind = SLIDING if isinstance(node.mask, spec.Window) else FULL
            config.setdefault(kind, scaling | {"rope_theta": node.position.theta})
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()} | config
