"""What a forward pass keeps for the backward pass, from a spec alone: it runs on tensors that have no data.

A layer that repeats is run twice. A mixture of experts counts as one feed-forward network of the size that a token
passes through, because which experts it takes depends on the data.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead.core import Sequence, Transformer
from clearhead.core.stack import Layer
from clearhead.spec import MixtureOfExperts, Model, Node, map_nodes

_REST = ""


@dataclass(frozen=True)
class Activations:
    """Bytes that are kept for the backward pass.

    Attributes:
        layers: for one row, in all layers.
        largest_layer: for one row, in the layer that keeps most.
        inputs: for one row, of the inputs of all layers alone, which is what checkpointing keeps.
        rest: for one row, outside the layers, with the gradient of the states from which the loss is computed.
        fixed: whatever the number of rows: weights in the precision of the products.
    """

    layers: int
    largest_layer: int
    inputs: int
    rest: int
    fixed: int

    def kept(self, rows: int, *, checkpointing: bool) -> int:
        """Return the bytes for some rows; with checkpointing a layer computes again what its backward pass needs."""
        inside = self.inputs + self.largest_layer if checkpointing else self.layers
        return rows * (inside + self.rest)


def measure_activations(model: Model, length: int, precision: Literal["fp32", "bf16"]) -> Activations:
    """Return what a training step keeps of rows of one length, without any memory for it.

    Args:
        model: its spec.
        length: tokens of a row, on each side.
        precision: of the products.
    """
    small = map_nodes(model, _dense)
    runs, copies = Counter[str](), Counter[str]()
    for name in ("encoder", "decoder"):
        stack = getattr(small, name)
        if stack is not None:
            distinct = list(dict.fromkeys(stack.depths))
            for index, layer in enumerate(distinct):
                # The second time a layer keeps only what is its own; the first time, what all layers share as well.
                first, again = f"{name}.layers.{index}", f"{name}.layers.{index + len(distinct)}"
                runs.update({first: 1, again: stack.depths.count(layer) - 1})
                copies.update({first: 1, again: stack.layers.count(layer) - 1})
            twice = stack.model_copy(update={"layers": (*distinct, *distinct), "sharing": None})
            small = small.model_copy(update={name: twice})
    single, double = _run(small, 1, length, precision), _run(small, 2, length, precision)
    layers = {name: double.kept[name] - single.kept[name] for name in runs}
    rest = double.kept[_REST] - single.kept[_REST]
    top = small.decoder or small.encoder
    assert top is not None, "a model has a stack"
    return Activations(
        layers=sum(layers[name] * count for name, count in runs.items()),
        largest_layer=max(layers.values()),
        inputs=sum(single.inputs[name] * count for name, count in runs.items()),
        rest=rest + 4 * length * top.output_width,
        fixed=single.kept[_REST] - rest + sum((single.kept[name] - layers[name]) * copies[name] for name in copies),
    )


def _dense(path: str, node: Node) -> Node:
    if not isinstance(node, MixtureOfExperts):
        return node
    return node.expert.model_copy(update={"size": node.top_k * node.expert.size})


class _NoData(FakeTensorMode):
    """Tensors without data, of which nothing that is asked is true: no row of attention weights is empty."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False
        return super().dispatch(func, types, args, kwargs)


class _Run:
    """One forward pass.

    Attributes:
        kept: bytes by the layer that keeps them; a tensor that several keep counts for the first, the memory for none.
        inputs: bytes of the inputs of the layers.
    """

    def __init__(self, module: Transformer) -> None:
        self.kept: Counter[str] = Counter()
        self.inputs: dict[str, int] = {}
        self._place, self._memory = _REST, 0
        self._parameters = {_storage(parameter)._cdata for parameter in module.parameters()}
        # Alive, so that no other tensor takes the address of one that was counted.
        self._seen: dict[int, torch.UntypedStorage] = {}
        for name, submodule in module.named_modules():
            if isinstance(submodule, Layer):
                submodule.register_forward_pre_hook(self._enter(name))
                submodule.register_forward_hook(self._leave)
            elif name == "encoder":
                submodule.register_forward_hook(self._remember)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd keeps."""
        storage = _storage(tensor)
        if storage._cdata not in self._parameters and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.kept[_REST if storage._cdata == self._memory else self._place] += storage.nbytes()
        return tensor

    def _enter(self, name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._place = name
            self.inputs[name] = _storage(inputs[0]).nbytes()

        return hook

    def _leave(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._place = _REST

    def _remember(self, encoder: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        self._memory = _storage(output)._cdata


def _run(model: Model, rows: int, length: int, precision: str) -> _Run:
    with _NoData(), torch.device("cpu"):
        module = Transformer(model)
        run = _Run(module)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        target = Sequence(ids) if model.encoder is not None and model.decoder is not None else None
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
        with torch.autograd.graph.saved_tensors_hooks(run.pack, lambda tensor: tensor), autocast:
            module.train().states(Sequence(ids), target)
    return run


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
