"""A model in files: in our own layout, with what is left of the checkpoint that it came from, or in that of the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.files import read_json_object
from clearhead.hf.checkpoint import (
    SETTINGS,
    HFCheckpoint,
    find_variant_for,
    read_generation_config,
    spec_of_config,
    with_decoder_tokens,
)
from clearhead.hf.loading import LoadedModule
from clearhead.hf.mapping.config import to_config
from clearhead.hf.saving import LARGEST_SHARD, save_module
from clearhead.hf.tokenizers import load_tokenizers
from clearhead.task import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import Part, SpecialTokens
from clearhead.text.token_roles import TokenRoles
from clearhead.text.tokenizer import Tokenizer
from clearhead.weights.files import load_tensors, save_tensors
from clearhead.weights.fill import built

ORIGIN = "origin"
"""The folder of a run or of a saved model that holds what its checkpoint said beside the weights."""

_CONFIG, _SPARE = "config.json", "spare.safetensors"
# What belongs to a tokenizer or to generation, and is copied as it is when a checkpoint is saved again.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "target_vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model",
    "tokenizer.model", "sentencepiece.model", "source.spm", "target.spm", "chat_template.jinja", SETTINGS,
)  # fmt: skip


def save_origin(hf_checkpoint: HFCheckpoint, folder: Path) -> None:
    """Write what a checkpoint says beside its weights into the folder of a model that came from it.

    Args:
        hf_checkpoint: the checkpoint.
        folder: of the model.
    """
    origin = folder / ORIGIN
    origin.mkdir(parents=True, exist_ok=True)
    (origin / _CONFIG).write_text(json.dumps(dict(hf_checkpoint.config), indent=2, sort_keys=True) + "\n", "utf-8")
    copy_files(hf_checkpoint.folder, origin)
    spare = {} if hf_checkpoint.loaded is None else dict(hf_checkpoint.loaded.unused)
    if spare:
        save_tensors(origin / _SPARE, spare)


def load_origin(folder: Path, module: Transformer, task: TaskRecord, tokenizers: TokenizerPair) -> HFCheckpoint | None:
    """Read what `save_origin` wrote; None where a model was trained here from the beginning.

    Args:
        folder: of the model.
        module: the model.
        task: what its outputs are for.
        tokenizers: of the model, which win over those of the checkpoint.

    Raises:
        InputError: files are missing or damaged.
    """
    origin = folder / ORIGIN
    if not origin.is_dir():
        return None
    config = read_json_object(origin / _CONFIG, what="a config.json")
    rules = read_generation_config(origin)
    text = replace(with_decoder_tokens(load_tokenizers(origin), rules, module), pair=tokenizers)
    spare = load_tensors(origin / _SPARE) if (origin / _SPARE).is_file() else {}
    return HFCheckpoint(
        origin, text, rules, config, find_variant_for(config, module, task, spare, pad=tokenizers.source.pad_id)
    )


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint's tokenizer and generation as they are.

    Args:
        source: of the checkpoint.
        target: an empty folder.
    """
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def save_checkpoint(
    module: Transformer,
    folder: Path,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint | None,
    *,
    max_shard_size: int = LARGEST_SHARD,
) -> str:
    """Write a model in the layout of the Hugging Face hub.

    Args:
        module: whose weights are written.
        folder: an empty one.
        tokenizers: of the model.
        task: what its outputs are for.
        hf_checkpoint: the checkpoint that it was; None: a model that was trained here.
        max_shard_size: bytes of tensors in a file.

    Returns:
        The family that was written.

    Raises:
        InputError: no family can say the model, or it has a tokenizer for each side.
    """
    module = _in_units(module, task)
    if hf_checkpoint is not None:
        return _save_as_it_came(module, folder, tokenizers, task, hf_checkpoint, max_shard_size)
    if not tokenizers.joint:
        raise InputError(
            "source and target have a tokenizer each, for which the layout has no place: train with joint = true"
        )
    record = save_module(module, folder, task=task, max_shard_size=max_shard_size)
    source, roles = tokenizers.source, tokenizers.target.roles
    start = () if module.encoder is not None and module.decoder is not None else ((roles.bos, 0),)
    end = () if module.encoder is None else (roles.eos,)
    single: tuple[Part, ...] = (*start, ("A", 0), *((index, 0) for index in end))
    pair: tuple[Part, ...] = (*single, ("B", 1), *((index, 1) for index in end))
    _write_tokenizer(source, folder, SpecialTokens(single, pair))
    _write_settings(folder / SETTINGS, module, roles)
    return record.model_type


def _save_as_it_came(
    module: Transformer,
    folder: Path,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint,
    max_shard_size: int,
) -> str:
    """Write a model in the family of its checkpoint, with the files of its tokenizer if it still has that one."""
    family = str(hf_checkpoint.config.get("model_type"))
    written = _as_the_family_says(module, hf_checkpoint.loaded)
    record = save_module(
        written, folder, loaded=hf_checkpoint.loaded, task=task, model_type=family, max_shard_size=max_shard_size
    )
    copy_files(hf_checkpoint.folder, folder)
    if _plain(tokenizers) == _plain(load_tokenizers(hf_checkpoint.folder).pair):
        return record.model_type
    if not tokenizers.joint:
        raise InputError("the tokenizers are others than those of the checkpoint, and the layout has one file for both")
    for name in _COPIED:
        if name not in (SETTINGS, "chat_template.jinja"):
            (folder / name).unlink(missing_ok=True)
    _write_tokenizer(tokenizers.source, folder, tokenizers.source.special_tokens)
    return record.model_type


def _in_units(module: Transformer, task: TaskRecord) -> Transformer:
    """Return a module whose head gives numbers in their own unit: the layout has no place for that of the training.

    Raises:
        InputError: the last map has no bias that could hold the mean.
    """
    if task.label_kind != "regression" or (task.number_mean, task.number_scale) == (0.0, 1.0):
        return module
    assert module.spec.head is not None, "a model that gives numbers has a head"
    last = f"head.layers.{len(module.spec.head.layers) - 1}"
    tensors = dict(module.state_dict())
    if f"{last}.bias" not in tensors:
        raise InputError(
            f"this model gives numbers as differences from {task.number_mean:g}, and its last map has no bias to add it"
        )
    tensors[f"{last}.weight"] = tensors[f"{last}.weight"] * task.number_scale
    tensors[f"{last}.bias"] = tensors[f"{last}.bias"] * task.number_scale + task.number_mean
    return built(module.spec, tensors)


def _as_the_family_says(module: Transformer, loaded: LoadedModule | None) -> Transformer:
    """Return the module with dropout as its config has it, where the family cannot say that of its last training."""
    if loaded is None:
        return module
    try:
        to_config(loaded.family, loaded.variant, module.spec)
    except InputError:
        said = spec_of_config(loaded.family, loaded.variant, loaded.config, module)
        if said is not None and said != module.spec:
            return built(said, module.state_dict())
    return module


def _plain(tokenizers: TokenizerPair) -> list[str]:
    """Return what tells tokenizers from others, whatever stands around their texts."""
    return [one.with_special_tokens(SpecialTokens()).fingerprint for one in (tokenizers.source, tokenizers.target)]


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, special_tokens: SpecialTokens) -> None:
    """Write a tokenizer.json with what is read around a text, so that others do the same.

    Raises:
        InputError: the tokenizer is of a kind that no tokenizer.json can hold.
    """
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    document = read_json_object(path, what="a tokenizer.json")
    if "added_tokens" not in document:
        raise InputError("the tokenizer runs a SentencePiece model, which a changed tokenizer.json cannot hold")
    entries = {token["id"]: token["content"] for token in document["added_tokens"]}
    single, pair = special_tokens.single, special_tokens.pair or (*special_tokens.single, ("B", 1))
    ids = {part for part, _ in (*single, *pair) if not isinstance(part, str)}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [_template_part(part, segment, entries) for part, segment in single],
        "pair": [
            _template_part(part, segment, entries)
            for part, segment in special_tokens.pair or (*special_tokens.single, ("B", 1))
        ],
        "special_tokens": {
            entries[index]: {"id": entries[index], "ids": [index], "tokens": [entries[index]]} for index in sorted(ids)
        },
    }
    path.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    config_path = path.with_name("tokenizer_config.json")
    config = read_json_object(config_path, what="a tokenizer_config.json")
    del config["clearhead"]
    config_path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _template_part(part: int | str, segment: int, entries: Mapping[int, str]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"Sequence": {"id": part, "type_id": segment}}
    return {"SpecialToken": {"id": entries[part], "type_id": segment}}


def _write_settings(path: Path, module: Transformer, roles: TokenRoles) -> None:
    if module.decoder is None:
        return
    settings: dict[str, Any] = {"bos_token_id": roles.bos, "eos_token_id": roles.eos, "pad_token_id": roles.pad}
    # Start and padding are no text: our own generation never gives them.
    settings["suppress_tokens"] = sorted({roles.bos, roles.pad} - {roles.eos})
    if module.encoder is not None:
        settings["decoder_start_token_id"] = roles.bos
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
