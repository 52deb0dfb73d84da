"""Layers dropped, repeated or put in another order."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead import spec
from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.surgery.addresses import Side, stack_of, with_stacks
from clearhead.surgery.plan import Origin, SurgeryPlan, apply_plan, unchanged_origins
from clearhead.surgery.report import AnyModel, EditedModel


def keep_layers(model: AnyModel, layers: Sequence[int], *, stack: Side | None = None) -> EditedModel[AnyModel]:
    """Keep some layers of a stack, in the order given; one that is named twice is there twice, each with its weights.

    The new stack computes what the old one would if its layers ran in that order. Where layers share weights, depths
    are chosen, and those that shared a layer still do.

    Args:
        model: a module or a model; it is not changed.
        layers: numbers of layers in the order in which they run, from 0.
        stack: whose; may be left out where there is one.

    Raises:
        InputError: no layer, one that does not exist, or a stack that is not there.

    Source: dropped layers arXiv 1909.11556; repeated ones arXiv 2312.15166, section 2.1.
    """
    return apply_plan(model, lambda module: _plan(module, layers, stack))


def _plan(module: Transformer, layers: Sequence[int], name: Side | None) -> SurgeryPlan:
    side, old = stack_of(module.spec, name, what="layers")
    count = len(old.depths)
    wrong = [number for number in layers if not 0 <= number < count]
    if wrong:
        raise InputError(f"the {side} has no layer {wrong[0]}; its {count} layers are numbered from 0")
    if not layers:
        raise InputError(f"no layer of the {side} would be left; name those to keep, such as [0, {count - 1}]")
    if old.sharing is None:
        taken, sharing = list(layers), None
    else:
        runs = [old.sharing[depth] for depth in layers]
        taken = sorted(set(runs))
        numbers = tuple(taken.index(number) for number in runs)
        sharing = None if numbers == tuple(range(len(taken))) else numbers
    origins = {
        address: origin
        for address, origin in unchanged_origins(module).items()
        if not address.startswith(f"{side}.layers.")
    }
    for new, number in enumerate(taken):
        prefix = f"{side}.layers.{number}."
        origins |= {
            f"{side}.layers.{new}.{address.removeprefix(prefix)}": Origin(address)
            for address in module.state_dict()
            if address.startswith(prefix)
        }
    stack = old.model_copy(update={"layers": tuple(old.layers[number] for number in taken), "sharing": sharing})
    return _with_tables(module, with_stacks(module.spec, {side: stack}), side, taken, origins)


def _with_tables(
    module: Transformer, model: spec.Model, side: Side, taken: Sequence[int], origins: dict[str, Origin]
) -> SurgeryPlan:
    """Give each table that layers share, and that one of them owns, to the first layer that is left of those."""
    old = dict(spec.walk(module.spec))
    shared = {
        node.path
        for node in old.values()
        if isinstance(node, spec.Reference | spec.TableHeads) and node.path.startswith(f"{side}.layers.")
    }
    owners: dict[str, str] = {}

    def change(path: str, node: spec.Node) -> spec.Node:
        """Settle who owns a table, layer after layer; a reference that comes first becomes the owner."""
        if not path.startswith(f"{side}.layers.") or not path.endswith(".function.score_bias"):
            return node
        parts = path.split(".")
        table = (
            node.path
            if isinstance(node, spec.Reference | spec.TableHeads)
            else ".".join([*parts[:2], str(taken[int(parts[2])]), *parts[3:]])
        )
        if table not in shared:
            return node
        if table in owners:
            return (
                node.model_copy(update={"path": owners[table]})
                if isinstance(node, spec.TableHeads)
                else (spec.Reference(path=owners[table]))
            )
        if isinstance(node, spec.TableHeads):
            raise InputError(f"{table} is a table that {path} reads some heads of: keep the layer that owns it")
        owners[table] = path
        origins[f"{path}.weight"] = Origin(f"{table}.weight")
        return old[table]

    model = spec.map_nodes(model, change)

    def follow(path: str, node: spec.Node) -> spec.Node:
        """Let other stacks follow what moved."""
        if isinstance(node, spec.Reference | spec.TableHeads) and not path.startswith(f"{side}.layers."):
            return node.model_copy(update={"path": owners.get(node.path, node.path)})
        return node

    return SurgeryPlan(spec.map_nodes(model, follow), origins)
