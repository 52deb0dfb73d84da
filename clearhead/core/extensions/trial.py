"""Trial calls of custom modules on few tokens, before a training or another command begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.core.extensions.cost import context_for, sample_input
from clearhead.spec.registry import PartKind, Role, build_part, kind_of

BATCH, TOKENS, MEMORY_TOKENS = 2, 5, 3
_SEEDS = (1, 2)


def try_parts(model: spec.Model) -> None:
    """Build and call each custom module of a model on few tokens, to report its faults early.

    Raises:
        InputError: a module cannot be built or called, returns a wrong shape, or draws random numbers that would make
            a resumed run inexact.
    """
    nodes = list(spec.own_parts(model))
    if not nodes:
        return
    with _preserve_random_state():
        with _explain_errors(
            "a model that contains it cannot be built", " and ".join({kind_of(node).name for _, node in nodes})
        ):
            module = build(model, device="meta")
        sizes = {(node, int(module.get_submodule(path).built_size)): path for path, node in nodes}  # type: ignore[arg-type]
        memory_width = model.encoder.width if model.encoder else None
        for (node, size), path in sizes.items():
            memory = None
            if memory_width is not None and path.startswith("decoder"):
                memory = sample_input("function", memory_width, MEMORY_TOKENS, batch=BATCH)
            _try_part(kind_of(node), node, size, memory)


def _try_part(kind: PartKind, node: spec.Part, size: int, memory: Tensor | None) -> None:
    with _explain_errors("it cannot be built", kind.name, f" for the size {size}"):
        module: nn.Module = build_part(node, size)
    x = sample_input(kind.role, size, TOKENS, batch=BATCH)
    arguments = f" for x {list(x.shape)}"

    def call() -> Any:
        with _explain_errors("its forward fails", kind.name, arguments), torch.no_grad():
            return module(x.clone(), *_other_arguments(kind.role, x, memory))

    module.eval()
    _refuse_other_shape(kind, x, call(), size)
    before = _states()
    same = _same(call(), call())
    if _states() != before or not same:
        raise InputError(
            f"the module '{kind.name}' draws random numbers in evaluation, or its result depends on earlier calls: "
            "use nn.Dropout, and keep no state"
        )
    module.train()
    if not _same(*_call_seeded(call)):
        raise InputError(
            f"the module '{kind.name}' draws its own random numbers in training, so a resumed run would not be exact: "
            "use nn.Dropout or torch's global generator"
        )


def _other_arguments(role: Role, x: Tensor, memory: Tensor | None) -> tuple[object, ...]:
    if role in ("norm", "position"):
        return (TOKENS,) if role == "position" else ()
    return (context_for(x, TOKENS, memory),)


def _refuse_other_shape(kind: PartKind, x: Tensor, y: object, size: int) -> None:
    expected = [*x.shape, size] if kind.role == "position" else list(x.shape)
    if not isinstance(y, Tensor) or list(y.shape) != expected or not y.is_floating_point():
        returned = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise InputError(
            f"the module '{kind.name}' returns {returned} for x {list(x.shape)}; as {_STANDS[kind.role]} it must "
            f"return a tensor of floats of the shape {expected}"
        )


_STANDS = {
    "function": "the function of a branch",
    "norm": "a norm",
    "position": "the positions of an embedding",
    "scores": "the score step of an attention",
    "weights": "the weight step of an attention",
}


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _call_seeded(call: Callable[[], Tensor]) -> Iterator[Tensor]:
    """Yield the results of two calls, each with the same seeds of torch, random and numpy."""
    for _ in _SEEDS:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        yield call()


def _states() -> tuple[object, ...]:
    numpy = np.random.get_state(legacy=False)
    # Python's generator is left out: runtime type checks draw from it.
    return bytes(torch.get_rng_state().numpy()), repr(numpy)


@contextmanager
def _preserve_random_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _explain_errors(what: str, name: str, where: str = "") -> Iterator[None]:
    """Context manager that converts errors of a custom module to `InputError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise InputError(f"the module '{name}': {what}{where} ({type(error).__name__}: {reason})") from error
