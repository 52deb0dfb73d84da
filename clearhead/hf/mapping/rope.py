"""What configs say about rotation: the older keys and the newer ones, every kind of scaling, and back.

Older: `rope_theta` and `rope_scaling`, null or an object. Newer: `rope_parameters`, one object with everything. An
older object replaces the newer one; a theta that stands alone fills what the object lacks. The older form is what is
written, because every reader knows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from clearhead import spec
from clearhead.errors import InputError
from clearhead.hf.mapping.config import value_at
from clearhead.hf.mapping.family import Key, Values

_NEEDED = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor"}),
    "longrope": frozenset({"short_factor", "long_factor"}),
}
_ALLOWED = {
    "yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "longrope": frozenset({"attention_factor", "factor"}),
}
_COMMON = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"})


def keys(theta: float, attention: str, length: int) -> tuple[Key, ...]:
    """The keys of a family whose layers all rotate alike.

    Args:
        theta: the default of the reading class.
        attention: the address of an attention.
        length: the default of `max_position_embeddings`.
    """
    return (
        Key("rope_theta", theta, f"{attention}.position.theta"),
        Key("rope_scaling", None, lambda model: written(value_at(model, f"{attention}.position")), kind=dict),
        Key("rope_parameters", None, kind=dict),
        Key("max_position_embeddings", length, lambda model: _length(value_at(model, f"{attention}.position"))),
        Key("original_max_position_embeddings", None, kind=int),
    )


def share(attention: str) -> Callable[[spec.Model], float]:
    """Which part of a head rotates."""

    def found(model: spec.Model) -> float:
        node = value_at(model, attention)
        turned, size = node.position.size or node.head_size, node.head_size
        # Readers cut the product off, so that a quotient just below would lose a dimension.
        return float(turned / size if int(size * (turned / size)) == turned else (turned + 0.5) / size)

    return found


def read(c: Values, *, head_size: int, partial: float = 1.0, is_partial: bool = False) -> spec.Rotary:
    """Return the rotation that a config asks for.

    Args:
        c: the values, `keys` among them.
        head_size: of an attention.
        partial: the rotated share of a head.
        is_partial: whether the family takes the share from the object too.

    Raises:
        InputError: an unknown kind, or keys that are missing or unknown.
    """
    given = c["rope_scaling"] or c["rope_parameters"] or {}
    return rotary(given, c, theta=c["rope_theta"], head_size=head_size, partial=partial, is_partial=is_partial)


def rotary(
    given: Mapping[str, Any], c: Values, *, theta: float, head_size: int, partial: float, is_partial: bool
) -> spec.Rotary:
    """Return the rotation that one object of a config describes; what it lacks is taken from the arguments."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _NEEDED:
        raise InputError(f"config.json: rotation of the kind '{kind}' is not read; read are {', '.join(_NEEDED)}")
    missing = sorted(_NEEDED[kind] - given.keys())
    unknown = sorted(given.keys() - _NEEDED[kind] - _ALLOWED.get(kind, frozenset()) - _COMMON)
    if missing or unknown:
        problems = [
            f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has unknown", unknown)) if names
        ]
        raise InputError(f"config.json: rotation of the kind '{kind}' {' and '.join(problems)}")
    if is_partial:
        partial = given.get("partial_rotary_factor", partial)
    elif given.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("config.json: partial_rotary_factor has no meaning for this family; only 1.0 is supported")
    size = int(head_size * partial)
    return spec.Rotary(
        theta=float(given.get("rope_theta", theta)),
        size=None if size == head_size else size,
        scaling=_scaling(kind, given, c),
    )


def _scaling(kind: str, given: Mapping[str, Any], c: Values) -> spec.RotaryScaling | None:
    longest = c["max_position_embeddings"]
    # A length that stands alone counts before that of the object.
    said = c["original_max_position_embeddings"] or given.get("original_max_position_embeddings")
    make = _MAKERS[kind]
    return None if make is None else make(given, longest, said or longest)


def _linear(given: Mapping[str, Any], longest: int, original: int) -> spec.RotaryScaling:
    return spec.LinearScaling(factor=float(given["factor"]))


def _dynamic(given: Mapping[str, Any], longest: int, original: int) -> spec.RotaryScaling:
    return spec.DynamicScaling(factor=float(given["factor"]), original_length=longest)


def _band(given: Mapping[str, Any], longest: int, original: int) -> spec.RotaryScaling:
    return spec.BandScaling(
        factor=float(given["factor"]),
        low_frequency_factor=float(given["low_freq_factor"]),
        high_frequency_factor=float(given["high_freq_factor"]),
        original_length=original,
    )


def _yarn(given: Mapping[str, Any], longest: int, original: int) -> spec.RotaryScaling:
    factor = float(given["factor"])
    return spec.YarnScaling(
        factor=factor,
        original_length=original,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=given.get("truncate", True),
        magnitude=_yarn_magnitude(given, factor),
    )


def _long(given: Mapping[str, Any], longest: int, original: int) -> spec.RotaryScaling:
    return spec.LongRopeScaling(
        short_factor=tuple(map(float, given["short_factor"])),
        long_factor=tuple(map(float, given["long_factor"])),
        original_length=original,
        magnitude=_long_magnitude(given, longest, original),
    )


_MAKERS: dict[str, Callable[[Mapping[str, Any], int, int], spec.RotaryScaling] | None] = {
    "default": None,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _band,
    "yarn": _yarn,
    "longrope": _long,
}


def _yarn_magnitude(given: Mapping[str, Any], factor: float) -> float:
    """Source: arXiv 2309.00071, eq. 22; the two multipliers are those of arXiv 2412.19437's released code."""

    def grown(multiplier: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)


def _long_magnitude(given: Mapping[str, Any], longest: int, original: int) -> float:
    """Source: arXiv 2404.14219, the released code."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    factor = given.get("factor") or longest / original
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))


def written(position: spec.Rotary) -> dict[str, Any] | None:
    """Return the object that says a scaling; None where there is none."""
    match position.scaling:
        case spec.LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case spec.DynamicScaling(factor=factor):
            return {"rope_type": "dynamic", "factor": factor}
        case spec.BandScaling() as band:
            return {
                "rope_type": "llama3",
                "factor": band.factor,
                "low_freq_factor": band.low_frequency_factor,
                "high_freq_factor": band.high_frequency_factor,
                "original_max_position_embeddings": band.original_length,
            }
        case spec.YarnScaling() as yarn:
            return {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_length,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
                "attention_factor": yarn.magnitude,
            }
        case spec.LongRopeScaling() as long:
            return {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": list(long.short_factor),
                "long_factor": list(long.long_factor),
                "original_max_position_embeddings": long.original_length,
                "attention_factor": long.magnitude,
            }
    return None


def _length(position: spec.Rotary) -> int | None:
    """How long a sequence may be, where the scaling implies it."""
    match position.scaling:
        case spec.DynamicScaling(original_length=length):
            return length
        case (
            spec.BandScaling(factor=factor, original_length=length)
            | spec.YarnScaling(factor=factor, original_length=length)
        ):
            return max(int(factor * length), length + 1)
        case spec.LongRopeScaling(original_length=length):
            return 2 * length
    return None
