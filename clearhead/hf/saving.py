"""A module to a checkpoint's directory: what loading does, undone by the same rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.hf import registry
from clearhead.hf.equivalent_specs import equivalent_modules
from clearhead.hf.files.tensor_files import CONFIG, SINGLE
from clearhead.hf.loading import LoadedModule, bind_rules, hf_tensors
from clearhead.hf.mapping import config as configs
from clearhead.hf.mapping.family import Family, Variant
from clearhead.hf.pooling import makes_vectors, with_head, write_pooling
from clearhead.task import TaskRecord
from clearhead.weights.files import save_shards

# More than there can be differences.
NEVER = 10**9

LARGEST_SHARD = 5_000_000_000


def save_module(
    module: Transformer,
    directory: Path,
    *,
    loaded: LoadedModule | None = None,
    task: TaskRecord | None = None,
    model_type: str | None = None,
    max_shard_size: int = LARGEST_SHARD,
) -> Family:
    """Write config.json and model.safetensors, or several files and an index of them.

    Args:
        module: whose weights are written, in the dtype that they have.
        directory: made where it is missing.
        loaded: as what the module was loaded; brings settings that the spec does not hold, and spare tensors.
        task: names the labels of a head.
        model_type: the family to save as, for a module that was not loaded; None: the first that can say the spec.
        max_shard_size: bytes of tensors in a file.

    Returns:
        the family that was written.

    Raises:
        InputError: no family can say the spec; the report names what the nearest one cannot.
    """
    said = loaded.task if task is None and loaded is not None else task
    if said is not None and said.kind == "embed" and makes_vectors(module.spec):
        return _save_pooled(module, directory, loaded, said, model_type, max_shard_size)
    if loaded is not None:
        record, variant, prefix = loaded.family, loaded.variant, loaded.prefix
        config = _config_as_loaded(module, loaded)
    else:
        module, record, variant, config = _chosen(module, model_type, task)
        prefix = "" if variant.is_bare else record.prefix_of(variant)
    if task is not None and task.labels:
        config["id2label"] = {str(index): label for index, label in enumerate(task.labels)}
        config["label2id"] = {label: index for index, label in enumerate(task.labels)}
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    tensors = module_to_hf_tensors(module, record, variant, prefix, module.state_dict())
    usual = {key.name: key.default for key in record.keys}
    rows: int = config.get(record.rows_key, usual.get(record.rows_key, 0))
    for constant in record.constants if loaded is None else ():
        if not (constant.is_written or variant.is_bare):
            continue
        tensors[prefix + constant.name] = constant.compute(module.spec, rows)
    tensors |= dict(loaded.unused) if loaded is not None else {}
    directory.mkdir(parents=True, exist_ok=True)
    save_shards(directory, tensors, name=SINGLE, max_size=max_shard_size)
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    return record


def _save_pooled(
    module: Transformer,
    directory: Path,
    loaded: LoadedModule | None,
    task: TaskRecord,
    model_type: str | None,
    max_shard_size: int,
) -> Family:
    """Write the stacks as a checkpoint without a head, and the head as the modules beside it."""
    stacks, pooling = with_head(module, None, {}), None
    if loaded is not None:
        pooling = loaded.pooling
        variant = loaded.variant if pooling is not None else registry.headless(loaded.family)
        loaded = replace(loaded, variant=variant, module=stacks, pooling=None)
    record = save_module(stacks, directory, loaded=loaded, model_type=model_type, max_shard_size=max_shard_size)
    write_pooling(directory, module, pooling, max_length=task.max_length)
    return record


def module_to_hf_tensors(
    module: Transformer, record: Family, variant: Variant, prefix: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors that stand at a module's addresses (weights, or their gradients) under the family's names.

    Raises:
        InputError: the family has no name for some of them.
    """
    bounds, unspoken = bind_rules(record, variant, prefix, module)
    if unspoken:
        faults = [f"{record.model_type} has no tensor for '{address}'" for address in unspoken]
        raise InputError.from_faults(faults[:12], subject=f"saving as {record.model_type}")
    is_tied = variant.output is None or variant.output not in {n for b in bounds for g in b.theirs for n in g}
    named: dict[str, Tensor] = {}
    for names, tensor in hf_tensors(bounds, tensors):
        # Where the output is not the table, the classes make of each name a tensor of its own.
        for name in names[:1] if is_tied else names:
            named[name] = tensor.clone() if name != names[0] else tensor
    return named


def _config_as_loaded(module: Transformer, loaded: LoadedModule) -> dict[str, Any]:
    record, variant = loaded.family, loaded.variant
    reading = configs.parse(record, loaded.config)
    if not reading.faults and not configs.differences(record.spec_of(reading.values, variant), module.spec):
        return dict(loaded.config)
    carried = {key: value for key, value in loaded.config.items() if key in configs.INERT or key in record.inert}
    carried.pop("architectures", None)
    return configs.to_config(record, variant, module.spec) | carried


def _chosen(
    module: Transformer, model_type: str | None, task: TaskRecord | None
) -> tuple[Transformer, Family, Variant, dict[str, Any]]:
    """Return the family to save a module as, and the module in a form that this family can say.

    Raises:
        InputError: there is none; the report is of the nearest.
    """
    records = registry.saved_first() if model_type is None else [registry.all_families()[model_type]]
    candidates = [(record, variant) for record in records for variant in _meant(record, task)]
    failures: list[tuple[int, InputError]] = []
    for form in equivalent_modules(module):
        hopeless = []
        for record, variant in candidates:
            try:
                config = configs.to_config(record, variant, form.spec)
                _, unspoken = bind_rules(record, variant, record.prefix_of(variant), form)
            except InputError as error:
                # A family that differs in a few places is nearer than one whose own defaults do not even fit.
                differences = error.num_differences if isinstance(error, configs.NotExpressible) else None
                failures.append((NEVER if differences is None else differences, error))
                # No equal of a model has other stacks.
                hopeless += [(record, variant)] if isinstance(error, configs.DifferentStacks) else []
                continue
            if not unspoken:
                return form, record, variant, config
        candidates = [one for one in candidates if one not in hopeless]
    raise min(failures, key=lambda failure: failure[0])[1]


def _meant(record: Family, task: TaskRecord | None) -> list[Variant]:
    """The variants that a module may be, those of its own task first; bounds of an answer look like two tags."""
    if task is None:
        return list(record.variants)
    fitting = [one for one in record.variants if "answer" not in (one.task, task.kind) or one.task == task.kind]
    return sorted(fitting, key=lambda one: one.task != task.kind)
