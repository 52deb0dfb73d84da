"""Check a device before its first use: compare its results with those of the CPU in double precision.

The cache folder keeps the verdict under the facts that it depends on: device, driver, PyTorch and this check.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.tensors import relative_error
from clearhead.fast import device_cases
from clearhead.fast.device_cases import CASES, FUSED, KINDS, DeviceCase, Inputs, draw_inputs, layout, visible_keys
from clearhead.fast.native.build import Verdict, recall_verdict

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
USED: Final = ("fp32", "bf16")
"""Precisions in which models run."""
BOUNDS: Final = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Largest relative error, compared with double precision, that counts as rounding."""
_NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")
_NO_FAULTS: Final = "[]"
_Pairs = list[tuple[Inputs, Tensor]]
_LOGGER: Final = logging.getLogger("clearhead.fast.device_check")


@dataclass(frozen=True)
class Result:
    """Result of one test case on a device: its error and its fault, if any.

    Attributes:
        operation: name of the operation, a key of `DeviceComputation.operations`.
        precision: name of the precision, a key of `DTYPES`.
        case: description of the case.
        report: public report that the case comes from.
        error: largest relative error. None means that the device returned NaN or infinity, or raised an error.
        symptom: description of the fault, as the end of a sentence; empty if there is none.
    """

    operation: str
    precision: str
    case: str
    report: str
    error: float | None
    symptom: str = ""

    def __str__(self) -> str:
        return f"{self.operation} in {self.precision} ({self.case}) {self.symptom}, as in {self.report}"


def check_device(device: torch.device, precisions: Sequence[str]) -> list[Result]:
    """Compute every test case twice on a device, and compare the results with the CPU in double precision.

    Args:
        device: the device.
        precisions: keys of `DTYPES`.
    """
    with torch.inference_mode():
        return [result for precision in precisions for case in CASES for result in _check_case(case, device, precision)]


def find_faults(results: Sequence[Result]) -> list[Result]:
    """Return the worst wrong result for each operation and precision."""
    worst = dict[tuple[str, str], Result]()
    for result in sorted(results, key=lambda result: math.inf if result.error is None else result.error):
        if result.symptom:
            worst[result.operation, result.precision] = result
    return list(worst.values())


def largest_errors(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """Return the largest error by operation and precision; None marks a result that is not a number."""
    table = dict[str, dict[str, float | None]]()
    for result in results:
        row, error = table.setdefault(result.operation, {}), result.error
        known = row.get(result.precision, 0.0)
        row[result.precision] = None if known is None or error is None else max(known, error)
    return table


def advise(faults: Sequence[Result]) -> str:
    """Return advice about the faults of a device, or the workaround that clearhead uses."""
    operations = {fault.operation for fault in faults if fault.precision in USED}
    if not operations:
        return "models never use that precision"
    if operations == {FUSED}:
        return "attention uses the eager kernel there; another version of PyTorch may be correct and faster"
    return "use another device, or another version of PyTorch or of the driver"


def _check_case(case: DeviceCase, device: torch.device, precision: str) -> Iterator[Result]:
    *_, reference = KINDS[case.kind].operations.values()
    pairs = []
    for is_pointed in (False, True):
        inputs = tuple(_round(x, DTYPES[precision]) for x in draw_inputs(case, is_pointed))
        exact = reference(case, tuple(x.double() if x.is_floating_point() else x for x in inputs))
        pairs.append((inputs, _round(exact, DTYPES[precision])))
    for operation, compute in KINDS[case.kind].operations.items():
        record = partial(Result, operation, precision, str(case), case.report)
        try:
            error, symptom = _judge(case, partial(compute, case), device, pairs, BOUNDS[precision])
        except torch.OutOfMemoryError:
            raise  # lack of memory is no fault of the device
        except (RuntimeError, TypeError) as failure:
            yield record(None, f"raises {type(failure).__name__}")
        else:
            yield record(error, symptom)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _judge(
    case: DeviceCase, compute: Callable[[Inputs], Tensor], device: torch.device, pairs: _Pairs, bound: float
) -> tuple[float | None, str]:
    """Return the largest error of a test case (None if not a number) and a description of its fault (or "")."""

    def run(inputs: Inputs) -> Tensor:
        return compute(tuple(layout(x, case.is_view and x.ndim > 1, device) for x in inputs)).cpu()

    # Two runs in a row: some devices are wrong on every second call.
    outputs = [(run(inputs), expected) for inputs, expected in pairs for _ in range(2)]
    errors = [_output_error(output, expected) for output, expected in outputs]
    error = max(errors)
    if error == math.inf:
        return None, "is not a number"
    if not error <= bound:
        often = "" if min(errors[:2]) > bound or max(errors[:2]) <= bound else ", though not on every call"
        return error, f"is off by {error:.1g}, but rounding explains at most {bound:g}{often}"
    mask = visible_keys(case)
    if case.kind == "attention" and mask is not None:
        query, *keys_and_values = (x.clone() for x in pairs[0][0])
        for x in keys_and_values:
            x[:, :, -1] *= -2.0
        first = outputs[0][0]
        hidden = ~mask[..., -1].expand(first.shape[:-1])
        if not torch.equal(first[hidden], run((query, *keys_and_values))[hidden]):
            return error, "changes with a hidden key"
    return error, ""


def _output_error(output: Tensor, expected: Tensor) -> float:
    """Return the relative error of an output; ids must be equal."""
    return relative_error(output, expected) if expected.is_floating_point() else float(not output.equal(expected))


def find_eager_reason(device: torch.device, precision: str) -> str:
    """Refuse a device that computes wrong; return the reason if its attention needs the eager kernel.

    Args:
        device: the device.
        precision: precision of the computation, "fp32" or "bf16".

    Returns:
        The reason for the eager kernel; empty if the fused kernel may be used.

    Raises:
        InputError: an operation is wrong for which no replacement exists.
    """
    verdicts = [_recall_verdict(device, each) for each in dict.fromkeys(("fp32", precision))]
    faults = [Result(**fault) for verdict in verdicts for fault in json.loads(verdict.text)]
    # The worst fault first: one without a replacement.
    faults.sort(key=lambda fault: fault.operation == FUSED)
    if not faults:
        return ""
    files = " and ".join(str(verdict.file) for verdict in verdicts if verdict.file and verdict.text != _NO_FAULTS)
    again = f"to check again, {f'delete {files}' if files else 'start a new process'}"
    sentence = f"{device} ({device_name(device)}) computes wrong: {faults[0]}; {advise(faults)}; {again}"
    if faults[0].operation != FUSED:
        raise InputError(sentence)
    _LOGGER.warning("%s", sentence)
    return f"the fused kernel is wrong on {device}"


def _recall_verdict(device: torch.device, precision: str) -> Verdict:
    """Return the faults of a device as JSON from the cache folder; without such a folder, check once per process."""
    sources = (Path(file).read_bytes() for file in (__file__, device_cases.__file__))
    facts = repr((*_describe(device), precision)).encode()
    try:
        return recall_verdict([facts, *sources], partial(_find_faults_as_json, device, precision))
    except OSError:
        return Verdict(_check_once(device, precision), None)


def _find_faults_as_json(device: torch.device, precision: str) -> str:
    return json.dumps([asdict(fault) for fault in find_faults(check_device(device, (precision,)))])


_check_once: Final = cache(_find_faults_as_json)


def device_name(device: torch.device) -> str:
    """Return the name of a device as reported by its driver, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _describe(device: torch.device) -> tuple[str, ...]:
    """Return the facts on which a device's results depend, such as its driver, as the key of the cached verdict."""
    # Each GPU is checked by itself: one of several equal GPUs may be broken.
    serial = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else ""
    driver = _NVIDIA_DRIVER.read_text("utf-8") if _NVIDIA_DRIVER.exists() else ""
    return device.type, device_name(device), f"{serial}", driver, platform.platform(), torch.__version__
