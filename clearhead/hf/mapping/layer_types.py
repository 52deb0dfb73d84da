"""Layers of several kinds in one stack: settings that only some of them have, and rotation that differs by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping import rope
from clearhead.hf.mapping.config import value_at
from clearhead.hf.mapping.family import Address, Key, Values

KINDS = ("full_attention", "sliding_attention")


def attentions(model: spec.Model) -> list[spec.Attention]:
    """The self-attention of every layer of the decoder."""
    assert model.decoder is not None
    functions = [layer.steps[0].branches[0].function for layer in model.decoder.layers]
    return [function for function in functions if isinstance(function, spec.Attention)]


def among(keep: Callable[[spec.Layer], bool], *keys: Key) -> tuple[Key, ...]:
    """The same keys, but found in the first layer of a kind; where there is none, they say nothing."""

    def moved(address: Address) -> Address:
        def found(model: spec.Model) -> Any:
            assert model.decoder is not None
            layers = tuple(layer for layer in model.decoder.layers if keep(layer))
            if not layers:
                raise LookupError("no layer is of this kind")
            return value_at(
                model.model_copy(update={"decoder": model.decoder.model_copy(update={"layers": layers})}), address
            )

        return found

    return tuple(key if key.at is None else replace(key, at=moved(key.at)) for key in keys)


def attention(layer: spec.Layer) -> spec.Attention:
    """The self-attention of a layer."""
    function = layer.steps[0].branches[0].function
    assert isinstance(function, spec.Attention)
    return function


def slides(layer: spec.Layer) -> bool:
    """Whether a layer sees a window only."""
    return isinstance(attention(layer).mask, spec.Window)


def sees_all(layer: spec.Layer) -> bool:
    """Whether a layer sees everything before it."""
    return not slides(layer)


def rotations(c: Values, *, head_size: int, full: float, sliding: float) -> dict[str, spec.Rotary]:
    """Return the rotation of each kind of layer.

    An older `rope_scaling` is of the full layers alone, and so is `rope_theta`.

    Args:
        c: the values, `rope.keys` among them.
        head_size: of an attention.
        full, sliding: the theta of each kind where its object has none.

    Raises:
        InputError: an object that is not one for each kind of layer.
    """
    nested = c["rope_parameters"] or {}
    if not set(nested) <= set(KINDS) or not all(value is None or isinstance(value, dict) for value in nested.values()):
        raise InputError(
            f"config.json: rope_parameters must hold one object for each of {' and '.join(KINDS)}, "
            f"got {', '.join(sorted(nested))}"
        )
    thetas = dict(zip(KINDS, (full, sliding), strict=True))
    found = {}
    for kind in KINDS:
        given: Mapping[str, Any] = nested.get(kind) or {"rope_type": "default"}
        if kind == KINDS[0]:
            given = {**given, **(c["rope_scaling"] or {})}
        found[kind] = rope.rotary(given, c, theta=thetas[kind], head_size=head_size, partial=1.0, is_partial=False)
    return found


def written(model: spec.Model) -> dict[str, Any]:
    """Return the object that says the rotation of each kind of layer."""
    found: dict[str, Any] = {}
    for node in attentions(model):
        if node.position is not None:
            said = (rope.written(node.position) or {"rope_type": "default"}) | {"rope_theta": node.position.theta}
            found.setdefault(KINDS[isinstance(node.mask, spec.Window)], said)
    return found
