"""A module to a Hugging Face checkpoint: loading reversed, by the same rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import write_json
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.choice import choose_family
from clearhead.checkpoints.hf.files.folder import CONFIG
from clearhead.checkpoints.hf.files.tensor_files import SINGLE
from clearhead.checkpoints.hf.loading import LoadedModule, bind_rules, hf_tensors
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.config import label_names
from clearhead.checkpoints.hf.mapping.family import Family, Variant
from clearhead.checkpoints.hf.pooling import makes_vectors, with_head, write_pooling
from clearhead.checkpoints.weights.files import save_shards
from clearhead.core import Transformer
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find

LARGEST_SHARD = 5_000_000_000


def save_module(
    module: Transformer,
    directory: Path,
    *,
    loaded: LoadedModule | None = None,
    task: TaskRecord | None = None,
    model_type: str | None = None,
    token_ids: Mapping[str, int] = MappingProxyType({}),
    max_shard_size: int = LARGEST_SHARD,
) -> Family:
    """Write config.json and model.safetensors, or several files and an index of them.

    Args:
        module: whose weights are written, in the dtype that they have.
        directory: made where it is missing.
        loaded: the module as it was loaded; brings settings that are not in the spec, and unused tensors.
        task: names the labels of a head.
        model_type: the family to save as, for a module that was not loaded; None: the first that can express the spec.
        token_ids: of padding, start and end by their keys of a config, for a module that was not loaded.
        max_shard_size: bytes of tensors in a file.

    Returns:
        The family that was written.

    Raises:
        InputError: no family can express the spec; the report lists the differences to the nearest.
    """
    saved_task = loaded.task if task is None and loaded is not None else task
    if saved_task is not None and find(saved_task.kind).outputs == "vector" and makes_vectors(module.spec):
        return _save_pooled(module, directory, loaded, saved_task, model_type, token_ids, max_shard_size)
    if loaded is not None:
        family, variant, prefix = loaded.family, loaded.variant, loaded.prefix
        config = _config_as_loaded(module, loaded)
    else:
        module, family, variant, config = choose_family(module, model_type, task)
        prefix = family.saved_prefix(variant)
        # Where positions begin after the padding id, the spec decides it.
        config |= {name: index for name, index in token_ids.items() if name not in {key.name for key in family.keys}}
    if task is not None and task.labels:
        config |= label_names(task.labels)
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    tensors = module_to_hf_tensors(module, family, variant, prefix, module.state_dict())
    if loaded is not None:
        tensors |= loaded.unused
    else:
        defaults = {key.name: key.default for key in family.keys}
        rows: int = config.get(family.rows_key, defaults.get(family.rows_key, 0))
        for constant in family.constants:
            if constant.is_written or variant.is_bare:
                tensors[prefix + constant.name] = constant.compute(module.spec, rows)
    directory.mkdir(parents=True, exist_ok=True)
    save_shards(directory, tensors, name=SINGLE, max_size=max_shard_size)
    write_json(directory / CONFIG, config, is_indented=True)
    return family


def _save_pooled(
    module: Transformer,
    directory: Path,
    loaded: LoadedModule | None,
    task: TaskRecord,
    model_type: str | None,
    token_ids: Mapping[str, int],
    max_shard_size: int,
) -> Family:
    """Write the stacks as a checkpoint without a head, and the head as the modules beside it."""
    stacks, pooling = with_head(module, None, {}), None
    if loaded is not None:
        pooling = loaded.pooling
        variant = loaded.variant if pooling is not None else registry.headless(loaded.family)
        loaded = replace(loaded, variant=variant, module=stacks, pooling=None)
    family = save_module(
        stacks, directory, loaded=loaded, model_type=model_type, token_ids=token_ids, max_shard_size=max_shard_size
    )
    write_pooling(directory, module, pooling, max_length=task.max_length, prompt=task.prompt)
    return family


def module_to_hf_tensors(
    module: Transformer, family: Family, variant: Variant, prefix: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors by a module's addresses (weights, or their gradients) by the family's names.

    Raises:
        InputError: the family has no name for some of them.
    """
    bounds, without_rule = bind_rules(family, variant, prefix, module)
    if without_rule:
        faults = [f"{family.model_type} has no tensor for '{address}'" for address in without_rule]
        raise InputError.from_faults(faults[:12], subject=f"saving as {family.model_type}")
    is_tied = variant.output is None or variant.output not in {n for b in bounds for g in b.theirs for n in g}
    named: dict[str, Tensor] = {}
    for names, tensor in hf_tensors(bounds, tensors):
        # Where the output is not tied, the classes have a separate tensor for each name.
        for name in names[:1] if is_tied else names:
            named[name] = tensor.clone() if name != names[0] else tensor
    return named


def _config_as_loaded(module: Transformer, loaded: LoadedModule) -> dict[str, Any]:
    family, variant = loaded.family, loaded.variant
    parsed = configs.parse(family, loaded.config)
    if not parsed.faults:
        expressed, length = family.spec_of(parsed.values, variant), module.spec.declared_length
        if not configs.differences(expressed, module.spec) and length in (None, expressed.declared_length):
            return dict(loaded.config)
    inert = (configs.INERT | set(family.inert)) - {"architectures"}
    kept = {key: value for key, value in loaded.config.items() if key in inert}
    return configs.to_config(family, variant, module.spec) | kept
