"""Likely causes of a divergence from transformers, by experiment: change one thing and see how far the models agree.

Every experiment builds the same model with one field of its spec changed, or with the rows of its weights in another
order, and runs it on the same tokens. The experiment whose first divergence comes latest is taken for a cause, and the
search continues from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from clearhead import spec
from clearhead.apps.check.trace import Comparison, ModelInputs, ModelPair, Trace, compare_traces, first_divergence
from clearhead.base.errors import InputError
from clearhead.base.tensors import relative_error
from clearhead.checkpoints.hf.mapping.tensor_rules import RotaryHalves, Slots
from clearhead.checkpoints.hf.saving import module_to_hf_tensors
from clearhead.checkpoints.weights.fill import built
from clearhead.core import Transformer

MOST_CAUSES = 4
_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)
_THETAS = (1e4, 1e5, 5e5, 1e6)
_NORMS = (spec.LayerNorm, spec.RMSNorm)
_FIELDS: tuple[tuple[str, tuple[type[spec.Node], ...], str], ...] = (
    ("the epsilon of norms", _NORMS, "eps"),
    ("whether norms add 1 to their weights", _NORMS, "unit_offset"),
    ("the activation variant", (spec.FeedForward,), "activation"),
    ("the activation variant", (spec.Activation,), "function"),
    ("the scale of attention scores", (spec.Attention,), "scale"),
    ("the scale of the embedding", (spec.Embedding,), "scale"),
    ("the scale of the input of the head", (spec.Linear,), "scale"),
    ("the offset of positions", (spec.Learned, spec.Sinusoidal), "offset"),
    ("the theta of RoPE", (spec.Rotary,), "theta"),
)
State = Mapping[str, Tensor]
Way = Callable[[list[Tensor], Slots], list[Tensor]]
Change = Callable[[spec.Node], spec.Node]


@dataclass(frozen=True)
class Experiment:
    """One change: its description, and a function that builds the changed module."""

    description: str
    make: Callable[[], Transformer]


def find_causes(sides: ModelPair, inputs: ModelInputs, expected: Trace, tolerance: float) -> Iterator[str]:
    """Yield the likely causes of a difference from transformers.

    Args:
        sides: both models.
        inputs: their inputs.
        expected: the trace of the other model.
        tolerance: the largest relative difference that counts as equal.
    """
    module = sides.ours
    for _ in range(MOST_CAUSES):
        trace = sides.run_ours(module, inputs)
        place = _place(compare_traces(trace, expected), tolerance)
        if place is None:
            return
        best, best_place = None, place
        for experiment in _experiments(sides, module, trace, expected, tolerance):
            try:
                changed = experiment.make()
                found = _place(compare_traces(sides.run_ours(changed, inputs), expected), tolerance)
            except (InputError, RuntimeError):
                continue
            if found is None:
                yield experiment.description
                return
            # Of experiments that agree equally far, the one with the smallest difference there.
            if found[0] > place[0] and found > best_place:
                best, best_place = (experiment, changed), found
        if best is None:
            yield _by_tensors(sides, module)
            return
        yield best[0].description
        module = best[1]


def _place(found: list[Comparison], tolerance: float) -> tuple[int, float] | None:
    """Return how far two models agree: the larger the better; None: to the end."""
    first = first_divergence(found, tolerance)
    return None if first is None else (found.index(first), -first.error)


def _experiments(
    sides: ModelPair, module: Transformer, trace: Trace, expected: Trace, tolerance: float
) -> Iterator[Experiment]:
    for description, change in _field_changes(module, sides.theirs.config.to_dict()):
        yield Experiment(description, partial(_changed, module, change))
    yield from _layouts(module)
    yield from _orders(module, trace, expected, tolerance)


def _changed(module: Transformer, change: Change) -> Transformer:
    return built(spec.map_nodes(module.spec, lambda _, node: change(node)), module.state_dict())


def _setter(kinds: tuple[type[spec.Node], ...], name: str, before: Any, after: Any) -> Change:
    def change(node: spec.Node) -> spec.Node:
        is_match = isinstance(node, kinds) and getattr(node, name) == before
        return node.model_copy(update={name: after}) if is_match else node

    return change


def _candidates(node: spec.Node, name: str, width: int, epsilons: Collection[float]) -> Iterable[Any]:
    """Return the values that a field of a node may have in another implementation."""
    match node, name:
        case _, "eps":
            return sorted({*_EPSILONS, *epsilons})
        case _, "unit_offset":
            return False, True
        case _, "activation" | "function":
            return get_args(spec.ActivationName)
        case spec.Attention(), _:
            return node.head_size**-0.5, 1.0, 1.0 / node.head_size, width**-0.5
        case spec.Embedding(), _:
            return 1.0, width**0.5
        case spec.Linear(), _:
            return 1.0, width**-0.5
        case spec.Learned() | spec.Sinusoidal(), _:
            return [node.offset + step for step in (-2, -1, 1, 2) if node.offset + step >= 0]
    return _THETAS


def _field_changes(module: Transformer, config: Mapping[str, Any]) -> Iterator[tuple[str, Change]]:
    """Yield other values of the fields that are most often wrong, each with a description."""
    known = {value for key, value in config.items() if "eps" in key and isinstance(value, float) and value > 0}
    stack = module.spec.encoder or module.spec.decoder
    assert stack is not None, "a validated model has a stack"
    for label, kinds, name in _FIELDS:
        tried = set()
        for node in [node for _, node in spec.walk(module.spec) if isinstance(node, kinds)]:
            before = getattr(node, name)
            now = node.head_size**-0.5 if isinstance(node, spec.Attention) and before is None else before
            if not isinstance(now, str | float | int):
                continue
            for after in _candidates(node, name, stack.width, known):
                is_other = now != after if isinstance(now, str) else not math.isclose(now, after, abs_tol=0.0)
                if is_other and (now, after) not in tried:
                    tried.add((now, after))
                    yield f"{label}: {_shown(now)} here, {_shown(after)} there", _setter(kinds, name, before, after)


def _shown(value: str | float | int) -> str:
    return f"{value}" if isinstance(value, str | bool) else f"{value:.6g}"


def _attentions(module: Transformer) -> dict[str, spec.Attention]:
    return {path: node for path, node in spec.walk(module.spec) if isinstance(node, spec.Attention)}


def _layouts(module: Transformer) -> Iterator[Experiment]:
    """Try the other layout of RoPE: pairs are interleaved on one side and half a head apart on the other."""
    rotating = {path: node for path, node in _attentions(module).items() if node.position is not None}
    if not rotating:
        return
    ways = (("neighbours", "halves", RotaryHalves().load), ("halves", "neighbours", RotaryHalves().save))
    for there, here, way in ways:
        description = f"the layout of rotated pairs: the tensors were read as {here}, and they are {there}"
        yield Experiment(description, partial(_laid_out, module, rotating, way))


def _laid_out(module: Transformer, rotating: Mapping[str, spec.Attention], way: Way) -> Transformer:
    state = dict(module.state_dict())
    for path, node in rotating.items():
        for name in (f"{path}.{part}.{leaf}" for part in ("query", "key") for leaf in ("weight", "bias")):
            if name in state:
                (state[name],) = way([state[name]], Slots((state[name].shape,), node))
    return built(module.spec, state)


def _orders(module: Transformer, trace: Trace, expected: Trace, tolerance: float) -> Iterator[Experiment]:
    """Find the heads of the first diverging attention in another order on the other side."""
    for path, node in _attentions(module).items():
        orders: dict[str, list[int]] = {}
        for part in ("query", "key", "value"):
            place = (f"{path}.{part}", 0)
            if place not in trace.parts or place not in expected.parts:
                continue
            found, wanted = (side.parts[place].unflatten(-1, (-1, node.head_size)) for side in (trace, expected))
            differs = relative_error(found, wanted) > tolerance and found.shape == wanted.shape
            if differs and (order := _order(found, wanted, tolerance)) is not None:
                orders[part] = order
        if orders:
            order = next(iter(orders.values()))
            description = f"the order of heads: the {' and '.join(orders)} heads there are heads {order} here"
            yield Experiment(f"{description}, in {path}", partial(_reordered, module, {path: orders}))
            everywhere = dict.fromkeys(_attentions(module), orders)
            yield Experiment(f"{description}, in every layer", partial(_reordered, module, everywhere))
            return


def _order(found: Tensor, wanted: Tensor, tolerance: float) -> list[int] | None:
    """Return for each head of theirs the equal head of ours; None: some have no equal."""
    heads = range(found.shape[-2])
    order = [
        next((i for i in heads if relative_error(found[..., i, :], wanted[..., j, :]) <= tolerance), -1) for j in heads
    ]
    return order if sorted(order) == list(heads) else None


def _reordered(module: Transformer, places: Mapping[str, Mapping[str, list[int]]]) -> Transformer:
    state, nodes = dict(module.state_dict()), _attentions(module)
    for path, orders in places.items():
        for part, order in orders.items():
            for name in (f"{path}.{part}.weight", f"{path}.{part}.bias"):
                size = nodes[path].head_size
                if name in state and state[name].shape[0] == len(order) * size:
                    state[name] = state[name].unflatten(0, (-1, size))[torch.tensor(order)].flatten(0, 1)
    return built(module.spec, state)


def _by_tensors(sides: ModelPair, module: Transformer) -> str:
    """Name the tensors that differ, where no experiment explains the divergence."""
    loaded = sides.pretrained
    mine = module_to_hf_tensors(module, loaded.family, loaded.variant, loaded.prefix, module.state_dict())
    base, theirs = f"{getattr(sides.theirs, 'base_model_prefix', '')}.", sides.theirs.state_dict()
    other = {name.removeprefix(base): tensor for name, tensor in theirs.items()}
    found = []
    for name, tensor in mine.items():
        known = other.get(name.removeprefix(base))
        if known is not None and not (known.shape == tensor.shape and torch.equal(known.float(), tensor.float())):
            found.append(name)
    if not found:
        return "not found by any experiment; all tensors that can be compared are equal"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"the weights: '{found[0]}'{more} have other values there"
