"""Plans for surgery: the spec of the new module, and the old tensor that each new tensor is made from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.apps.surgery.addresses import token_output, word_table
from clearhead.apps.surgery.report import AnyModel, EditedModel, SurgeryReport
from clearhead.base.errors import InputError
from clearhead.core import Transformer, build
from clearhead.core.initialize import initialize
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.fast.stored import plain_state, refuse_quantized
from clearhead.model.facade import Model
from clearhead.spec.tasks.base import Outputs
from clearhead.spec.tasks.record import LabelKind, TaskRecord
from clearhead.spec.tasks.registry import find_task, tasks_with_outputs

# Function of the old tensor and a randomly initialized tensor of the new shape that returns the new tensor.
Change = Callable[[Tensor, Tensor], Tensor]
NewTask = Callable[[spec.Model, TaskRecord], TaskRecord]


@dataclass(frozen=True)
class Origin:
    """Origin of a new tensor in the old module.

    Args:
        address: the address of the old tensor.
        change: function that computes the new tensor. None means a copy.
        is_drawn: True if the change needs the randomly initialized tensor; otherwise that tensor is empty.
    """

    address: str
    change: Change | None = None
    is_drawn: bool = False


@dataclass(frozen=True)
class SurgeryPlan:
    """Plan for a new module.

    Args:
        model: the spec of the new module.
        origins: the origin of each tensor, by address. Tensors without an origin are initialized randomly; origins of
            tensors that the spec does not have are ignored.
        notes: remarks for the report.
    """

    model: spec.Model
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()


def copy_origins(module: Transformer) -> dict[str, Origin]:
    """Return origins that copy every tensor of a module."""
    return {address: Origin(address) for address in module.state_dict()}


def select_rows(address: str, index: Tensor, axis: int) -> Origin:
    """Return an origin that selects rows (axis 0) or columns (axis 1) of an old tensor, in the order of the index."""
    return Origin(address, lambda old, _: old.index_select(axis, index.to(old.device)))


def apply_plan(
    model: AnyModel, plan_of: Callable[[Transformer], SurgeryPlan], *, task: NewTask | None = None
) -> EditedModel[AnyModel]:
    """Build the new model of a plan, with its report.

    Args:
        model: a module, or a model with its tokenizers; neither is changed.
        plan_of: function that returns the plan for a module.
        task: function that returns the task of the new model. None means that the task stays the same.

    Raises:
        InputError: the plan is not possible, or the tensors of the module do not match its spec.
    """
    source: Transformer | Model = model
    old = source.module if isinstance(source, Model) else source
    refuse_quantized(old, "surgery")
    edited: Any
    edited, report = _build_module(old, plan_of(old))
    if isinstance(source, Model):
        edited = source.with_module(edited, task=None if task is None else task(edited.spec, source.task))
    return EditedModel(edited, report)


def task_of(model: spec.Model, old: TaskRecord) -> TaskRecord:
    """Return the task of an edited model: the old one if it still fits, otherwise one that fits its head.

    Args:
        model: the spec of the edited model.
        old: the task of the original model.
    """
    outputs, count = _outputs(model)
    task = find_task(old.kind)
    # Two outputs per token are the borders of a span if they were so before.
    fits = task.outputs == outputs or (task.outputs, outputs) == ("span", "token_labels")
    if task.has_labels:
        fits &= len(old.labels or (0,)) == count
    elif outputs == "vocabulary":
        fits &= model.family in task.families
    if fits:
        return old
    task = (tasks_with_outputs(outputs, model.family) or tasks_with_outputs(outputs))[0]
    if not task.has_labels:
        return TaskRecord(kind=task.kind, max_length=old.max_length)
    labels = tuple(f"LABEL_{index}" for index in range(count)) if count > 1 else ()
    kind: LabelKind = "single_label" if labels else "regression"
    return TaskRecord(kind=task.kind, labels=labels, label_kind=kind, max_length=old.max_length, repeats=old.repeats)


def _outputs(model: spec.Model) -> tuple[Outputs, int]:
    """Return the kind of outputs of a model, such as classes, and the size of the last linear layer of its head."""
    output = token_output(model.head)
    layers = model.head.layers if model.head is not None else ()
    count = next((layer.size for layer in reversed(layers) if isinstance(layer, spec.Linear)), 0)
    if output is None:
        return ("labels" if layers and isinstance(layers[-1], spec.Linear) else "vector"), count
    rows = word_table(model, "decoder" if model.decoder else "encoder")[1].rows
    return ("vocabulary" if output[1].weight is not None or count == rows else "token_labels"), count


def _build_module(old: Transformer, plan: SurgeryPlan) -> tuple[Transformer, SurgeryReport]:
    tensors = plain_state(old)
    if tensors.keys() != build(old.spec, device="meta").state_dict().keys():
        raise InputError("the tensors of the module do not match its spec: edit the model as it was built or loaded")
    new = build(plan.model, device="meta")
    slots, origins, like = new.state_dict(), plan.origins, next(iter(tensors.values()))
    drawn = _draw(new, {name for name in slots if name not in origins or origins[name].is_drawn})
    state: dict[str, Tensor] = {}
    copied, changed = dict[str, str](), dict[str, str]()
    for name, slot in slots.items():
        fresh = drawn.get(name, torch.empty(0)).to(like)
        if name not in origins:
            state[name] = fresh
        elif (change := origins[name].change) is None:
            copied[name] = origins[name].address
            state[name] = tensors[copied[name]].detach().clone()
        else:
            changed[name] = origins[name].address
            state[name] = change(tensors[changed[name]].detach(), fresh).contiguous()
        assert state[name].shape == slot.shape, f"{name}: {list(state[name].shape)} for {list(slot.shape)}"
    new.load_state_dict(state, strict=True, assign=True)
    used = {*copied.values(), *changed.values()}
    report = SurgeryReport(
        copied=copied,
        changed=changed,
        new=tuple(name for name in slots if name not in origins),
        dropped=tuple(name for name in tensors if name not in used),
        notes=plan.notes,
    )
    return new.train(old.training), report


def _draw(module: Transformer, addresses: Collection[str]) -> dict[str, Tensor]:
    """Return randomly initialized tensors for some addresses of a module on the meta device; others use no memory."""
    if not addresses:
        return {}
    real = copy.deepcopy(module)
    for address in addresses:
        path, _, leaf = address.rpartition(".")
        owner = real.get_submodule(path)
        shape = getattr(owner, leaf).shape
        # Norms start as the identity and other vectors as zero, as in a new module.
        is_one = isinstance(owner, LayerNorm | RMSNorm) and leaf == "weight" and not owner.has_unit_offset
        setattr(owner, leaf, nn.Parameter(torch.full(shape, float(is_one))))
    initialize(real, module.spec.initialization)
    return {address: tensor for address, tensor in real.state_dict().items() if address in addresses}
