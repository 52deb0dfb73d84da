"""Run a hand-written module with random weights in double precision, and restore its weights afterwards."""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.apps.check.handwritten.report import CannotCompare, NotSteady
from clearhead.base.tensors import relative_error

EXACT, ROUNDED, HALF_ROUNDED = 1e-9, 3e-5, 3e-2
# Prefixes of file names that are not the user's: libraries, this package, and code without a file.
_LIBRARIES = Path(__file__).parents[3], sysconfig.get_path("stdlib"), sysconfig.get_path("platlib")
_NOT_OF_USERS = "<", *(f"{folder}{os.sep}" for folder in _LIBRARIES)
_DROPOUTS = (
    torch.nn.functional.dropout, torch.dropout, torch.nn.functional.alpha_dropout, torch.nn.functional.dropout1d,
    torch.nn.functional.dropout2d, torch.nn.functional.feature_alpha_dropout,
)  # fmt: skip


def output_error(output: Tensor, expected: Tensor) -> float:
    """Return the relative error of an output where the expected values are finite; infinite for another shape.

    If no expected value is finite, the error is infinite if any output is finite.
    """
    is_finite = expected.isfinite()
    if output.shape != expected.shape or (not is_finite.any() and output.isfinite().any()):
        return math.inf
    return relative_error(output[is_finite], expected[is_finite])


class NoDropout(TorchFunctionMode):
    """Context manager in which functional dropout does nothing, so that other mistakes can be found."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip functional dropout, run fused attention without dropout, and run all other functions unchanged."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = args[:4]
        return func(*args, **kwargs)


class _OperationWatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_float32: bool = False
        self.num_operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for value in result if isinstance(result, tuple | list) else (result,):
            self.has_float32 |= isinstance(value, Tensor) and value.dtype in (
                torch.float32,
                torch.float16,
                torch.bfloat16,
            )
        return result


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def borrow_weights(
    owners: Sequence[nn.Module], tensors: Sequence[Tensor], dtype: torch.dtype, *, draw: bool = True
) -> Iterator[None]:
    """Context manager that sets weights to random values and modules to evaluation, and restores both.

    Args:
        owners: modules that own the weights and buffers.
        tensors: weights outside these modules.
        dtype: dtype of weights and floating-point buffers, which move to the CPU.
        draw: True draws random weights, so that a bias of zero or a weight of ones hides no mistake.
    """
    whole = nn.ModuleList(owners)
    weights = {id(weight): weight for weight in (*whole.parameters(), *tensors)}
    data = [(tensor, tensor.data, tensor.grad) for tensor in (*weights.values(), *whole.buffers())]
    modes = [(module, module.training, dict(module._buffers)) for owner in owners for module in owner.modules()]
    generator = torch.Generator().manual_seed(11)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _default_dtype(dtype):
            torch.manual_seed(5)
            for tensor in weights.values():
                tensor.grad = None
                tensor.data = _draw_weight(tensor, generator, dtype) if draw else tensor.data.to("cpu", dtype)
            for tensor in whole.buffers():
                tensor.data = tensor.data.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
            for module, *_ in modes:
                module.training = False
            yield
    finally:
        for tensor, before, grad in data:
            tensor.data = before
            tensor.grad = grad
        for module, training, buffers in modes:
            module.training = training
            module._buffers.update(buffers)


def _draw_weight(weight: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    if weight.dim() < 2:  # a bias, or the weight of a norm
        return (values * 0.5 + 1.0).to(dtype)
    return (values * 1.3 / math.sqrt(weight.shape[1])).to(dtype)


@dataclass
class CandidateRunner:
    """Runner of a hand-written module or function that records faults such as dropout in evaluation.

    Args:
        candidate: the module or function.
        owners: modules whose weights the candidate uses.
        weights: weights outside these modules.
        dtype: dtype of the weights during a run.
        bound: largest difference that counts as rounding.
        is_random: True if two runs on the same input differed.
        changes_weights: True if a run changed weights or buffers.
        error: error of the failed call that computed the most operations.
        num_before_error: number of operations before that error.
        watch: counter of the operations of the latest run.
        notes: notes for the report.
    """

    candidate: Callable[..., Any]
    owners: Sequence[nn.Module] = ()
    weights: Sequence[Tensor] = ()
    dtype: torch.dtype = torch.float64
    bound: float = EXACT
    is_random: bool = False
    changes_weights: bool = False
    error: Exception | None = None
    num_before_error: int = 0
    watch: _OperationWatch = field(default_factory=_OperationWatch)
    notes: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def borrow(self, dtype: torch.dtype | None = None, *, draw: bool = True) -> Iterator[None]:
        """Context manager that applies `borrow_weights` to the candidate's weights: random values if `draw`."""
        with borrow_weights(self.owners, self.weights, dtype or self.dtype, draw=draw):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the candidate twice and return the first output; if the two differ, run it again without dropout."""
        watch = self.watch = _OperationWatch()
        state = [tensor.detach().clone() for tensor in self._state()]
        with watch if self.dtype == torch.float64 else contextlib.nullcontext():
            first = self._run_once(args, kwargs)
            self._put_back(state)
            second = self._run_once(args, kwargs)
            if not _same(first, second):
                self.is_random = True
                with NoDropout():
                    first, second = self._run_once(args, kwargs), self._run_once(args, kwargs)
                if not _same(first, second):
                    raise NotSteady("two runs on the same input differ in evaluation, and not by dropout alone")
        if watch.has_float32:
            self.bound = max(self.bound, ROUNDED)
        self._put_back(state)
        return first

    def attempt(self, *args: Any, named: Mapping[str, Any] | None = None) -> Any:
        """Return the candidate's output; None if it fails. `error` keeps the error after the most operations."""
        try:
            return self(*args, **(named or {}))
        except (CannotCompare, NotImplementedError):
            raise
        except Exception as error:  # noqa: BLE001 user code may raise anything
            if self.error is None or self.watch.num_operations > self.num_before_error:
                self.error, self.num_before_error = error, self.watch.num_operations
            return None

    def _put_back(self, state: Sequence[Tensor]) -> None:
        """Restore weights and buffers that a run changed, and record the change."""
        for before, now in zip(state, self._state(), strict=False):
            if not _equal(before, now):
                self.changes_weights = True
                now.data = before.clone()

    def _state(self) -> list[Tensor]:
        tensors = [tensor for owner in self.owners for tensor in (*owner.parameters(), *owner.buffers())]
        return [*tensors, *self.weights]

    def _run_once(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.candidate(*map(_copy, args), **{name: _copy(value) for name, value in kwargs.items()})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())


def _same(first: Any, second: Any) -> bool:
    pairs = list(zip(tensors_of(first), tensors_of(second), strict=False))
    return all(
        output_error(tensor.nan_to_num(), other.nan_to_num()) < EXACT
        for tensor, other in pairs
        if tensor.is_floating_point()
    )


def tensors_of(result: Any) -> list[Tensor]:
    """Return all tensors in a result, such as a tuple or a dict, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [tensor for value in result.values() for tensor in tensors_of(value)]
    return [tensor for value in result for tensor in tensors_of(value)] if isinstance(result, tuple | list) else []


def describe_result(result: Any) -> str:
    """Describe the result of a call in words, for messages."""
    tensors = tensors_of(result)
    if not tensors:
        return f"{type(result).__name__}"
    return " and ".join(f"a tensor {list(tensor.shape)}" for tensor in tensors[:2])


def describe_call_error(function: Any, error: BaseException) -> str:
    """Return one line with the name of a called function (`forward` for a module) and the error that it raised."""
    name = "forward" if isinstance(function, nn.Module) else getattr(function, "__name__", "it")
    return f"{name} raised {describe_error(error)}"


def describe_error(error: BaseException) -> str:
    """Return an error in one line: its type, the user's line and expression that raised it, and its message."""
    message = " ".join(str(error).split())[:200]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_OF_USERS):
            line = linecache.getline(frame.filename, frame.lineno or 0).encode()
            end = frame.end_colno if frame.end_lineno == frame.lineno else None
            expression = line[frame.colno : end].decode("utf-8", "replace").strip()
            shown = "" if expression.startswith("raise ") else f"{expression}: "
            return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {shown}{message}"
    return f"{type(error).__name__}: {message}"
