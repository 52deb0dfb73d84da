"""A hand-written part run on drawn weights in double precision, left as it was, and watched while it runs."""

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
    """Return the relative error over the finite expected values; if none is finite, no output may be."""
    is_finite = expected.isfinite()
    if output.shape != expected.shape or (not is_finite.any() and output.isfinite().any()):
        return math.inf
    return relative_error(output[is_finite], expected[is_finite])


class NoDropout(TorchFunctionMode):
    """Dropout by a function does nothing while this is open, so that what remains can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the input of a dropout."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is torch.nn.functional.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0}
            args = args[:4]
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_float32: bool = False
        self.num_operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for one in result if isinstance(result, tuple | list) else (result,):
            self.has_float32 |= isinstance(one, Tensor) and one.dtype in (torch.float32, torch.float16, torch.bfloat16)
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
def borrowed(
    owners: Sequence[nn.Module], tensors: Sequence[Tensor], dtype: torch.dtype, *, draw: bool = True
) -> Iterator[None]:
    """Give weights other values, their type and evaluation mode while this is open.

    Args:
        owners: modules whose weights and buffers these are.
        tensors: further weights.
        dtype: of weights and floating-point buffers; on the CPU.
        draw: weights are drawn, so that a bias of zero or a weight of twos hides nothing.
    """
    whole = nn.ModuleList(owners)
    weights = {id(one): one for one in (*whole.parameters(), *tensors)}
    data = [(one, one.data, one.grad) for one in (*weights.values(), *whole.buffers())]
    modes = [(module, module.training, dict(module._buffers)) for owner in owners for module in owner.modules()]
    generator = torch.Generator().manual_seed(11)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _default_dtype(dtype):
            torch.manual_seed(5)
            for one in weights.values():
                one.grad = None
                one.data = _drawn(one, generator, dtype) if draw else one.data.to("cpu", dtype)
            for one in whole.buffers():
                one.data = one.data.to("cpu", dtype if one.is_floating_point() else one.dtype)
            for module, *_ in modes:
                module.training = False
            yield
    finally:
        for one, before, grad in data:
            one.data = before
            one.grad = grad
        for module, training, own in modes:
            module.training = training
            module._buffers.update(own)


def _drawn(weight: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    if weight.dim() < 2:  # a bias, or the weight of a norm
        return (values * 0.5 + 1.0).to(dtype)
    return (values * 1.3 / math.sqrt(weight.shape[1])).to(dtype)


@dataclass
class Runner:
    """Runs a part and notes what it should not do.

    Args:
        part: the module or function.
        owners: modules whose weights it uses.
        weights: further weights.
    """

    part: Callable[..., Any]
    owners: Sequence[nn.Module] = ()
    weights: Sequence[Tensor] = ()
    dtype: torch.dtype = torch.float64
    bound: float = EXACT
    is_random: bool = False
    changes_weights: bool = False
    error: Exception | None = None
    num_before_error: int = 0
    watch: _Operations = field(default_factory=_Operations)
    notes: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def borrow(self, dtype: torch.dtype | None = None, *, draw: bool = True) -> Iterator[None]:
        """Borrow the weights."""
        with borrowed(self.owners, self.weights, dtype or self.dtype, draw=draw):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part; where dropout or drawing makes two runs differ, dropout is switched off."""
        watch = self.watch = _Operations()
        kept = [one.detach().clone() for one in self._state()]
        with watch if self.dtype == torch.float64 else contextlib.nullcontext():
            first = self._once(args, kwargs)
            self._put_back(kept)
            second = self._once(args, kwargs)
            if not _same(first, second):
                self.is_random = True
                with NoDropout():
                    first, second = self._once(args, kwargs), self._once(args, kwargs)
                if not _same(first, second):
                    raise NotSteady("two runs on the same input differ in evaluation, and not by dropout alone")
        if watch.has_float32:
            self.bound = max(self.bound, ROUNDED)
        self._put_back(kept)
        return first

    def attempt(self, *args: Any, named: Mapping[str, Any] | None = None) -> Any:
        """Return the output, or None if the part raises an error; `error` keeps the error after most operations."""
        try:
            return self(*args, **(named or {}))
        except (CannotCompare, NotImplementedError):
            raise
        except Exception as error:  # noqa: BLE001 a stranger's code raises anything
            if self.error is None or self.watch.num_operations > self.num_before_error:
                self.error, self.num_before_error = error, self.watch.num_operations
            return None

    def _put_back(self, kept: Sequence[Tensor]) -> None:
        """Undo what a run did to the weights, and note it."""
        for before, now in zip(kept, self._state(), strict=False):
            if not _equal(before, now):
                self.changes_weights = True
                now.data = before.clone()

    def _state(self) -> list[Tensor]:
        own = [one for owner in self.owners for one in (*owner.parameters(), *owner.buffers())]
        return [*own, *self.weights]

    def _once(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.part(*map(_copied, args), **{name: _copied(value) for name, value in kwargs.items()})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())


def _same(first: Any, second: Any) -> bool:
    pairs = list(zip(tensors_of(first), tensors_of(second), strict=False))
    return all(
        output_error(one.nan_to_num(), other.nan_to_num()) < EXACT for one, other in pairs if one.is_floating_point()
    )


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors of what a part returns, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [one for value in result.values() for one in tensors_of(value)]
    return [one for value in result for one in tensors_of(value)] if isinstance(result, tuple | list) else []


def described(result: Any) -> str:
    """Return what a part returned, for a sentence."""
    found = tensors_of(result)
    if not found:
        return f"{type(result).__name__}"
    return " and ".join(f"a tensor {list(one.shape)}" for one in found[:2])


def raised(function: Any, error: BaseException) -> str:
    """Return one line with the name of a called function (`forward` for a module) and the error that it raised."""
    name = "forward" if isinstance(function, nn.Module) else getattr(function, "__name__", "it")
    return f"{name} raised {shown_error(error)}"


def shown_error(error: BaseException) -> str:
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
