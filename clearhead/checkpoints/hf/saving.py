"""Saving of Hugging Face checkpoints: reversed loading rules, and the files of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import read_json_object, write_json
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.checkpoint import TOKENIZER_FILES, HFCheckpoint, copy_files, spec_up_to_dropout
from clearhead.checkpoints.hf.export_family import choose_family
from clearhead.checkpoints.hf.files.tensor_files import SINGLE
from clearhead.checkpoints.hf.generation import GENERATION_CONFIG
from clearhead.checkpoints.hf.loading import LoadedModule, bind_rules, hf_tensors
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.config import label_names
from clearhead.checkpoints.hf.mapping.family import Family, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import BoundRule
from clearhead.checkpoints.hf.pooling import makes_vectors, with_head, write_pooling
from clearhead.checkpoints.hf.tokenizers import load_tokenizers
from clearhead.checkpoints.reference import CONFIG
from clearhead.checkpoints.weights.files import Stream, build_from_tensors, save_shards
from clearhead.core import Transformer
from clearhead.fast.stored import plain_state, refuse_quantized, state_to_save
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.token_roles import TokenRoles
from clearhead.text.tokenizer import Tokenizer

LARGEST_SHARD = 5_000_000_000


def save_checkpoint(
    module: Transformer,
    folder: Path,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint | None,
    *,
    max_shard_size: int = LARGEST_SHARD,
    weights: Stream | None = None,
) -> str:
    """Write a model as a Hugging Face checkpoint.

    Args:
        module: the module to save.
        folder: an empty folder.
        tokenizers: the tokenizers of the model.
        task: the task of the module's outputs.
        hf_checkpoint: the checkpoint that the model came from. None means a model trained with clearhead.
        max_shard_size: the maximum size of the tensors in a file, in bytes.
        weights: a stream of weights by address, for a model that `can_stream`. None means the weights of the module.

    Returns:
        The model type of the family that was written.

    Raises:
        InputError: no family can express the model, or source and target have different tokenizers.
    """
    refuse_quantized(module, "the layout of the hub")
    module = _without_standardization(module, task)
    if hf_checkpoint is not None:
        return _save_again(module, folder, tokenizers, task, hf_checkpoint, max_shard_size, weights)
    if not tokenizers.joint:
        raise InputError("a Hugging Face checkpoint has one tokenizer, this model has two: train with joint = true")
    roles = tokenizers.target.roles
    ids = _token_ids(module, roles)
    family = save_module(module, folder, task=task, token_ids=ids, max_shard_size=max_shard_size)
    special_tokens = SpecialTokens.from_ids(
        () if module.encoder is not None and module.decoder is not None else (roles.bos,),
        () if module.encoder is None else (roles.eos,),
    )
    _write_tokenizer(tokenizers.source, folder, special_tokens)
    if module.decoder is not None:
        # clearhead's generation never returns start and padding tokens either.
        settings = ids | {"suppress_tokens": sorted({roles.bos, roles.pad} - {roles.eos})}
        write_json(folder / GENERATION_CONFIG, settings, is_indented=True)
    return family.model_type


def can_stream(module: Transformer, task: TaskRecord, hf_checkpoint: HFCheckpoint | None) -> bool:
    """Return whether the weights of a model can be written as a stream, without the whole model in memory.

    They can if the family of the model's checkpoint can still express the model. Otherwise saving looks for an
    equivalent model, in which any weight may change.

    Args:
        module: the module, on any device.
        task, hf_checkpoint: same as in `save_checkpoint`.
    """
    is_of_family = hf_checkpoint is not None and hf_checkpoint.loaded is not None
    is_unscaled = (task.number_mean, task.number_scale) == (0.0, 1.0)
    has_pooling = find_task(task.kind).outputs == "vector" and makes_vectors(module.spec)
    return is_of_family and is_unscaled and not has_pooling


def _save_again(
    module: Transformer,
    folder: Path,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint,
    max_shard_size: int,
    weights: Stream | None,
) -> str:
    """Write a model in the family of its checkpoint; the tokenizer files are copied if the tokenizer is unchanged."""
    model_type, loaded = str(hf_checkpoint.config.get("model_type")), hf_checkpoint.loaded
    module = _with_expressible_dropout(module, loaded)
    save_module(
        module,
        folder,
        loaded=loaded,
        task=task,
        model_type=model_type,
        max_shard_size=max_shard_size,
        weights=weights,
    )
    copy_files(hf_checkpoint.folder, folder)
    if _fingerprints(tokenizers) != _fingerprints(load_tokenizers(hf_checkpoint.folder).pair):
        if not tokenizers.joint:
            raise InputError(
                "a Hugging Face checkpoint has one tokenizer.json, but this model has two changed tokenizers: "
                "train with joint = true"
            )
        for name in TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
        _write_tokenizer(tokenizers.source, folder, tokenizers.source.special_tokens)
    return model_type


def _without_standardization(module: Transformer, task: TaskRecord) -> Transformer:
    """Return a regression module whose last layer includes the mean and scale of its labels, which no config holds.

    Raises:
        InputError: the last layer has no bias, which the mean needs.
    """
    if (task.number_mean, task.number_scale) == (0.0, 1.0):
        return module
    assert module.spec.head is not None, "a model that predicts numbers has a head"
    last = f"head.layers.{len(module.spec.head.layers) - 1}"
    tensors = plain_state(module)
    if f"{last}.bias" not in tensors:
        raise InputError(
            f"the last layer has no bias, in which a Hugging Face checkpoint stores the mean {task.number_mean:g} of "
            "the labels: save it with Model.save(path)"
        )
    tensors[f"{last}.weight"] = tensors[f"{last}.weight"] * task.number_scale
    tensors[f"{last}.bias"] = tensors[f"{last}.bias"] * task.number_scale + task.number_mean
    return build_from_tensors(module.spec, tensors)


def _with_expressible_dropout(module: Transformer, loaded: LoadedModule | None) -> Transformer:
    """Return the module, with the dropout of the loaded config if the family has no config for the module's dropout."""
    if loaded is None:
        return module
    try:
        configs.to_config(loaded.family, loaded.variant, module.spec)
    except InputError:
        expressed = spec_up_to_dropout(loaded.family, loaded.variant, loaded.config, module)
        if expressed is not None and expressed != module.spec:
            return build_from_tensors(expressed, module.state_dict())
    return module


def _fingerprints(tokenizers: TokenizerPair) -> list[str]:
    """Return the fingerprints of tokenizers, without regard to special tokens."""
    return [
        tokenizer.with_special_tokens(SpecialTokens()).fingerprint
        for tokenizer in (tokenizers.source, tokenizers.target)
    ]


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, special_tokens: SpecialTokens) -> None:
    """Write a tokenizer.json with a template for special tokens.

    Raises:
        InputError: a tokenizer.json cannot contain this kind of tokenizer.
    """
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    document = read_json_object(path, what="a tokenizer.json")
    if "added_tokens" not in document:
        raise InputError(
            "the tokenizer runs a SentencePiece model, which a tokenizer.json cannot contain: save it with "
            "Model.save(path)"
        )
    entries = {token["id"]: token["content"] for token in document["added_tokens"]}
    single, pair = special_tokens.single, special_tokens.pair or (*special_tokens.single, ("B", 1))
    ids = {item for item, _ in (*single, *pair) if not isinstance(item, str)}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [_template_item(item, segment, entries) for item, segment in single],
        "pair": [_template_item(item, segment, entries) for item, segment in pair],
        "special_tokens": {
            entries[index]: {"id": entries[index], "ids": [index], "tokens": [entries[index]]} for index in sorted(ids)
        },
    }
    write_json(path, document)
    config_path = path.with_name("tokenizer_config.json")
    config = read_json_object(config_path, what="a tokenizer_config.json")
    del config["clearhead"]
    write_json(config_path, config, is_indented=True)


def _template_item(item: int | str, segment: int, entries: Mapping[int, str]) -> dict[str, Any]:
    if isinstance(item, str):
        return {"Sequence": {"id": item, "type_id": segment}}
    return {"SpecialToken": {"id": entries[item], "type_id": segment}}


def _token_ids(module: Transformer, roles: TokenRoles) -> dict[str, int]:
    """Return the special token ids by config key; classifiers find the end of a text by the padding id."""
    ids = {"bos_token_id": roles.bos, "eos_token_id": roles.eos, "pad_token_id": roles.pad}
    has_both = module.encoder is not None and module.decoder is not None
    return ids | ({"decoder_start_token_id": roles.bos} if has_both else {})


def save_module(
    module: Transformer,
    directory: Path,
    *,
    loaded: LoadedModule | None = None,
    task: TaskRecord | None = None,
    model_type: str | None = None,
    token_ids: Mapping[str, int] = MappingProxyType({}),
    max_shard_size: int = LARGEST_SHARD,
    weights: Stream | None = None,
) -> Family:
    """Write config.json and model.safetensors, or several shards and their index.

    Args:
        module: the module to save; weights keep their dtype.
        directory: the folder, created if it is missing.
        loaded: the loaded module, with settings that are not in the spec, and unused tensors. None means a new module.
        task: the task of the module, whose labels are written. None means the task of `loaded`.
        model_type: the family to write if `loaded` is None. None means the first family that can express the spec.
        token_ids: the ids of padding, start and end by their config keys; only used if `loaded` is None.
        max_shard_size: the maximum size of the tensors in a file, in bytes.
        weights: a stream of weights by address. None means the weights of the module.

    Returns:
        The family that was written.

    Raises:
        InputError: no family can express the spec; the report lists the differences to the nearest.
    """
    saved_task = loaded.task if task is None and loaded is not None else task
    if saved_task is not None and find_task(saved_task.kind).outputs == "vector" and makes_vectors(module.spec):
        return _save_pooled(module, directory, loaded, saved_task, model_type, token_ids, max_shard_size)
    if loaded is not None:
        family, variant, prefix = loaded.family, loaded.variant, loaded.prefix
        config = _config_as_loaded(module, loaded)
    else:
        module, family, variant, config = choose_family(module, model_type, task)
        prefix = family.prefix_to_save(variant)
        # If positions begin after the padding id, the spec determines this id.
        config |= {name: index for name, index in token_ids.items() if name not in {key.name for key in family.keys}}
    if task is not None and task.labels:
        config |= label_names(task.labels)
    state = state_to_save(module)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    tensors = module_to_hf_tensors(module, family, variant, prefix, state)
    if loaded is not None:
        tensors |= loaded.unused
    else:
        defaults = {key.name: key.default for key in family.keys}
        rows: int = config.get(family.rows_key, defaults.get(family.rows_key, 0))
        for constant in family.constants:
            if constant.is_written or variant.is_bare:
                tensors[prefix + constant.name] = constant.compute(module.spec, rows)
    directory.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        weights = _rename_stream(weights, module, family, variant, prefix, tensors)
    save_shards(directory, tensors, name=SINGLE, max_size=max_shard_size, stream=weights)
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
    """Write the stacks as a checkpoint without a head, and the head as modules of sentence-transformers."""
    stacks, pooling = with_head(module, None, {}), None
    if loaded is not None:
        pooling = loaded.pooling
        variant = loaded.variant if pooling is not None else registry.headless_variant(loaded.family)
        loaded = replace(loaded, variant=variant, module=stacks, pooling=None)
    family = save_module(
        stacks, directory, loaded=loaded, model_type=model_type, token_ids=token_ids, max_shard_size=max_shard_size
    )
    write_pooling(directory, module, pooling, max_length=task.max_length, prompt=task.prompt)
    return family


def module_to_hf_tensors(
    module: Transformer, family: Family, variant: Variant, prefix: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert a module's weights or gradients, by address, to checkpoint tensors by the family's names.

    Raises:
        InputError: the family has no name for some addresses.
    """
    named: dict[str, Tensor] = {}
    bounds, is_tied = _bind_all(module, family, variant, prefix)
    for names, tensor in hf_tensors(bounds, tensors):
        # If the output is not tied, the classes have a separate tensor for each name.
        for name in names[:1] if is_tied else names:
            named[name] = tensor.clone() if name != names[0] else tensor
    return named


def _bind_all(module: Transformer, family: Family, variant: Variant, prefix: str) -> tuple[list[BoundRule], bool]:
    """Return the rules of all weights of a module, and whether the output is tied.

    Raises:
        InputError: the family has no name for some of the weights.
    """
    bounds, without_rule = bind_rules(family, variant, prefix, module)
    if without_rule:
        faults = [f"{family.model_type} has no tensor for '{address}'" for address in without_rule]
        raise InputError.from_faults(faults[:12], subject=f"saving as {family.model_type}")
    return bounds, variant.output is None or variant.output not in {n for b in bounds for g in b.theirs for n in g}


def _rename_stream(
    weights: Stream,
    module: Transformer,
    family: Family,
    variant: Variant,
    prefix: str,
    tensors: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Convert a stream of weights to a stream of the checkpoint's tensors.

    Args:
        weights: a stream of weights by address. Weights of one rule stay in memory until all of them have come.
        module, family, variant, prefix: same as in `module_to_hf_tensors`.
        tensors: all tensors by name; those that no weight fills are yielded at the end.
    """
    bounds, is_tied = _bind_all(module, family, variant, prefix)
    rules = {address: bound for bound in bounds for address in bound.ours}
    waiting, written = dict[str, Tensor](), set[str]()
    for address, weight in weights:
        waiting[address] = weight
        bound = rules[address]
        if all(other in waiting for other in bound.ours):
            ours = [waiting.pop(other) for other in bound.ours]
            for names, tensor in zip(bound.theirs, bound.save(ours), strict=True):
                for name in names[:1] if is_tied else names:
                    written.add(name)
                    yield name, tensor
    yield from ((name, tensor) for name, tensor in tensors.items() if name not in written)


def _config_as_loaded(module: Transformer, loaded: LoadedModule) -> dict[str, Any]:
    family, variant = loaded.family, loaded.variant
    parsed = configs.parse(family, loaded.config)
    if not parsed.faults:
        expressed, length = family.spec_of(parsed.values, variant), module.spec.declared_length
        if not configs.differences(expressed, module.spec) and length in (None, expressed.declared_length):
            return dict(loaded.config)
    inert = (configs.INERT | set(family.inert)) - {"architectures"}
    inert_values = {key: value for key, value in loaded.config.items() if key in inert}
    return configs.to_config(family, variant, module.spec) | inert_values
