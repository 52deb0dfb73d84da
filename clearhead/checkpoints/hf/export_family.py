"""Export family of a module: the first family that can express its spec or an equivalent spec.

An equivalent spec computes the same outputs. It is tried if no config of a family can express the spec.

- The channels of the residual stream can be permuted, if all modules that write or read them are permuted alike. Only
  the order of sums changes. So interleaved sines and cosines can become halves.
- An absent bias can become a bias of zeros.
- The scale of the embedding can be multiplied into its table.
- The scale of attention scores can be multiplied into the projection of the queries.

Dimension: D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.loading import bind_rules
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.blocks import no_head
from clearhead.checkpoints.hf.mapping.family import Family, Variant
from clearhead.checkpoints.weights.files import build_from_tensors
from clearhead.core import Transformer
from clearhead.fast.stored import plain_state
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task

_MOST_LINES = 6
# Fields that an equivalent spec may change. If any other field differs, no change helps.
_CHANGEABLE = re.compile(r"\.(?:dropout|scale|layout)$|^head\.layers\.\d+\.(?:bias|weight\b.*)$")


Tensors = Mapping[str, Tensor]
Equivalent = tuple[spec.Model, Callable[[Tensors], dict[str, Tensor]]]
"""An equivalent spec, and the function from the tensors of the first spec to the tensors of the equivalent one."""
Change = Callable[[spec.Model], Equivalent | None]
"""Function from a spec to an equivalent spec; it returns None if the change does not apply."""


def apply_changes(module: Transformer, changes: Iterable[Change]) -> Transformer:
    """Return an equivalent module with changes of its spec applied in order; only tensors that change are copied."""
    model, tensors = module.spec, plain_state(module)
    for change in changes:
        equivalent = change(model)
        assert equivalent is not None, "a change that was chosen applies"
        model, convert = equivalent
        tensors = convert(tensors)
    return module if model == module.spec else build_from_tensors(model, tensors, training=module.training)


def without_dropout(model: spec.Model) -> Equivalent | None:
    """Return the spec without dropout, which changes training only; None if it has no dropout."""

    def change(_path: str, node: spec.Node) -> spec.Node:
        return node.model_copy(update={"dropout": 0.0}) if getattr(node, "dropout", 0.0) else node

    other = spec.map_nodes(model, change)
    return None if other == model else (other, dict)


def with_scaled_output(model: spec.Model) -> Equivalent | None:
    """Return the spec whose embedding scale is multiplied into the table; the tied output is divided by the scale.

    The result is None if no table is scaled, if the uses of a table have different scales, or if no output is tied.
    """
    scales = _table_scales(model)
    head = model.head
    if not scales or head is None:
        return None
    layers = tuple(
        layer.model_copy(update={"scale": layer.scale / scales[layer.weight.path]})
        if isinstance(layer, spec.Linear) and layer.weight is not None and layer.weight.path in scales
        else layer
        for layer in head.layers
    )
    if layers == head.layers:
        return None
    other = _without_scale(model).model_copy(update={"head": head.model_copy(update={"layers": layers})})
    return other, lambda tensors: _scale_tables(tensors, scales)


def with_folded_scale(model: spec.Model) -> Equivalent | None:
    """Return the spec whose embedding scale is multiplied into the table; a tied output gets a separate weight.

    The result is None if no table is scaled, or if the uses of a table have different scales.
    """
    scales = _table_scales(model)
    if not scales:
        return None
    other, copies = _without_scale(model), {}
    if model.head is not None:
        layers = list(model.head.layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, spec.Linear) and layer.weight is not None and layer.weight.path in scales:
                layers[index] = layer.model_copy(update={"weight": None})
                copies[f"head.layers.{index}.weight"] = f"{layer.weight.path}.weight"
        other = other.model_copy(update={"head": model.head.model_copy(update={"layers": tuple(layers)})})

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        return _scale_tables(tensors, scales) | {name: tensors[table] for name, table in copies.items()}

    return other, convert


def _table_scales(model: spec.Model) -> dict[str, float]:
    """Return the scale of each scaled embedding table; empty if a table has two scales or a scale is rounded."""
    scales: dict[str, set[float]] = {}
    for name, stack in model.stacks.items():
        table = stack.embedding.table
        owner = table.path if isinstance(table, spec.Reference) else f"{name}.embedding.table"
        scales.setdefault(owner, set()).add(stack.embedding.scale)
        if stack.embedding.scale_rounding != "none":
            return {}
    if any(len(values) > 1 for values in scales.values()):
        return {}
    return {owner: scale for owner, values in scales.items() for scale in values if scale != 1.0}


def _without_scale(model: spec.Model) -> spec.Model:
    return model.model_copy(
        update={
            name: stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"scale": 1.0})})
            for name, stack in model.stacks.items()
        }
    )


def _scale_tables(tensors: Tensors, scales: Mapping[str, float]) -> dict[str, Tensor]:
    return dict(tensors) | {f"{table}.weight": tensors[f"{table}.weight"] * scale for table, scale in scales.items()}


def with_unscaled_scores(model: spec.Model) -> Equivalent | None:
    """Return the spec whose scale of attention scores is multiplied into the query projection.

    The result is None if no scores are scaled, or if a norm, a clip or disentangled scores follow the projection.
    """
    scales: dict[str, float] = {}

    def change(path: str, node: spec.Node) -> spec.Node:
        if not isinstance(node, spec.Attention):
            return node
        scales[path] = node.head_size**-0.5 if node.scale is None else node.scale
        return node.model_copy(update={"scale": 1.0})

    other = spec.map_nodes(model, change)
    attentions = [node for _, node in spec.walk(model) if isinstance(node, spec.Attention)]
    is_linear = all(
        node.query_key_norm is None and node.clip is None and not isinstance(node.score_bias, spec.Disentangled)
        for node in attentions
    )
    if not is_linear or all(scale == 1.0 for scale in scales.values()):
        return None

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        factors = {f"{path}.query.{leaf}": scale for path, scale in scales.items() for leaf in ("weight", "bias")}
        return {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}

    return other, convert


def with_output_bias(model: spec.Model) -> Equivalent | None:
    """Return the spec with a bias of zeros in the head's last layer; None if it is not linear or has a bias."""
    head = model.head
    last = head.layers[-1] if head is not None else None
    if head is None or not isinstance(last, spec.Linear) or last.bias:
        return None
    layers = (*head.layers[:-1], last.model_copy(update={"bias": True}))

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        like = next(iter(tensors.values()))
        zeros = torch.zeros(last.size, dtype=like.dtype, device=like.device)
        return {**tensors, f"head.layers.{len(layers) - 1}.bias": zeros}

    return model.model_copy(update={"head": head.model_copy(update={"layers": layers})}), convert


def with_halves(model: spec.Model) -> Equivalent | None:
    """Return the spec whose sinusoidal positions have all sines before all cosines.

    The result is None if a stack has no interleaved positions, or contains a module that depends on channel order.
    """
    stacks = model.stacks
    if not all(_is_plain(stack) for stack in stacks.values()) or len({stack.width for stack in stacks.values()}) > 1:
        return None
    width = next(iter(stacks.values())).width
    order_D = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    update: dict[str, spec.Stack] = {}
    for name, stack in stacks.items():
        assert isinstance(stack.embedding.position, spec.Sinusoidal), "a plain stack has sinusoidal positions"
        position = stack.embedding.position.model_copy(update={"layout": "halves"})
        update[name] = stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"position": position})})

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        axes, permuted = _stream_axes(model, tensors), dict(tensors)
        for name, tensor in tensors.items():
            for axis in axes.get(name, ()):
                tensor = tensor.index_select(axis, order_D.to(tensor.device))
            permuted[name] = tensor
        return permuted

    return model.model_copy(update=update), convert


def _is_plain(stack: spec.Stack) -> bool:
    """Return whether a stack has interleaved positions, no projection, and no module that depends on channel order."""
    position = stack.embedding.position
    functions = [branch.function for layer in stack.layers for step in layer.steps for branch in step.branches]
    return (
        isinstance(position, spec.Sinusoidal)
        and position.layout == "interleaved"
        and stack.embedding.width is None
        and all(
            isinstance(node, spec.FeedForward)
            or (isinstance(node, spec.Attention) and not isinstance(node.score_bias, spec.Disentangled))
            for node in functions
        )
    )


def _stream_axes(model: spec.Model, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return, by tensor name, the axes whose indices are channels of the residual stream."""
    axes = _head_axes(model)
    for name in names:
        *owner, leaf = name.split(".")
        if owner[0] == "head" or owner[-1] in ("query_norm", "key_norm", "score_table", "score_bias") or leaf == "sink":
            continue
        if owner[-1] in ("table", "segments", "query", "key", "value", "up", "gate"):
            axes |= {name: (1,)} if leaf == "weight" else {}
        else:
            # Last linear layers of branches, and norms on the stream.
            axes[name] = (0,)
    return axes


def _head_axes(model: spec.Model) -> dict[str, tuple[int, ...]]:
    """Return, by name of a tensor of the head, the axes whose indices are channels of the residual stream.

    The tied linear layer, or without one the first linear layer, is the last that reads these channels.
    """
    axes: dict[str, tuple[int, ...]] = {}
    layers = model.head.layers if model.head else ()
    last = max((i for i, layer in enumerate(layers) if isinstance(layer, spec.Linear) and layer.weight), default=-1)
    for index, layer in enumerate(layers):
        address = f"head.layers.{index}"
        if isinstance(layer, spec.Linear) and index >= last:
            axes[f"{address}.weight"] = (1,)
            break
        axes |= {f"{address}.weight": (0, 1) if isinstance(layer, spec.Linear) else (0,), f"{address}.bias": (0,)}
    return axes


CHANGES: tuple[Change, ...] = (
    with_halves,
    with_output_bias,
    with_scaled_output,
    with_folded_scale,
    with_unscaled_scores,
    without_dropout,
)
"""Changes in the order in which they are tried: the smallest changes come first."""


@dataclass(frozen=True)
class _Candidate:
    """A transformers class, and a spec that it may express and that is equivalent to the spec of the module.

    Args:
        family, variant: the family and the class.
        model: the equivalent spec.
        changes: the changes that lead to the equivalent spec.
        config: the config that expresses the spec. None means that there is no such config.
        expressed: the nearest spec that the class can express. None means that no config values fit.
        error: the reason why there is no config.
    """

    family: Family
    variant: Variant
    model: spec.Model
    changes: tuple[Change, ...] = ()
    config: Mapping[str, Any] | None = None
    expressed: spec.Model | None = None
    error: InputError | None = None

    @cached_property
    def differing(self) -> dict[str, tuple[Any, Any]]:
        """Fields that the class cannot express, with the value that it can express and the value of the spec."""
        return {} if self.expressed is None else configs.differing_fields(self.expressed, self.model)

    @property
    def may_become_expressible(self) -> bool:
        """True if further equivalent changes of the spec may remove all differences from what the class expresses."""
        return self.expressed is not None and all(map(_CHANGEABLE.search, self.differing))

    def try_config(self) -> _Candidate:
        """Return the candidate with its config, or with the error that prevents a config."""
        try:
            return replace(self, config=configs.to_config(self.family, self.variant, self.model))
        except InputError as error:
            expressed = error.expressed if isinstance(error, configs.NotExpressible) else None
            return replace(self, expressed=expressed, error=error)

    def apply_best_change(self) -> _Candidate | None:
        """Return the candidate after the change that removes most differences; None if no change removes any."""
        best, fewest = None, len(self.differing)
        for change in CHANGES:
            other = None if self.expressed is None else _find_equivalent(change, self.model)
            if other is None:
                continue
            candidate = replace(self, model=other, changes=(*self.changes, change)).try_config()
            left = 0 if candidate.config is not None else len(candidate.differing) or fewest
            if left < fewest:
                best, fewest = candidate, left
        return best

    def apply_best_changes(self) -> _Candidate:
        """Return the candidate after all changes that remove differences."""
        nearer = self.apply_best_change()
        return self if nearer is None else nearer.apply_best_changes()


@cache
def _find_equivalent(change: Change, model: spec.Model) -> spec.Model | None:
    equivalent = change(model)
    return None if equivalent is None else equivalent[0]


def choose_family(
    module: Transformer, model_type: str | None, task: TaskRecord | None
) -> tuple[Transformer, Family, Variant, dict[str, Any]]:
    """Return an equivalent module, and the family, class and config that express it.

    The module with the fewest changes is chosen; among equals, the first in `list_export_families`.

    Args:
        module: the module.
        model_type: the model type of the only family to try. None means all families.
        task: the task of the module's outputs. None means any task.

    Raises:
        InputError: no family can express the module; the report describes the nearest one.
    """
    for _, node in spec.own_parts(module.spec):
        raise InputError(
            f"no Hugging Face architecture has the custom module '{node.kind}'; "
            "save the model with Model.save(path), which keeps it"
        )
    families = registry.list_export_families() if model_type is None else [registry.all_families()[model_type]]
    candidates, stuck = list[_Candidate](), list[_Candidate]()
    for family in families:
        for variant in _matching_variants(family, task, module.spec):
            candidate = _Candidate(family, variant, module.spec).try_config()
            is_stuck = candidate.config is None and not candidate.may_become_expressible
            (stuck if is_stuck else candidates).append(candidate)
    while candidates:
        for candidate in candidates:
            if candidate.config is not None:
                family, variant = candidate.family, candidate.variant
                equivalent = apply_changes(module, candidate.changes)
                if not bind_rules(family, variant, family.prefix_of(variant), equivalent)[1]:
                    return equivalent, family, variant, dict(candidate.config)
        steps = [(candidate, candidate.apply_best_change()) for candidate in candidates if candidate.config is None]
        stuck += [candidate for candidate, nearer in steps if nearer is None]
        candidates = [nearer for _, nearer in steps if nearer is not None]
    raise _make_report(stuck, is_free=model_type is None)


def _matching_variants(family: Family, task: TaskRecord | None, model: spec.Model) -> list[Variant]:
    """Return the classes of a family that may express a module, those of its task first."""
    if model.head is None:
        return [variant for variant in family.variants if variant.head is no_head]
    if task is None:
        return list(family.variants)
    # A class whose outputs have another form never fits.
    fitting = [
        variant for variant in family.variants if find_task(variant.task).outputs == find_task(task.kind).outputs
    ]
    return sorted(fitting, key=lambda variant: variant.task != task.kind)


def _make_report(stuck: Sequence[_Candidate], *, is_free: bool) -> InputError:
    """Return the error that describes what the nearest family cannot express."""
    known = [candidate for candidate in stuck if candidate.expressed is not None]
    if not known:
        errors = (candidate.error for candidate in stuck if candidate.error is not None)
        return next(errors, InputError("no Hugging Face family has such a model"))
    nearest = min(known, key=lambda candidate: len(candidate.differing)).apply_best_changes()
    name = f"{nearest.family.model_type} ({nearest.variant.classes[0]})"
    lines = _difference_lines(nearest)
    shown = [f"  - {line}" for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"  - and {len(lines) - _MOST_LINES} more")
    if not is_free:
        return InputError(f"{name} cannot express this model:", *shown)
    return InputError(f"no Hugging Face architecture can express this model; the nearest is {name}:", *shown)


def _difference_lines(candidate: _Candidate) -> list[str]:
    """Return one line per spec field that the class cannot express: its value in the model and in the family."""
    differing = candidate.differing
    paths_by_field: dict[str, list[str]] = {}
    for path in [path for path in differing if not _CHANGEABLE.search(path)] or differing:
        node, _, name = path.rpartition(".")
        if name == "kind":
            paths_by_field.setdefault(f"{node.rpartition('.')[2]}.kind", []).append(path)
        elif f"{node}.kind" not in differing:
            # Nodes of different kinds have different fields anyway.
            paths_by_field.setdefault(name, []).append(path)
    lines = []
    for first, *others in paths_by_field.values():
        theirs, ours = differing[first]
        more = f" (and {len(others)} more like it)" if others else ""
        lines.append(
            f"{first}: {configs.format_value(ours)} in this model, {configs.format_value(theirs)} in the family{more}"
        )
    return lines
