"""What would make a model faster on this machine, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from clearhead.apps.bench.limits import Limits
from clearhead.apps.bench.speed import Speed

# A gain that is worth a change.
_GAIN = 1.15
_CLOSE = 0.6


def advice(speeds: Sequence[Speed], limits: Limits, *, default: str, processors: int) -> str:
    """Return which precision is the fastest, where several were measured, and what gains most beside it.

    Args:
        speeds: at least one.
        limits: of the device.
        default: the precision that others are compared with, if it was measured.
        processors: that this process may use.
    """
    precisions = list(dict.fromkeys(speed.precision for speed in speeds))
    usual = default if default in precisions else precisions[0]
    found = [fastest_precision(speeds, usual)] if len(precisions) > 1 else []
    return "; ".join([*found, _other_gain([one for one in speeds if one.precision == usual], limits, processors)])


def fastest_precision(speeds: Sequence[Speed], usual: str) -> str:
    """Return which precision is the fastest at each work, and how much faster than the usual one.

    Args:
        speeds: of several precisions.
        usual: the one that others are compared with; as fast as it is not faster.
    """
    rates = {(speed.work, speed.batch, speed.context, speed.precision): speed.per_second for speed in speeds}
    gains: dict[str, dict[str, list[float]]] = {}
    for (work, batch, context, precision), rate in rates.items():
        # A context that takes long is left out in one precision and not in another.
        if (base := rates.get((work, batch, context, usual))) is not None:
            gains.setdefault(work, {}).setdefault(precision, []).append(rate / base)
    winners: dict[str, list[str]] = {}
    for work, ratios in gains.items():
        means = {precision: geometric_mean(values) for precision, values in ratios.items()}
        best = max(means, key=lambda precision: means[precision])
        if means[best] < _GAIN:
            winners.setdefault(usual, []).append(work)
        else:
            winners.setdefault(best, []).append(f"{work} ({means[best]:.1f} times {usual})")
    if list(winners) == [usual]:
        return f"{usual} is the fastest precision here"
    if len(winners) == 1:
        (best,) = winners
        return f"--precision {best} is the fastest here at {_listed(winners[best])}"
    listed = [f"{precision} at {_listed(works)}" for precision, works in winners.items()]
    return f"the fastest precision here is {', and '.join(listed)}"


def _listed(works: Sequence[str]) -> str:
    return ", ".join(works[:-1]) + (" and " if len(works) > 1 else "") + works[-1]


def _other_gain(speeds: Sequence[Speed], limits: Limits, processors: int) -> str:
    """Return what gains most at one precision."""
    single = [speed for speed in speeds if speed.batch == 1 and speed.work != "prompt"]
    usual = (single or speeds)[0]
    if limits.threads < processors:
        return f"{limits.threads} of {processors} processors work: try --threads {processors}"
    same = [speed for speed in speeds if (speed.work, speed.context) == (usual.work, usual.context)]
    batch = max(same, key=lambda speed: speed.per_second)
    if batch.batch > 1 and batch.per_second > _GAIN * usual.per_second:
        gain = batch.per_second / usual.per_second
        return f"{batch.batch} texts at a time give {gain:.1f} times the {usual.unit} per second of one at a time"
    if usual.share < _CLOSE:
        return (
            f"{usual.work} reaches {usual.share:.0%} of the machine's limit: the rest goes into starting many small "
            "operations, so a model with fewer and wider layers would be faster"
        )
    return "it is close to the machine's limit: only a smaller model, or weights of fewer bits, would be faster"
