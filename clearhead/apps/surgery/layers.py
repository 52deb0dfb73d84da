"""Surgery on layers: remove, repeat or reorder them."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead import spec
from clearhead.apps.surgery.addresses import Side, stack_of
from clearhead.apps.surgery.plan import Origin, SurgeryPlan, apply_plan, copy_origins
from clearhead.apps.surgery.report import AnyModel, EditedModel
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError
from clearhead.core import Transformer


@check_types
def keep_layers(model: AnyModel, layers: Sequence[int], *, stack: Side | None = None) -> EditedModel[AnyModel]:
    """Build a stack from some layers of an old stack, in any order; a repeated number copies the layer with weights.

    The new stack computes the same as the old stack would if its layers ran in this order. If layers share weights,
    the numbers are depths, and depths that shared a layer still share it.

    Args:
        model: a module or a model; it is not changed.
        layers: the numbers of the layers, from 0, in their new order.
        stack: the stack. None means the only one.

    Raises:
        InputError: `layers` is empty, or a layer or the stack does not exist.

    Source: dropped layers arXiv 1909.11556; repeated ones arXiv 2312.15166, section 2.1.
    """
    return apply_plan(model, lambda module: _plan(module, layers, stack))


def _origins(module: Transformer, prefix: str, layers: Sequence[int]) -> dict[str, Origin]:
    """Return the origin of each tensor of a module whose stack keeps some layers, under their new numbers."""
    every = copy_origins(module)
    origins = {address: origin for address, origin in every.items() if not address.startswith(prefix)}
    for new, number in enumerate(layers):
        for address in every:
            if address.startswith(f"{prefix}{number}."):
                origins[f"{prefix}{new}.{address.removeprefix(f'{prefix}{number}.')}"] = Origin(address)
    return origins


def _plan(module: Transformer, layers: Sequence[int], name: Side | None) -> SurgeryPlan:
    side, old = stack_of(module.spec, name, what="layers")
    count = len(old.depths)
    wrong = [number for number in layers if not 0 <= number < count]
    if wrong:
        raise InputError(f"the {side} has no layer {wrong[0]}; its {count} layers are numbered from 0")
    if not layers:
        raise InputError(f"no layer of the {side} would be left; name those to keep, such as [0, {count - 1}]")
    numbers, sharing = list(layers), None
    if old.sharing is not None:
        runs = [old.sharing[depth] for depth in layers]
        numbers = sorted(set(runs))
        order = tuple(numbers.index(number) for number in runs)
        sharing = None if order == tuple(range(len(numbers))) else order
    origins = _origins(module, f"{side}.layers.", numbers)
    stack = old.model_copy(update={"layers": tuple(old.layers[number] for number in numbers), "sharing": sharing})
    return _with_shared_tables(module, module.spec.model_copy(update={side: stack}), side, numbers, origins)


def _with_shared_tables(
    module: Transformer, model: spec.Model, side: Side, layers: Sequence[int], origins: dict[str, Origin]
) -> SurgeryPlan:
    """Move each shared table of score biases to the first remaining layer that uses it."""
    prefix, old = f"{side}.layers.", dict(spec.walk(module.spec))
    references = [node.path for node in old.values() if isinstance(node, spec.Reference)]
    shared = {path for path in references if path.startswith(prefix)}
    owners: dict[str, str] = {}

    def change(path: str, node: spec.Node) -> spec.Node:
        if not path.startswith(prefix) or not path.endswith(".function.score_bias"):
            return node
        number, _, rest = path.removeprefix(prefix).partition(".")
        table_address = f"{prefix}{layers[int(number)]}.{rest}"
        table = node.path if isinstance(node, spec.Reference) else table_address
        if table not in shared:
            return node
        if table in owners:
            return spec.Reference(path=owners[table])
        owners[table] = path
        origins[f"{path}.weight"] = Origin(f"{table}.weight")
        return old[table]

    def follow(path: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Reference) and not path.startswith(prefix):
            return node.model_copy(update={"path": owners.get(node.path, node.path)})
        return node

    return SurgeryPlan(spec.map_nodes(spec.map_nodes(model, change), follow), origins)
