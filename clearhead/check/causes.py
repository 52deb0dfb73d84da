"""Why a checkpoint computes something else here than there, by experiment: change one thing, see how far it agrees.

Every experiment builds the same model with one choice made otherwise, or with rows of its matrices in another order,
and runs it on the same tokens. The one after which the first divergence comes latest is taken for a cause, and the
search goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from clearhead import spec
from clearhead.check.measure import Comparison, compare_traces, first_divergence, relative_error
from clearhead.check.trace import ModelInputs, ModelPair, Trace
from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.hf.mapping.tensor_rules import Halves, Slots
from clearhead.hf.saving import module_to_hf_tensors
from clearhead.weights.fill import built

MOST_CAUSES = 4
_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)
_THETAS = (1e4, 1e5, 5e5, 1e6)
State = Mapping[str, Tensor]
Way = Callable[[list[Tensor], Slots], list[Tensor]]
Change = Callable[[spec.Node], spec.Node]
Named = Iterator[tuple[str, Change]]


@dataclass(frozen=True)
class Experiment:
    """One thing made otherwise: what it is, and the module that results."""

    says: str
    make: Callable[[], Transformer]


def find_causes(sides: ModelPair, reading: ModelInputs, expected: Trace, tolerance: float) -> Iterator[str]:
    """Yield what probably makes a checkpoint differ from what another library computed.

    Args:
        sides: both models.
        reading: what they read.
        expected: what passes through the parts of the other.
        tolerance: the largest relative difference that counts as the same.
    """
    module = sides.ours
    for _ in range(MOST_CAUSES):
        trace = sides.run_ours(module, reading)
        place = _place(compare_traces(trace, expected), tolerance)
        if place is None:
            return
        best, best_place = None, place
        for experiment in _experiments(sides, module, trace, expected, tolerance):
            try:
                changed = experiment.make()
                found = _place(compare_traces(sides.run_ours(changed, reading), expected), tolerance)
            except (InputError, RuntimeError):
                continue
            if found is None:
                yield experiment.says
                return
            # Of those that reach equally far, the one that leaves the smallest difference there.
            if found[0] > place[0] and found > best_place:
                best, best_place = (experiment, changed), found
        if best is None:
            yield _by_tensors(sides, module)
            return
        yield best[0].says
        module = best[1]


def _place(found: list[Comparison], tolerance: float) -> tuple[int, float] | None:
    """How far two models agree: the larger the better; None: to the end."""
    first = first_divergence(found, tolerance)
    return None if first is None else (found.index(first), -first.error)


def _experiments(
    sides: ModelPair, module: Transformer, trace: Trace, expected: Trace, tolerance: float
) -> Iterator[Experiment]:
    config = dict(sides.theirs.config.to_dict())
    for changes in (_norms(module, config), _functions(module), _scales(module), _positions(module)):
        for says, change in changes:
            yield Experiment(says, partial(_changed, module, change))
    yield from _layouts(module)
    yield from _orders(module, trace, expected, tolerance)


def _changed(module: Transformer, change: Change) -> Transformer:
    return built(spec.map_nodes(module.spec, lambda _, node: change(node)), module.state_dict())


def _nodes(module: Transformer, *kinds: type[spec.Node]) -> list[Any]:
    return [node for _, node in spec.walk(module.spec) if isinstance(node, kinds)]


def _setter(kinds: tuple[type[spec.Node], ...], name: str, before: Any, after: Any) -> Change:
    def change(node: spec.Node) -> spec.Node:
        is_meant = isinstance(node, kinds) and getattr(node, name) == before
        return node.model_copy(update={name: after}) if is_meant else node

    return change


def _norms(module: Transformer, config: Mapping[str, Any]) -> Named:
    kinds = (spec.LayerNorm, spec.RMSNorm)
    said = {value for key, value in config.items() if "eps" in key and isinstance(value, float) and value > 0}
    for before in sorted({node.eps for node in _nodes(module, *kinds)}):
        for after in sorted({*_EPSILONS, *said} - {before}):
            yield f"the epsilon of norms: {before:g} here, {after:g} there", _setter(kinds, "eps", before, after)
    for before in {node.unit_offset for node in _nodes(module, *kinds)}:
        says = "norms add 1 to their weights " + ("here, not there" if before else "there, not here")
        yield says, _setter(kinds, "unit_offset", before, not before)


def _functions(module: Transformer) -> Named:
    for kind, name in ((spec.FeedForward, "activation"), (spec.Activation, "function")):
        used = {getattr(node, name) for node in _nodes(module, kind)}
        for before in sorted(one for one in used if isinstance(one, str)):
            for after in get_args(spec.ActivationName):
                if after != before:
                    yield f"the activation variant: {before} here, {after} there", _setter((kind,), name, before, after)


def _scales(module: Transformer) -> Named:
    for node in {(one.scale, one.head_size) for one in _nodes(module, spec.Attention)}:
        before, size = node
        now = size**-0.5 if before is None else before
        for after in (size**-0.5, 1.0, 1.0 / size, _width(module) ** -0.5):
            if abs(after - now) > 1e-9:
                says = f"the scale of attention scores: {now:.6g} here, {after:.6g} there"
                yield says, _setter((spec.Attention,), "scale", before, after)
    for before in {one.scale for one in _nodes(module, spec.Embedding)}:
        for after in (1.0, _width(module) ** 0.5):
            if abs(after - before) > 1e-9:
                says = f"the scale of the embedding: {before:.6g} here, {after:.6g} there"
                yield says, _setter((spec.Embedding,), "scale", before, after)
    for before in {one.scale for one in _nodes(module, spec.Linear)}:
        for after in (1.0, _width(module) ** -0.5):
            if abs(after - before) > 1e-9:
                says = f"the scale of the states before the last map: {before:.6g} here, {after:.6g} there"
                yield says, _setter((spec.Linear,), "scale", before, after)


def _positions(module: Transformer) -> Named:
    kinds = (spec.Learned, spec.Sinusoidal)
    for before in {one.offset for one in _nodes(module, *kinds)}:
        for after in (before + step for step in (-2, -1, 1, 2) if before + step >= 0):
            yield f"the offset of positions: {before} here, {after} there", _setter(kinds, "offset", before, after)
    for theta in {one.theta for one in _nodes(module, spec.Rotary)}:
        for other in (one for one in _THETAS if one != theta):
            says = f"the base of the rotation: {theta:g} here, {other:g} there"
            yield says, _setter((spec.Rotary,), "theta", theta, other)


def _width(module: Transformer) -> int:
    stack = module.spec.encoder or module.spec.decoder
    assert stack is not None, "a validated model has a stack"
    return stack.width


def _attentions(module: Transformer) -> dict[str, spec.Attention]:
    return {path: node for path, node in spec.walk(module.spec) if isinstance(node, spec.Attention)}


def _layouts(module: Transformer) -> Iterator[Experiment]:
    """Rotated pairs are neighbours on one side and halves apart on the other."""
    rotating = {path: node for path, node in _attentions(module).items() if node.position is not None}
    if not rotating:
        return
    ways = (("neighbours", "halves", Halves().load), ("halves", "neighbours", Halves().save))
    for there, here, way in ways:
        says = f"the layout of rotated pairs: the tensors were read as {here}, and they are {there}"
        yield Experiment(says, partial(_laid_out, module, rotating, way))


def _laid_out(module: Transformer, rotating: Mapping[str, spec.Attention], way: Way) -> Transformer:
    state = dict(module.state_dict())
    for path, node in rotating.items():
        for name in (f"{path}.{part}.{leaf}" for part in ("query", "key") for leaf in ("weight", "bias")):
            if name in state:
                (state[name],) = way([state[name]], Slots((state[name].shape,), node))
    return built(module.spec, state)


def _orders(module: Transformer, trace: Trace, expected: Trace, tolerance: float) -> Iterator[Experiment]:
    """Find the heads of the first attention that differs again among those of the other side."""
    for path, node in _attentions(module).items():
        orders: dict[str, list[int]] = {}
        for part in ("query", "key", "value"):
            place = (f"{path}.{part}", 0)
            if place not in trace.parts or place not in expected.parts:
                continue
            found, wanted = (one.parts[place].unflatten(-1, (-1, node.head_size)) for one in (trace, expected))
            if relative_error(found, wanted) > tolerance and found.shape == wanted.shape:
                order = _order(found, wanted, tolerance)
                if order is not None:
                    orders[part] = order
        if orders:
            shown = next(iter(orders.values()))
            says = f"the order of heads: those of {', '.join(orders)} stand there as {shown} of those here"
            here = {path: orders}
            yield Experiment(f"{says}, in {path}", partial(_reordered, module, here))
            everywhere = dict.fromkeys(_attentions(module), orders)
            yield Experiment(f"{says}, in every layer", partial(_reordered, module, everywhere))
            return


def _order(found: Tensor, wanted: Tensor, tolerance: float) -> list[int] | None:
    """For each head of theirs the one of ours that gives the same; None: not all are there."""
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
    """Where nothing explains it: which tensors are others."""
    one = replace(sides.pretrained, module=module)
    mine = module_to_hf_tensors(module, one.record, one.variant, one.prefix, module.state_dict())
    base, theirs = f"{getattr(sides.theirs, 'base_model_prefix', '')}.", sides.theirs.state_dict()
    other = {name.removeprefix(base): tensor for name, tensor in theirs.items()}
    found = []
    for name, tensor in mine.items():
        known = other.get(name.removeprefix(base))
        if known is not None and not (known.shape == tensor.shape and torch.equal(known.float(), tensor.float())):
            found.append(name)
    if not found:
        return "not found by any experiment: the tensors that could be compared are equal"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"the weights: '{found[0]}'{more} hold other numbers there"
