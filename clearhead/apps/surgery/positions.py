"""Surgery on positions: resize learned tables, and scale RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.apps.surgery.addresses import Side, branch_functions, update_nodes
from clearhead.apps.surgery.plan import Origin, SurgeryPlan, apply_plan, copy_origins
from clearhead.apps.surgery.report import AnyModel, EditedModel
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.spec.addresses import select_addresses

By = Literal["repeat", "interpolate", "draw"]


@check_types
def resize_positions(
    model: AnyModel, length: int, *, by: By = "repeat", stack: Side | None = None
) -> EditedModel[AnyModel]:
    """Resize learned position tables for sequences of another length.

    Args:
        model: a module or a model; it is not changed.
        length: the new maximum length in tokens; it may be shorter than before.
        by: the method. Method "repeat" repeats the old rows, so that the outputs for short sequences stay the same.
            Method "interpolate" interpolates the old rows linearly. Method "draw" adds randomly initialized rows.
        stack: the stack with the table. None means every stack that has one.

    Raises:
        InputError: the length is not valid, or there is no table; then the message names the kind of positions.

    Source: repeated arXiv 2004.05150, section 5; interpolated arXiv 2010.11929, section 3.2.
    """
    return apply_plan(
        model,
        lambda module: _plan_tables(module, length, by, stack),
        task=lambda _, old: old if old.max_length is None else old.model_copy(update={"max_length": length}),
    )


@check_types
def scale_rotary(
    model: AnyModel,
    scaling: spec.RotaryScaling | None,
    *,
    theta: float | None = None,
    layers: str = "**",
) -> EditedModel[AnyModel]:
    """Set the scaling of RoPE, such as `spec.LinearScaling`, for texts longer than in training.

    Args:
        model: a module or a model; it is not changed.
        scaling: the new scaling, such as spec.LinearScaling(factor=2.0). None means no scaling.
        theta: the base of the rotation. None means the old one.
        layers: a pattern of the addresses of attentions, or of nodes that contain them.

    Raises:
        InputError: the pattern matches no attention with RoPE, or the scaling does not fit the head size.

    Source: the docstring of each scaling in the spec names its paper.
    """
    return apply_plan(model, lambda module: _plan_rotary(module, scaling, theta, layers))


def _plan_tables(module: Transformer, length: int, by: By, name: Side | None) -> SurgeryPlan:
    if length < 1:
        raise InputError(f"length must be at least 1 token, got {length}")
    stacks = {side: stack for side, stack in module.spec.stacks.items() if name in (None, side)}
    origins, updates = copy_origins(module), {}
    for side, stack in stacks.items():
        path, table = f"{side}.embedding.position", stack.embedding.position
        if isinstance(table, spec.Learned):
            updates[path] = {"rows": length + table.offset}
            if length + table.offset != table.rows:
                origins[f"{path}.weight"] = _resize(f"{path}.weight", table.offset, length, by)
    if not updates:
        raise InputError(f"there is no learned position table to resize: {_other_positions(module.spec, stacks)}")
    return SurgeryPlan(update_nodes(module.spec, updates), origins)


def _other_positions(model: spec.Model, stacks: Mapping[Side, spec.Stack]) -> str:
    """Return a message about the kind of positions in stacks without a learned table."""
    nodes = [node for stack in stacks.values() for _, node in spec.walk(stack)]
    if any(isinstance(node, spec.Rotary) for node in nodes):
        return "the model uses RoPE: use scale_rotary"
    if any(isinstance(node, spec.Sinusoidal) for node in nodes):
        return "its positions are computed for any length"
    if any(isinstance(node, spec.RelativeBuckets | spec.DistanceTable | spec.Alibi) for node in nodes):
        return "its scores are biased by distance, for any length"
    return f"the model has the stacks {', '.join(model.stacks)}"


def _resize(address: str, offset: int, length: int, by: By) -> Origin:
    def change(old: Tensor, drawn: Tensor) -> Tensor:
        front, rows = old[:offset], old[offset:]
        if by == "repeat" or (by == "draw" and length <= len(rows)):
            new = rows[torch.arange(length, device=old.device) % len(rows)]
        elif by == "draw":
            new = torch.cat([rows, drawn[offset + len(rows) :]])
        else:
            spread = F.interpolate(rows.float().T[None], size=length, mode="linear", align_corners=True)
            new = spread[0].T.to(old.dtype)
        return torch.cat([front, new])

    return Origin(address, change, is_drawn=by == "draw")


def _plan_rotary(
    module: Transformer, scaling: spec.RotaryScaling | None, theta: float | None, pattern: str
) -> SurgeryPlan:
    rotating = {
        address: node.position
        for address, node in branch_functions(module.spec, spec.Attention).items()
        if node.position is not None
    }
    if not rotating:
        raise InputError("this model has no RoPE, so scaling has no effect")
    meant = select_addresses(pattern, rotating) or select_addresses(f"{pattern}.**", rotating)
    if not meant:
        raise InputError(f"{pattern}: no attention with RoPE matches; such addresses look like {next(iter(rotating))}")
    updates = {}
    for address in meant:
        old = rotating[address]
        rotary = spec.Rotary(theta=old.theta if theta is None else theta, size=old.size, scaling=scaling)
        updates[address] = {"position": rotary}
    fields = "scaling" if theta is None else "scaling and theta"
    note = f"{fields} changed in {len(meant)} attentions"
    return SurgeryPlan(update_nodes(module.spec, updates), copy_origins(module), (note,))
