"""The class of a family that a module can be saved as, and what a config says about its task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.files.tensor_files import TensorFiles, read_config
from clearhead.checkpoints.hf.loading import LoadedModule
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.family import Family, Variant
from clearhead.checkpoints.hf.pooling import makes_vectors, with_head
from clearhead.core import Transformer
from clearhead.spec import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find

_PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def find_variant(
    config: Mapping[str, Any], module: Transformer, task: TaskRecord, unused: Mapping[str, Tensor], *, pad: int
) -> LoadedModule | None:
    """Return a module as a class of its checkpoint's family; None where the family cannot express it.

    Args:
        config: of the checkpoint that it came from.
        module: the module.
        task: what its outputs are for.
        unused: tensors of the checkpoint that its class does not use.
        pad: the padding id, which the classes that classify need to find the end of a text.
    """
    family = registry.find(config)
    kept = {key: value for key, value in config.items() if key not in ("architectures", "problem_type")}
    kept |= label_config(task)
    if find(task.kind).outputs == "labels" and kept.get("pad_token_id") in (None, -1):
        kept["pad_token_id"] = pad
    variants = sorted(family.variants, key=lambda variant: variant.task != task.kind)
    stacks = module
    if find(task.kind).outputs == "vector" and makes_vectors(module.spec):
        # The pooling is not part of a class, but in files beside the checkpoint.
        stacks, variants = with_head(module, None, {}), [registry.headless(family)]
    variant = next((variant for variant in variants if _is_expressible(family, variant, kept, stacks)), None)
    if variant is None:
        return None
    named = config.get("architectures") or []
    classes = named if named and named[0] in variant.classes else [variant.classes[0]]
    tensors = {name: tensor for name, tensor in unused.items() if variant.leaves_unused(name)}
    prefix = family.saved_prefix(variant)
    return LoadedModule(module, task, {**kept, "architectures": classes}, family, variant, prefix, (), tensors)


def label_config(task: TaskRecord) -> dict[str, Any]:
    """Return the keys of a config for the labels of a task."""
    if find(task.kind).outputs == "span":
        # The classes that find answers count their two scores by the labels of the config.
        return configs.label_names(("LABEL_0", "LABEL_1"))
    if not find(task.kind).has_labels:
        return {}
    names = configs.label_names(task.labels or ("LABEL_0",))
    return names if task.label_kind is None else names | {"problem_type": _PROBLEM_TYPES[task.label_kind]}


def _is_expressible(family: Family, variant: Variant, config: Mapping[str, Any], module: Transformer) -> bool:
    """Whether a class of a family can be this module, with its config or another one."""
    try:
        parsed = configs.parse(family, config)
        if not parsed.faults and not configs.differences(family.spec_of(parsed.values, variant), module.spec):
            return True
        configs.to_config(family, variant, module.spec)
    except InputError:
        return spec_up_to_dropout(family, variant, config, module) is not None
    return True


def spec_up_to_dropout(
    family: Family, variant: Variant, config: Mapping[str, Any], module: Transformer
) -> Model | None:
    """Return the spec of a config, if a module differs from it only in dropout, which does not change its outputs."""
    try:
        expressed = family.spec_of(configs.parse(family, config).values, variant)
    except InputError:
        return None
    differing = configs.differences(expressed, module.spec)
    return expressed if all(".dropout: " in line for line in differing) else None


def task_kind(folder: Path) -> str:
    """Return the task of a checkpoint, without loading its weights.

    Raises:
        InputError: an unknown family or class.
    """
    config = read_config(folder)
    return registry.variant(registry.find(config), config, frozenset(TensorFiles(folder))).task
