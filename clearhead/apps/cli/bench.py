"""`clearhead bench`: measure the speed of a model on this machine, next to the limits of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.options import ComputeOptions, Json, Ref, locate_model, takes_compute_options
from clearhead.base.errors import InputError, LackOfMemory
from clearhead.base.printing import human_bytes, human_count

if TYPE_CHECKING:
    import torch

    from clearhead.apps.bench.limits import Limits, Precision
    from clearhead.apps.bench.speed import Speed

_COLUMNS = ("work", "precision", "batch", "context", "per second", "limit", "share", "p50", "p95")


@takes_compute_options
def bench(ref: Ref, as_json: Json = False, *, compute: ComputeOptions) -> None:
    """Measure the speed of a model on this machine.

    \b
    Example:
      clearhead bench runs/stories
      clearhead bench path/to/checkpoint --threads 2 --batch-size 32 --json

    A decoder reads prompts and generates text after 32, 500, 2,000 and 8,000 tokens, up to its maximum length. An
    encoder-decoder translates greedily and by beam search. An encoder does its task. The limit is the fastest speed
    that the machine allows. Generation is limited by reading the weights and the KV cache from memory once per step.
    Prompts and sentences are limited by the matrix products. Both limits are measured first, with the same threads: on
    a buffer of 512 MB and on matrices of 2,048 x 2,048 numbers. Each figure is the median of five runs, or of fewer if
    all would take more than half a minute. Contexts that would take seconds are left out and named. Without
    --precision, every precision in which this machine multiplies fast is measured; those left out have a line with the
    reason. Option --batch-size sets the larger batch, by default 16 rows. The columns p50 and p95 are the median and
    the 95th percentile of the time for one token. With --json, the last line is
    {"device", "limits", "peak_memory", "speeds", "advice"}.
    """
    ref = locate_model(ref)
    import torch

    from clearhead.apps.bench.limits import measure_limits
    from clearhead.apps.bench.speed import SECONDS, Effort, advice, measure
    from clearhead.base.machine import choose_device, choose_precision
    from clearhead.training.memory import peak_memory

    device, processors = choose_device(compute.device), torch.get_num_threads()
    precisions = _choose_precisions(compute.precision, device)
    batch, share = compute.batch_size or Effort.batch, SECONDS / len(precisions)
    effort = Effort(batch=batch, seconds=share, seed=compute.seed or 0)
    limits: Limits | None = None
    speeds: list[Speed] = []
    for precision in precisions:
        try:
            model = replace(compute, precision=precision).load_model(ref)
        except InputError as error:
            # Some models have too few matrices for 4 bits.
            if len(precisions) == 1 or not (isinstance(error, LackOfMemory) or precision == "int4"):
                raise
            print_message(f"{precision} is left out: {error}")
            continue
        if limits is None:
            print_message("measuring the machine")
            limits = measure_limits(device, precisions)
        print_message(f"measuring the model in {precision}")
        speeds += measure(model, precision, limits, effort)
        del model  # frees its memory before the next precision is loaded
    if limits is None:
        raise LackOfMemory(f"{ref} does not fit into the free memory in {' or '.join(precisions)}: free some memory")
    default = choose_precision("auto", device)
    record = {
        "device": str(device),
        "limits": asdict(limits),
        "peak_memory": peak_memory(device),
        "speeds": [asdict(speed) | {"share": speed.share} for speed in speeds],
        "advice": advice(speeds, limits, default=default, processors=processors),
    }
    lines = [*_machine_lines(limits, peak_memory(device)), "", *_table(speeds), "", f"{record['advice']}."]
    print_either(as_json, record, *lines)


def _choose_precisions(precision: str, device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions to measure: for "auto" all that are fast here, and print the reason for those left out."""
    from clearhead.apps.bench.limits import fast_precisions
    from clearhead.base.machine import choose_precision

    if precision in ("int8", "int4"):
        return (cast("Precision", precision),)
    if precision != "auto":
        return (choose_precision(precision, device),)
    precisions = fast_precisions(device)
    if "int4" not in precisions:
        reason = "there are no compiled kernels" if device.type == "cpu" else f"they need a CPU, not {device.type}"
        print_message(f"int8 and int4 are left out: {reason}")
    return precisions


def _machine_lines(limits: Limits, peak: int) -> Iterator[str]:
    flops = ", ".join(f"{value / 1e9:,.0f} GFLOP/s in {name}" for name, value in limits.flops.items())
    many = "s" * (limits.threads > 1)
    yield f"machine     {limits.threads} thread{many}: {human_bytes(limits.bytes_per_second)}/s read, {flops}"
    yield f"memory      {human_bytes(peak)} peak of the whole process"


def _table(speeds: Sequence[Speed]) -> Iterator[str]:
    rows = [_COLUMNS, *map(_cells, speeds)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        first, *others = (f"{cell:{'<' if column < 2 else '>'}{widths[column]}}" for column, cell in enumerate(row))
        yield "  ".join([first, *others]).rstrip()


def _cells(speed: Speed) -> tuple[str, ...]:
    times = ("" if value is None else f"{1000 * value:.3g} ms" for value in (speed.p50, speed.p95))
    rate = f"{human_count(speed.per_second)} {speed.unit}"
    return (
        speed.work,
        speed.precision,
        str(speed.batch),
        f"{speed.context:,}",
        rate,
        human_count(speed.limit),
        f"{speed.share:.0%}",
        *times,
    )
