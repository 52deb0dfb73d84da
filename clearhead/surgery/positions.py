"""Positions extended: learned tables with more rows, and rotations stretched."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.core import Transformer
from clearhead.errors import InputError, nearest
from clearhead.surgery.addresses import Side, branch_functions
from clearhead.surgery.plan import Origin, SurgeryPlan, apply_plan, unchanged_origins
from clearhead.surgery.report import AnyModel, EditedModel

By = Literal["repeat", "interpolate", "draw"]


def resize_positions(
    model: AnyModel, length: int, *, by: By = "repeat", stack: Side | None = None
) -> EditedModel[AnyModel]:
    """Give learned tables of positions rows for sequences of another length.

    Args:
        model: a module or a model; it is not changed.
        length: the longest sequence in tokens, from now on; shorter than it was is possible too.
        by: "repeat": the rows there are, over and over, so that short sequences stay as they were; "interpolate": the
            rows there are, spread evenly over the new length; "draw": new rows behind the old ones.
        stack: whose table; None: of every stack that has one.

    Raises:
        InputError: a length that is none, or no table to resize: the message says where positions come from instead.

    Source: repeated arXiv 2004.05150, section 5; interpolated arXiv 2010.11929, section 3.2.
    """
    return apply_plan(
        model,
        lambda module: _plan_tables(module, length, by, stack),
        task=lambda _, old: old if old.max_length is None else old.model_copy(update={"max_length": length}),
    )


def scale_rotary(
    model: AnyModel,
    scaling: spec.RotaryScaling | None,
    *,
    theta: float | None = None,
    layers: str = "*",
) -> EditedModel[AnyModel]:
    """Stretch rotations beyond the length of training, by a kind of scaling that the core computes.

    Args:
        model: a module or a model; it is not changed.
        scaling: takes the place of the one that is there, such as spec.LinearScaling(factor=2.0); None: none.
        theta: the base of the rotation; None: as it is.
        layers: which attentions, by their address or that of their layer, with * for any part.

    Raises:
        InputError: nothing rotates there, or a scaling that does not fit the size of the heads.

    Source: see the kinds of scaling in the spec.
    """
    return apply_plan(model, lambda module: _plan_rotary(module, scaling, theta, layers))


def _plan_tables(module: Transformer, length: int, by: By, name: Side | None) -> SurgeryPlan:
    if by not in ("repeat", "interpolate", "draw"):
        raise InputError(f"by='{by}' is not known{nearest(by, ('repeat', 'interpolate', 'draw'))}; expected 'repeat', "
                         "'interpolate' or 'draw'")  # fmt: skip
    if length < 1:
        raise InputError(f"length must be a number of tokens, at least 1; got {length}")
    stacks = {side: getattr(module.spec, side) for side in ("encoder", "decoder") if name in (None, side)}
    tables = {
        f"{side}.embedding.position": stack.embedding.position
        for side, stack in stacks.items()
        if stack is not None and isinstance(stack.embedding.position, spec.Learned)
    }
    if not tables:
        raise InputError(f"there is no learned table of positions to resize: {_instead(module.spec, stacks)}")
    origins = unchanged_origins(module)
    for path, table in tables.items():
        if length + table.offset != table.rows:
            origins[f"{path}.weight"] = _resized(f"{path}.weight", table.offset, length, by)

    def change(path: str, node: spec.Node) -> spec.Node:
        if path in tables and isinstance(node, spec.Learned):
            return node.model_copy(update={"rows": length + node.offset})
        return node

    return SurgeryPlan(spec.map_nodes(module.spec, change), origins)


def _instead(model: spec.Model, stacks: Mapping[str, spec.Stack | None]) -> str:
    """Say where positions come from in stacks without a learned table, and what can be done there."""
    nodes = [node for stack in stacks.values() if stack is not None for _, node in spec.walk(stack)]
    if any(isinstance(node, spec.Rotary) for node in nodes):
        return "queries and keys are rotated, which scale_rotary stretches"
    if any(isinstance(node, spec.Sinusoidal) for node in nodes):
        return "positions are computed for any length"
    if any(isinstance(node, spec.RelativeBuckets | spec.DistanceTable | spec.Alibi) for node in nodes):
        return "scores are biased by distance, for any length"
    return f"the stacks are {', '.join(side for side in ('encoder', 'decoder') if getattr(model, side) is not None)}"


def _resized(address: str, offset: int, length: int, by: By) -> Origin:
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
        raise InputError("nothing rotates in this model, so that no scaling would have an effect")
    meant = {address for address in rotating if fnmatchcase(address, pattern) or fnmatchcase(address, f"{pattern}.*")}
    if not meant:
        raise InputError(f"{pattern}: nothing rotates there; what does is at addresses like {next(iter(rotating))}")

    def change(path: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Rotary) and path.removesuffix(".position") in meant:
            return spec.Rotary(theta=node.theta if theta is None else theta, size=node.size, scaling=scaling)
        return node

    kept = "scaling" if theta is None else "scaling and theta"
    return SurgeryPlan(
        spec.map_nodes(module.spec, change), unchanged_origins(module), (f"{kept} changed in {len(meant)} attentions",)
    )
