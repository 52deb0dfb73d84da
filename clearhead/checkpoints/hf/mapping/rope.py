"""Conversion of RoPE settings in config.json to `spec.Rotary`, and back, with every kind of length scaling.

The older keys are `rope_theta` and `rope_scaling`, which is null or an object. The newer key is `rope_parameters`, one
object with everything. An older object replaces the newer one. `rope_theta` is the default if the object has no theta.
The older keys are written, because all versions of transformers read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.mapping.config import value_at
from clearhead.checkpoints.hf.mapping.family import Key, Values
from clearhead.spec.base import Count, Positive

# The spec class of each kind of scaling, and the spec names of the config keys that it must have.
_SCALINGS: dict[str, tuple[type[spec.Node], dict[str, str]]] = {
    "linear": (spec.LinearScaling, {"factor": "factor"}),
    "dynamic": (spec.DynamicScaling, {"factor": "factor"}),
    "llama3": (
        spec.BandScaling,
        {"factor": "factor", "low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"},
    ),
    "yarn": (spec.YarnScaling, {"factor": "factor"}),
    "longrope": (spec.LongRopeScaling, {"short_factor": "short_factor", "long_factor": "long_factor"}),
}
_OPTIONAL = {
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"attention_factor", "factor"},
}
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
# Config keys of spec names that differ from them.
_WRITTEN = {
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
    "magnitude": "attention_factor",
}


class RopeConfig(BaseModel):
    """Config object with RoPE settings, such as `rope_scaling`; null means the same as an absent key."""

    type: str | None = None
    rope_type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    original_max_position_embeddings: Count | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    truncate: bool | None = None


def keys(theta: float, attention: str, length: int) -> tuple[Key, ...]:
    """Return the config keys for RoPE that is the same in all layers.

    Args:
        theta: the default RoPE theta of the config class.
        attention: the address in a spec of the attention that has the RoPE.
        length: the default of `max_position_embeddings`.
    """
    position = f"{attention}.position"
    return (
        Key("rope_theta", theta, f"{position}.theta"),
        Key("rope_scaling", None, lambda model: scaling_config(value_at(model, position)), kind=RopeConfig),
        Key("rope_parameters", None, kind=RopeConfig),
        Key("max_position_embeddings", length, lambda model: _max_length(model, position)),
        Key("original_max_position_embeddings", None, kind=int),
    )


def rotary_share(attention: str) -> Callable[[spec.Model], float]:
    """Return a function that gets a spec and returns the fraction of each head's channels that RoPE rotates."""

    def read_share(model: spec.Model) -> float:
        node = value_at(model, attention)
        rotated, size = node.position.size or node.head_size, node.head_size
        # Readers truncate share * size. A share that rounds down would lose a dimension.
        return float(rotated / size if int(size * (rotated / size)) == rotated else (rotated + 0.5) / size)

    return read_share


def read(c: Values, *, head_size: int, partial: float = 1.0, is_partial: bool = False) -> spec.Rotary:
    """Return the RoPE that config values describe for all layers.

    Args:
        c: the config values, with those of `keys`.
        head_size: the size of an attention head.
        partial: the fraction of each head's channels that RoPE rotates.
        is_partial: True if `partial_rotary_factor` in the config object replaces `partial`.

    Raises:
        InputError: the kind of scaling is not known, or keys of the config object are missing or not known.
    """
    settings = c["rope_scaling"] or c["rope_parameters"] or {}
    return rotary(settings, c, theta=c["rope_theta"], head_size=head_size, partial=partial, is_partial=is_partial)


def rotary(
    settings: Mapping[str, Any],
    c: Values,
    *,
    theta: float,
    head_size: int,
    partial: float = 1.0,
    is_partial: bool = False,
) -> spec.Rotary:
    """Return the RoPE that a config object such as `rope_scaling` describes; `theta` and `partial` are defaults."""
    settings = {name: value for name, value in settings.items() if value is not None}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default" and kind not in _SCALINGS:
        known = ", ".join(["default", *_SCALINGS])
        raise InputError(f"config.json: rope_type '{kind}' is not supported; expected one of {known}")
    needed = _SCALINGS[kind][1].keys() if kind in _SCALINGS else set()
    missing = sorted(needed - settings.keys())
    unknown = sorted(settings.keys() - needed - _OPTIONAL.get(kind, set()) - _COMMON)
    if missing or unknown:
        problems = [
            f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has unknown", unknown)) if names
        ]
        raise InputError(f"config.json: rope scaling of the type '{kind}' {' and '.join(problems)}")
    if is_partial:
        partial = settings.get("partial_rotary_factor", partial)
    elif settings.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("config.json: partial_rotary_factor has no effect in this family; only 1.0 is supported")
    size = int(head_size * partial)
    scaling: Any = _scaling(kind, settings, c) if kind in _SCALINGS else None
    theta = float(settings.get("rope_theta", theta))
    return spec.Rotary(theta=theta, size=None if size == head_size else size, scaling=scaling)


def _scaling(kind: str, settings: Mapping[str, Any], c: Values) -> spec.Node:
    longest = c["max_position_embeddings"]
    # original_max_position_embeddings of the config takes precedence over the key of the object.
    original = c["original_max_position_embeddings"] or settings.get("original_max_position_embeddings") or longest
    cls, names = _SCALINGS[kind]
    fields: dict[str, Any] = {ours: _number(settings[theirs]) for theirs, ours in names.items()}
    fields["original_length"] = longest if cls is spec.DynamicScaling else original
    if cls is spec.YarnScaling:
        fields |= {name: float(settings.get(name, default)) for name, default in (("beta_fast", 32), ("beta_slow", 1))}
        fields |= {"truncate": settings.get("truncate", True), "magnitude": _yarn_magnitude(settings, fields["factor"])}
    elif cls is spec.LongRopeScaling:
        fields["magnitude"] = _longrope_magnitude(settings, longest, original)
    return cls(**{name: value for name, value in fields.items() if name in cls.model_fields})


def _number(value: Any) -> Any:
    return tuple(map(float, value)) if isinstance(value, list) else float(value)


def _yarn_magnitude(settings: Mapping[str, Any], factor: float) -> float:
    """Return the factor by which YaRN multiplies rotated queries and keys.

    Source: arXiv 2309.00071, eq. 22; the two multipliers are those of the code released with arXiv 2412.19437.
    """

    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    if "attention_factor" in settings:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return magnitude(settings["mscale"]) / magnitude(settings["mscale_all_dim"])
    return magnitude(1.0)


def _longrope_magnitude(settings: Mapping[str, Any], longest: int, original: int) -> float:
    """Return the factor by which LongRoPE multiplies rotated queries and keys.

    Source: the code released with arXiv 2404.14219.
    """
    if "attention_factor" in settings:
        return float(settings["attention_factor"])
    factor = settings["factor"] if "factor" in settings else longest / original
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))


def scaling_config(position: spec.Rotary) -> dict[str, Any] | None:
    """Return the config object `rope_scaling` for a rotary position; None if it has no length scaling."""
    scaling = position.scaling
    if scaling is None:
        return None
    kind = next(name for name, (cls, _) in _SCALINGS.items() if isinstance(scaling, cls))
    config: dict[str, Any] = {"rope_type": kind} | ({"factor": 2.0} if kind == "longrope" else {})
    for name, value in scaling:
        if name != "kind" and (kind, name) != ("dynamic", "original_length"):
            config[_WRITTEN.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return config


def _max_length(model: spec.Model, position: str) -> int | None:
    """Return the longest sequence in tokens: the declared length, or the one that the RoPE scaling implies.

    None means that neither exists."""
    match value_at(model, position).scaling:
        case spec.DynamicScaling(original_length=length):
            return length
        case _ if model.declared_length is not None:
            return model.declared_length
        case (
            spec.BandScaling(factor=factor, original_length=length)
            | spec.YarnScaling(factor=factor, original_length=length)
        ):
            return max(int(factor * length), length + 1)
        case spec.LongRopeScaling(original_length=length):
            return 2 * length
    return None
