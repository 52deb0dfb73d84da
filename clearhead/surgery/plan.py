"""How a new module is made of an old one: a spec, and for each of its tensors where it comes from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.core.initialize import initialize
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.errors import InputError
from clearhead.model.facade import Model
from clearhead.surgery.report import AnyModel, EditedModel, SurgeryReport
from clearhead.task import LabelKind, TaskKind, TaskRecord

# What is made of the old tensor, beside a newly drawn one of the shape that is needed.
Change = Callable[[Tensor, Tensor], Tensor]
NewTask = Callable[[spec.Model, TaskRecord], TaskRecord]


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

    Args:
        address: in the old module.
        change: what is made of it; None: it is taken as it is.
        is_drawn: whether the change reads the newly drawn tensor, which otherwise is empty.
    """

    address: str
    change: Change | None = None
    is_drawn: bool = False


@dataclass(frozen=True)
class SurgeryPlan:
    """A new module.

    Args:
        model: its spec.
        origins: where its tensors come from, by address; what is missing is drawn, and what has no place is left.
        notes: for the report.
    """

    model: spec.Model
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()


def unchanged_origins(module: Transformer) -> dict[str, Origin]:
    """Return the origins of a module that keeps every tensor."""
    return {address: Origin(address) for address in module.state_dict()}


def select_rows(address: str, index: Tensor, axis: int) -> Origin:
    """Return the origin of a tensor of which some rows (axis 0) or columns are kept, in the order of the index."""
    return Origin(address, lambda old, _: old.index_select(axis, index.to(old.device)))


def apply_plan(
    model: AnyModel, plan_of: Callable[[Transformer], SurgeryPlan], *, task: NewTask | None = None
) -> EditedModel[AnyModel]:
    """Carry out a plan.

    Args:
        model: a module, or a model with its tokenizers; neither is changed.
        plan_of: makes the plan of a module.
        task: what the outputs of the new model are for; None: the same.

    Raises:
        InputError: the plan is not possible, or the module has other tensors than its spec says.
    """
    module = _module_of(model)
    new, report = _performed(module, plan_of(module))
    return EditedModel(_like(model, new, task), report)


def _module_of(model: Transformer | Model) -> Transformer:
    return model.module if isinstance(model, Model) else model


def _like(model: Transformer | Model, module: Transformer, task: NewTask | None) -> Any:
    """Return the new module as what was given: by itself, or with the tokenizers of the model."""
    if not isinstance(model, Model):
        return module
    return model.replaced(module, task=None if task is None else task(module.spec, model.task))


def task_of(model: spec.Model, old: TaskRecord) -> TaskRecord:
    """Return what the outputs of a model are for, as far as its spec says.

    Args:
        model: the spec.
        old: of the model that it was made of; it stays where its outputs are still such.
    """
    layers = model.head.layers if model.head is not None else ()
    maps = [layer for layer in layers if isinstance(layer, spec.Linear)]
    is_pooled = any(isinstance(layer, spec.Pool) for layer in layers)
    last = model.decoder or model.encoder
    assert last is not None
    kinds: tuple[TaskKind, ...]
    if not maps or (is_pooled and not isinstance(layers[-1], spec.Linear)):
        kinds = ("embed",)
    elif is_pooled:
        kinds = ("classify",)
    elif maps[-1].weight is None and maps[-1].size != _rows(model, last):
        kinds = ("tag", "answer")
    elif model.decoder is None:
        kinds = ("fill",)
    else:
        kinds = ("generate",) if model.encoder is None else ("translate", "denoise")
    count = maps[-1].size if maps else 0
    is_labelled = kinds[0] in ("classify", "tag")
    if old.kind in kinds and not (is_labelled and old.kind != "answer" and len(old.labels or (0,)) != count):
        return old
    if not is_labelled:
        return TaskRecord(kind=kinds[0], max_length=old.max_length)
    labels = tuple(f"LABEL_{index}" for index in range(count)) if count > 1 else ()
    kind: LabelKind = "single_label" if labels else "regression"
    return TaskRecord(kind=kinds[0], labels=labels, label_kind=kind, max_length=old.max_length, repeats=old.repeats)


def _rows(model: spec.Model, stack: spec.Stack) -> int:
    table = stack.embedding.table
    owner = dict(spec.walk(model))[table.path] if isinstance(table, spec.Reference) else table
    assert isinstance(owner, spec.Table)
    return owner.rows


def _performed(old: Transformer, plan: SurgeryPlan) -> tuple[Transformer, SurgeryReport]:
    tensors = old.state_dict()
    if tensors.keys() != build(old.spec, device="meta").state_dict().keys():
        raise InputError("the module holds other tensors than its spec says; edit the model as it was built or loaded")
    new = build(plan.model, device="meta")
    slots = new.state_dict()
    fresh = _drawn(new, {name for name in slots if name not in plan.origins or plan.origins[name].is_drawn})
    like = next(old.parameters())
    filled: dict[str, Tensor] = {}
    copied: dict[str, str] = {}
    changed: dict[str, str] = {}
    for name, slot in slots.items():
        origin = plan.origins.get(name)
        if origin is None:
            filled[name] = fresh[name].to(like)
        elif origin.change is None:
            filled[name], copied[name] = tensors[origin.address].detach().clone(), origin.address
        else:
            drawn = fresh.get(name, torch.empty(0))
            filled[name] = origin.change(tensors[origin.address].detach(), drawn.to(like)).contiguous()
            changed[name] = origin.address
        assert filled[name].shape == slot.shape, f"{name}: {list(filled[name].shape)} for {list(slot.shape)}"
    new.load_state_dict(filled, strict=True, assign=True)
    left = {*copied.values(), *changed.values()}
    report = SurgeryReport(
        copied,
        changed,
        new=tuple(name for name in slots if name not in plan.origins),
        dropped=tuple(name for name in tensors if name not in left),
        notes=plan.notes,
    )
    return new.train(old.training), report


def _drawn(module: Transformer, addresses: Collection[str]) -> dict[str, Tensor]:
    """Draw some tensors of a module on the meta device as a new module has them; the others take no memory."""
    real = copy.deepcopy(module)
    for address in addresses:
        path, _, leaf = address.rpartition(".")
        owner = real.get_submodule(path)
        shape = getattr(owner, leaf).shape
        # Norms begin as the identity, and all else without rows as zero, as when a module is built.
        is_one = isinstance(owner, LayerNorm | RMSNorm) and leaf == "weight" and not owner.has_unit_offset
        setattr(owner, leaf, nn.Parameter(torch.full(shape, float(is_one))))
    initialize(real, module.spec.initialization)
    return {address: tensor for address, tensor in real.state_dict().items() if address in addresses}
