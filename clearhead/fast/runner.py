"""`Runner`: chooses the fastest module tree for each request, and reports which modules kernels serve.

A tree is built once for the current weights of a model and never changed; threads share it. Caches and kernel buffers,
which a call writes, belong to the call.
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
from clearhead.base.mapped_files import refuse_altered_weights
from clearhead.core import Transformer
from clearhead.core.head import Linear as HeadLinear
from clearhead.core.stack import Stack
from clearhead.fast import huge_pages
from clearhead.fast.linear import LinearFunction, ServedLinear, float_linear, int4_linear, int8_linear, mixed_linear
from clearhead.fast.native.load import KERNELS, library, uses_kernels
from clearhead.fast.probe import has_exact_int_mm, has_fast_bf16
from clearhead.fast.replica import override, replica
from clearhead.fast.stack import NotServed, PlannedStack, StackPlan, is_altered
from clearhead.fast.stored import INT4, INT8, LEAST_WEIGHTS, Stored, in_16_bits, stored_matrices

_LOGGER = logging.getLogger("clearhead.fast.native")


@dataclass(frozen=True)
class ModuleBackend:
    """Backend of one module: compiled kernels or plain PyTorch.

    Args:
        address: address of a stack, or of a linear layer outside of the stacks that kernels compute; "" means the whole
            model.
        backend: "kernels" or "plain".
        detail: the kind of weights that kernels multiply ("float32", "int8", "int4", "mixed" for products in bf16), or
            the reason for plain PyTorch.
    """

    address: str
    backend: str
    detail: str


class ModelFingerprint:
    """A cheap fingerprint of a model: object identities, addresses and versions of its weights.

    While it is unchanged, so is the model's state, which takes several times as long to compute.
    """

    def __init__(self, module: nn.Module) -> None:
        self.submodules: list[nn.Module] = list(module.modules())
        self._seen = self._look()

    def is_same(self) -> bool:
        """Return whether the model has not changed since the fingerprint was taken."""
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
    state: tuple[int | float, ...]  # state of the model when the tree was built
    module: Transformer
    report: tuple[ModuleBackend, ...]
    fingerprint: ModelFingerprint


class Runner:
    """Builds and caches the fast module tree of one model.

    Args:
        module: the plain module tree, which stays unchanged.
        in_bf16: True multiplies fp32 weights in bf16, with rounded copies; everything else stays in fp32.
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
        """A runner that multiplies in the precision of the weights, so that results do not depend on the processor."""
        return Runner(self.module) if self.in_bf16 else self

    def tree(self) -> Transformer:
        """Return the module tree for one request, in evaluation mode.

        Results equal those of the plain tree up to the order of sums. With 8-bit weights, the
        inputs of products are also rounded to 8 bits. With products in bf16, inputs and weights are rounded to bf16.

        If the calling context watches or edits activations, the tree is a plain replica with the hooks of the model.
        Weights must not be moved while a request runs; after a change, the model gets another tree.

        Raises:
            InputError: a mapped file with the weights was changed on disk.
        """
        refuse_altered_weights(self.module)
        known = self._tree
        if known is not None and not known.fingerprint.is_same():
            known = None
        submodules = list(self.module.modules()) if known is None else known.fingerprint.submodules
        if not uses_kernels() or are_seen(submodules):
            return replica(self.module)
        return (known or self._find_tree()).module

    def report(self) -> list[ModuleBackend]:
        """Return the backend of each stack, and of each linear layer outside of the stacks that kernels serve."""
        if not uses_kernels():
            return [ModuleBackend("", "plain", f"{KERNELS}=plain")]
        return list(self._find_tree().report)

    @property
    def is_batch_invariant(self) -> bool:
        """True if the result of a request is independent of other requests in its batch, bit for bit.

        This holds if kernels serve the whole model with weights in 4 or 8 bits or in fp32, for a fixed number of
        threads. Products in bf16 are added in another order for few rows than for many.
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
    """Return whether to multiply in bf16: it is faster for an fp32 model here, or the model's matrices have 16 bits."""
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
    """Log a warning if this processor multiplies the model's int4, int8 or 16-bit matrices slowly."""
    kinds = set(stored_matrices(module).values())
    # Asking for the library may compile kernels, so ask only for models with such weights.
    if not kinds.isdisjoint((INT4, INT8)) and uses_kernels() and library() is None:
        if INT4 in kinds:
            _LOGGER.warning(
                "there are no compiled kernels, so 4-bit weights become fp32 at their first use, and need the memory "
                "and time of fp32"
            )
        elif INT8 in kinds and not has_exact_int_mm():
            _LOGGER.warning(
                "there are no compiled kernels and no AVX-512 VNNI, so 8-bit weights become fp32, and need the memory "
                "and time of fp32"
            )
    if any(kind.is_exact for kind in kinds) and not has_fast_bf16(torch.device("cpu")):
        _LOGGER.warning(
            "this processor multiplies the checkpoint's 16-bit weights slowly: the precision int8 is faster, and so is "
            "fp32 with twice the memory"
        )


def _build_tree(module: Transformer, *, in_bf16: bool) -> tuple[Transformer, tuple[ModuleBackend, ...]]:
    tree, report = replica(module), []
    for submodule in tree.modules():
        if isinstance(submodule, HookPoints):
            submodule.identity = object()  # a `capture` that starts meanwhile must not see this tree
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
            report.append(_backend_of(address, kind, "the kernels do not support it"))
    if any(weight.is_cuda for weight in tree.parameters()):
        from clearhead.fast.slots.tree import SlotOwner

        override(tree, SlotOwner).idle = []
    return tree, tuple(report)


def _plan(stack: Stack, in_bf16: bool) -> StackPlan | NotServed:
    try:
        return StackPlan(stack, in_bf16=in_bf16)
    except NotServed as reason:
        return reason


def _backend_of(address: str, kind: str | None, reason: str) -> ModuleBackend:
    return ModuleBackend(address, "plain", reason) if kind is None else ModuleBackend(address, "kernels", kind)


def _state(module: nn.Module) -> Iterator[int | float]:
    """Yield numbers that change whenever a module changes: its settings, forward method, children or weights."""
    yield id(module)
    for name, value in vars(module).items():
        if type(value) in (int, float) or name == "forward":
            yield value if isinstance(value, int | float) else id(value)
    for weight in (*module._parameters.values(), *module._buffers.values()):
        if weight is not None:
            yield id(weight)
            yield from _address_and_version(weight)


def _address_and_version(weight: Tensor) -> tuple[int, int]:
    """Return the address of a weight and its number of changes; a weight sharded over processes has no address."""
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
    """Return a function that multiplies rows with a module's matrix and adds a bias; None if no kernel can."""
    if isinstance(holder, Stored) and holder.format == INT8:
        matrix, scale = holder.entries()
        return int8_linear(matrix, scale, bias)
    if isinstance(holder, Stored) and holder.format == INT4:
        nibbles, scales = holder.entries()
        return int4_linear(nibbles, scales, bias)
    if isinstance(holder, Stored) and in_bf16:
        return mixed_linear(in_16_bits(holder.entries()[0].detach()), bias)
    if isinstance(holder, Stored):
        return _widening_product(holder, bias)
    weight = holder.weight
    assert isinstance(weight, Tensor)
    return mixed_linear(huge_pages.convert(weight, torch.bfloat16), bias) if in_bf16 else float_linear(weight, bias)


def _widening_product(holder: Stored, bias: Tensor | None) -> LinearFunction:
    """Return a product in fp32 that widens the matrix at each call."""

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
    """Return the module whose matrix an output layer multiplies with: itself, or an embedding that it is tied to."""
    if isinstance(head, Stored):  # reading its weight would widen it
        return head
    assert isinstance(head, HeadLinear)
    return head if head.weight is not None else head.tied.module


def _scaling_product(run: LinearFunction, scale: float) -> LinearFunction:
    return lambda x: run(x * scale)
