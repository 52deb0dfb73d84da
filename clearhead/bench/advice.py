"""One sentence on what would make a model faster on this machine, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.bench.limits import Limits
from clearhead.bench.speed import Speed

# A gain that is worth a change.
_GAIN = 1.15
_CLOSE = 0.6


def advice(speeds: Sequence[Speed], limits: Limits, *, default: str, processors: int) -> str:
    """Return what gains most, of what was measured or is known.

    Args:
        speeds: at least one.
        limits: of the device.
        default: the precision that a model is loaded in where none is asked for.
        processors: that this process may use.
    """
    first = [speed for speed in speeds if (speed.work, speed.context) == (speeds[0].work, speeds[0].context)]
    single = [speed for speed in speeds if speed.batch == 1 and speed.work != "prompt"]
    usual = next((speed for speed in single if speed.precision == default), (single or first)[0])
    same = [speed for speed in speeds if (speed.work, speed.context) == (usual.work, usual.context)]
    other = max((speed for speed in same if speed.batch == 1), key=lambda speed: speed.per_second)
    if other.precision != default and other.per_second > _GAIN * usual.per_second:
        gain = other.per_second / usual.per_second
        return f"--precision {other.precision} is {gain:.1f} times as fast here as {default}, which is the default"
    if limits.threads < processors:
        return f"{limits.threads} of {processors} processors work: try --threads {processors}"
    batch = max((speed for speed in same if speed.precision == usual.precision), key=lambda speed: speed.per_second)
    if batch.batch > 1 and batch.per_second > _GAIN * usual.per_second:
        gain = batch.per_second / usual.per_second
        return f"{batch.batch} texts at a time give {gain:.1f} times the {usual.unit} per second of one at a time"
    if usual.share < _CLOSE:
        return (
            f"{usual.work} reaches {usual.share:.0%} of the machine's limit: the rest goes into starting many small "
            "operations, so a model with fewer and wider layers would be faster"
        )
    return "it is close to the machine's limit: only a smaller model, or weights of fewer bits, would be faster"
