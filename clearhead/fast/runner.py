"""`Runner`: gives each request the tree that computes it fastest, and says which parts kernels serve.

A tree is made once for the weights that a model has, and never changed; threads share it. What a call writes (caches,
buffers of kernels) belongs to the call.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.base.hooks import HookPoints, are_seen
from clearhead.core import Transformer
from clearhead.core.head import Linear as HeadLinear
from clearhead.core.stack import Stack
from clearhead.fast.linear import LinearFunction, ServedLinear, float_linear, int4_linear, int8_linear, mixed_linear
from clearhead.fast.native.load import KERNELS, library, uses_kernels
from clearhead.fast.probe import has_exact_int_mm, has_fast_bf16
from clearhead.fast.replica import override, replica
from clearhead.fast.stack import NotServed, PlannedStack, StackPlan, is_altered
from clearhead.fast.stored import INT4, INT8, LEAST_WEIGHTS, Stored, stored_matrices

_LOGGER = logging.getLogger("clearhead.fast.native")


@dataclass(frozen=True)
class ModuleBackend:
    """What runs a part of a model.

    Args:
        address: of a stack, of a linear layer outside of the stacks that are served, or "" for the whole model.
        by: "kernels" or "plain".
        why: the kind of its weights ("float32", "int8", "int4", "mixed" for products in bf16); or why kernels do not.
    """

    address: str
    backend: str
    detail: str


class ModelFingerprint:
    """All that the parts of a model hold, by identity, and the places and versions of its weights.

    While it is the same, so is the state of the model, which takes several times as long to find.
    """

    def __init__(self, module: nn.Module) -> None:
        self.submodules: list[nn.Module] = list(module.modules())
        self._seen = self._look()

    def is_same(self) -> bool:
        """Return whether nothing has changed since it was taken."""
        (objects, numbers), (objects_then, numbers_then) = self._look(), self._seen
        return numbers == numbers_then and len(objects) == len(objects_then) and all(map(is_, objects, objects_then))

    def _look(self) -> tuple[list[object], list[int]]:
        objects: list[object] = []
        weights: list[Tensor | None] = []
        for submodule in self.submodules:
            weights += (*submodule._parameters.values(), *submodule._buffers.values())
            objects += (*vars(submodule).values(), *submodule._modules.values())
        present = [weight for weight in weights if weight is not None]
        return objects + weights, [number for weight in present for number in _address_and_version(weight)]


@dataclass(frozen=True)
class _ServedTree:
    state: tuple[int | float, ...]  # of the model that it was made for
    module: Transformer
    report: tuple[ModuleBackend, ...]
    fingerprint: ModelFingerprint


class Runner:
    """The trees of one model.

    Args:
        module: the plain tree, which is not changed.
        in_bf16: multiply in bf16 where weights are fp32, beside rounded copies of them; all else stays in fp32.
    """

    def __init__(self, module: Transformer, *, in_bf16: bool = False) -> None:
        self.module: Transformer = module
        self.in_bf16: bool = in_bf16
        self._lock = threading.Lock()
        self._tree: _ServedTree | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        return Runner(copy.deepcopy(self.module, memo), in_bf16=self.in_bf16)

    def __reduce__(self) -> tuple[Callable[..., Runner], tuple[Transformer, bool]]:
        return _rebuild_runner, (self.module, self.in_bf16)

    @cached_property
    def exact(self) -> Runner:
        """A runner that multiplies in the precision of the weights: for numbers that depend on no processor."""
        return Runner(self.module) if self.in_bf16 else self

    def tree(self) -> Transformer:
        """Return the tree for one request, in evaluation mode.

        Its results are those of the plain tree up to the order of sums; with weights in 8 bits, up to rounding the
        inputs of products to 8 bits as well, and with products in bf16, up to rounding inputs and weights to bf16.
        Where the calling context watches or edits activations, it is a plain replica with the hooks of the model.
        Weights must not be moved while a request runs; a model that has changed has another tree.
        """
        known = self._tree
        if known is not None and not known.fingerprint.is_same():
            known = None
        submodules = list(self.module.modules()) if known is None else known.fingerprint.submodules
        if not uses_kernels() or are_seen(submodules):
            return replica(self.module)
        return (known or self._find_tree()).module

    def report(self) -> list[ModuleBackend]:
        """Return what runs each stack, and each linear layer outside of the stacks that kernels run."""
        if not uses_kernels():
            return [ModuleBackend("", "plain", f"{KERNELS}=plain")]
        return list(self._find_tree().report)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether what a request gets depends, to the last bit, on that request alone and not on those beside it.

        It does where kernels serve the whole model with weights in 4 or 8 bits or in fp32, for one number of threads.
        Products in bf16 are added in another order for few rows than for many.
        """
        return all(
            entry.backend == "kernels" and entry.detail in ("int4", "int8", "float32") for entry in self.report()
        )

    def _find_tree(self) -> _ServedTree:
        fingerprint = ModelFingerprint(self.module)
        state = tuple(number for submodule in fingerprint.submodules for number in _state(submodule))
        with self._lock:
            known = self._tree
            if known is None or known.state != state:
                self._tree = _ServedTree(state, *_build_tree(self.module, in_bf16=self.in_bf16), fingerprint)
            else:
                self._tree = replace(known, fingerprint=fingerprint)
            return self._tree


def _rebuild_runner(module: Transformer, in_bf16: bool) -> Runner:
    return Runner(module, in_bf16=in_bf16)


def multiplies_in_bf16(module: nn.Module) -> bool:
    """Return whether products in bf16 are faster for an fp32 model on this processor, or its matrices have 16 bits."""
    formats = set(stored_matrices(module).values())
    if formats:
        return any(kind.is_exact for kind in formats)
    submodules = list(module.modules())
    weights = [submodule.weight for submodule in submodules if isinstance(submodule, nn.Linear)]
    weights += [submodule.projection.weight_VD for submodule in submodules if isinstance(submodule, HeadLinear)]
    is_large = sum(weight.numel() for weight in weights) >= LEAST_WEIGHTS
    is_fit = is_large and all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return is_fit and has_fast_bf16(torch.device("cpu"))


def warn_of_slow_products(module: nn.Module) -> None:
    """Say in one sentence that stored matrices are multiplied slowly on this processor, and what is faster."""
    kinds = set(stored_matrices(module).values())
    # Kernels may have to be compiled for the question, so it is asked for these weights alone.
    if not kinds.isdisjoint((INT4, INT8)) and uses_kernels() and library() is None:
        if INT4 in kinds:
            _LOGGER.warning(
                "weights in 4 bits are turned into fp32 when they are first used, whose memory and time they then "
                "take: there are no compiled kernels"
            )
        elif INT8 in kinds and not has_exact_int_mm():
            _LOGGER.warning(
                "weights in 8 bits are turned into fp32 when they are first used, whose memory and time they then "
                "take: there are no compiled kernels, and this processor has no AVX-512 VNNI for PyTorch"
            )
    if any(kind.is_exact for kind in kinds) and not has_fast_bf16(torch.device("cpu")):
        _LOGGER.warning(
            "the weights stay in the 16 bits of the checkpoint, and this processor multiplies bf16 slowly: the "
            "precision int8 is faster; so is fp32, which takes twice the memory"
        )


def _build_tree(module: Transformer, *, in_bf16: bool) -> tuple[Transformer, tuple[ModuleBackend, ...]]:
    tree, report = replica(module), []
    for submodule in tree.modules():
        if isinstance(submodule, HookPoints):
            submodule.identity = object()  # a block of `capture` that opens meanwhile is not for this tree
    plans = {stack: _plan(stack, in_bf16) for stack in tree.modules() if isinstance(stack, Stack)}
    planned_modules = {
        inner for stack, plan in plans.items() if isinstance(plan, StackPlan) for inner in stack.layers.modules()
    }
    for address, submodule in list(tree.named_modules()):
        if isinstance(submodule, Stack):
            plan = plans[submodule]
            if isinstance(plan, StackPlan):
                override(submodule, PlannedStack).plan = plan
            report.append(_backend_of(address, plan.kind if isinstance(plan, StackPlan) else None, str(plan)))
        product = _product(submodule, in_bf16=in_bf16)
        if product is not None:
            override(submodule, ServedLinear).product = product
        if isinstance(submodule, nn.Linear | HeadLinear) and submodule not in planned_modules:
            kind = _kind(submodule, in_bf16) if product is not None else None
            report.append(_backend_of(address, kind, "the kernels do not have it"))
    return tree, tuple(report)


def _plan(stack: Stack, in_bf16: bool) -> StackPlan | NotServed:
    try:
        return StackPlan(stack, in_bf16=in_bf16)
    except NotServed as reason:
        return reason


def _backend_of(address: str, kind: str | None, reason: str) -> ModuleBackend:
    return ModuleBackend(address, "plain", reason) if kind is None else ModuleBackend(address, "kernels", kind)


def _state(module: nn.Module) -> Iterator[int | float]:
    """Yield numbers that change where a part, its settings, what it computes by, its children or a weight does."""
    yield id(module)
    for name, value in vars(module).items():
        if type(value) in (int, float) or name == "forward":
            yield value if isinstance(value, int | float) else id(value)
    for weight in (*module._parameters.values(), *module._buffers.values()):
        if weight is not None:
            yield id(weight)
            yield from _address_and_version(weight)


def _address_and_version(weight: Tensor) -> tuple[int, int]:
    """Return where a weight lies, and how often it was written to; one that is spread over processes has no address."""
    data_address = 0 if hasattr(weight, "placements") else weight.data_ptr()
    return data_address, 0 if weight.is_inference() else weight._version


def _product(module: nn.Module, *, in_bf16: bool) -> LinearFunction | None:
    if is_altered(module):
        return None
    if isinstance(module, HeadLinear):
        run = _product_of(_holder(module), module.bias, in_bf16)
        return run if run is None or module.scale == 1.0 else _scaling_product(run, module.scale)
    if type(module) is nn.Linear or (isinstance(module, nn.Linear) and isinstance(module, Stored)):
        return _product_of(module, module.bias, in_bf16)
    return None


def _product_of(holder: nn.Module, bias: Tensor | None, in_bf16: bool) -> LinearFunction | None:
    """Return the product with the matrix of a module; None where no kernels serve it."""
    if isinstance(holder, Stored) and holder.format == INT8:
        matrix, scale = holder.entries()
        return int8_linear(matrix, scale, bias)
    if isinstance(holder, Stored) and holder.format == INT4:
        nibbles, scales = holder.entries()
        return int4_linear(nibbles, scales, bias)
    if isinstance(holder, Stored) and in_bf16:
        return mixed_linear(holder.entries()[0].detach().bfloat16(), bias)
    if isinstance(holder, Stored):
        return _widening_product(holder, bias)
    weight = holder.weight
    assert isinstance(weight, Tensor)
    return mixed_linear(weight.detach().bfloat16().contiguous(), bias) if in_bf16 else float_linear(weight, bias)


def _widening_product(holder: Stored, bias: Tensor | None) -> LinearFunction:
    """Return a product in fp32 that widens the matrix for each call."""

    def run(x: Tensor) -> Tensor:
        weight = holder.weight
        product = float_linear(weight, bias)
        return F.linear(x, weight, bias) if product is None else product(x)

    return run


def _kind(module: nn.Module, in_bf16: bool) -> str:
    holder = _holder(module) if isinstance(module, HeadLinear) else module
    if isinstance(holder, Stored) and not holder.format.is_exact:
        return holder.format.name
    if isinstance(holder, Stored):
        return "mixed" if in_bf16 else "float32"
    weight: Tensor = holder.weight  # type: ignore[assignment]
    return "mixed" if in_bf16 or weight.dtype == torch.bfloat16 else "float32"


def _holder(head: nn.Module) -> nn.Module:
    """Return the module whose matrix a head multiplies with: its own, or an embedding that it is tied to."""
    if isinstance(head, Stored):  # its weight would be widened for the question
        return head
    assert isinstance(head, HeadLinear)
    return head if head.weight is not None else head.tied.module


def _scaling_product(run: LinearFunction, scale: float) -> LinearFunction:
    return lambda x: run(x * scale)
