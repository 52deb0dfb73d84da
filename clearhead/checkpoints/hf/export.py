"""A model in files: what remains of its checkpoint beside our own layout, or the whole as a Hugging Face checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.base.errors import InputError
from clearhead.base.files import read_json_object, refuse_link_out, write_json
from clearhead.checkpoints.hf.checkpoint import HFCheckpoint, with_decoder_tokens
from clearhead.checkpoints.hf.files.folder import CONFIG, inside
from clearhead.checkpoints.hf.files.tensor_files import read_config
from clearhead.checkpoints.hf.generation import GENERATION_CONFIG, read_generation_config
from clearhead.checkpoints.hf.loading import LoadedModule
from clearhead.checkpoints.hf.mapping.config import to_config
from clearhead.checkpoints.hf.saving import LARGEST_SHARD, save_module
from clearhead.checkpoints.hf.tokenizers import load_tokenizers
from clearhead.checkpoints.hf.variants import find_variant, spec_up_to_dropout
from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.checkpoints.weights.fill import built
from clearhead.core import Transformer
from clearhead.fast.int8 import refuse_int8
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.token_roles import TokenRoles
from clearhead.text.tokenizer import Tokenizer

ORIGIN = "origin"
"""The folder of a run or of a saved model with the other files of its checkpoint."""

_UNUSED = "unused.safetensors"
# Files of a tokenizer or of generation, which are copied unchanged when a checkpoint is saved again.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "target_vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "spm.model",
    "tokenizer.model", "sentencepiece.model", "source.spm", "target.spm",
)  # fmt: skip
_OTHER_FILES = ("chat_template.jinja", GENERATION_CONFIG)


def save_origin(hf_checkpoint: HFCheckpoint, folder: Path) -> None:
    """Write the other files of a checkpoint into the folder of a model that came from it.

    Args:
        hf_checkpoint: the checkpoint.
        folder: of the model.
    """
    origin = folder / ORIGIN
    origin.mkdir(parents=True, exist_ok=True)
    write_json(origin / CONFIG, dict(hf_checkpoint.config), is_indented=True)
    copy_files(hf_checkpoint.folder, origin)
    if hf_checkpoint.loaded is not None and hf_checkpoint.loaded.unused:
        save_tensors(origin / _UNUSED, hf_checkpoint.loaded.unused)


def load_origin(folder: Path, module: Transformer, task: TaskRecord, tokenizers: TokenizerPair) -> HFCheckpoint | None:
    """Read what `save_origin` wrote; None for a model that was trained here from the beginning.

    Args:
        folder: of the model.
        module: the model.
        task: what its outputs are for.
        tokenizers: of the model, in place of the checkpoint's.

    Raises:
        InputError: files are missing or damaged.
    """
    origin = folder / ORIGIN
    refuse_link_out(origin, folder)
    if not origin.is_dir():
        return None
    config, generation_config = read_config(origin), read_generation_config(origin, module)
    own = replace(with_decoder_tokens(load_tokenizers(origin), generation_config, module), pair=tokenizers)
    unused = load_tensors(origin / _UNUSED) if (origin / _UNUSED).is_file() else {}
    loaded = find_variant(config, module, task, unused, pad=tokenizers.source.pad_id)
    return HFCheckpoint(origin, own, generation_config, config, loaded)


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint's tokenizer and generation unchanged.

    Args:
        source: of the checkpoint.
        target: an empty folder.
    """
    for name in (*_TOKENIZER_FILES, *_OTHER_FILES):
        if (source / name).is_file():
            shutil.copyfile(inside(source, name), target / name)


def save_checkpoint(
    module: Transformer,
    folder: Path,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint | None,
    *,
    max_shard_size: int = LARGEST_SHARD,
) -> str:
    """Write a model as a Hugging Face checkpoint.

    Args:
        module: whose weights are written.
        folder: an empty one.
        tokenizers: of the model.
        task: what its outputs are for.
        hf_checkpoint: the checkpoint that it came from; None: a model that was trained here.
        max_shard_size: bytes of tensors in a file.

    Returns:
        The model type of the family that was written.

    Raises:
        InputError: no family can express the model, or it has two tokenizers.
    """
    refuse_int8(module, "the layout of the hub")
    module = _in_units(module, task)
    if hf_checkpoint is not None:
        return _save_again(module, folder, tokenizers, task, hf_checkpoint, max_shard_size)
    if not tokenizers.joint:
        raise InputError("a Hugging Face checkpoint has one tokenizer, and this model two: train with joint = true")
    roles = tokenizers.target.roles
    ids = _token_ids(module, roles)
    family = save_module(module, folder, task=task, token_ids=ids, max_shard_size=max_shard_size)
    special_tokens = SpecialTokens.from_ids(
        () if module.encoder is not None and module.decoder is not None else (roles.bos,),
        () if module.encoder is None else (roles.eos,),
    )
    _write_tokenizer(tokenizers.source, folder, special_tokens)
    if module.decoder is not None:
        # Our own generation never returns start and padding tokens either.
        settings = ids | {"suppress_tokens": sorted({roles.bos, roles.pad} - {roles.eos})}
        write_json(folder / GENERATION_CONFIG, settings, is_indented=True)
    return family.model_type


def _save_again(
    module: Transformer,
    folder: Path,
    tokenizers: TokenizerPair,
    task: TaskRecord,
    hf_checkpoint: HFCheckpoint,
    max_shard_size: int,
) -> str:
    """Write a model in the family of its checkpoint, with the files of its tokenizer if that is unchanged."""
    model_type, loaded = str(hf_checkpoint.config.get("model_type")), hf_checkpoint.loaded
    module = _with_expressible_dropout(module, loaded)
    save_module(module, folder, loaded=loaded, task=task, model_type=model_type, max_shard_size=max_shard_size)
    copy_files(hf_checkpoint.folder, folder)
    if _fingerprints(tokenizers) != _fingerprints(load_tokenizers(hf_checkpoint.folder).pair):
        if not tokenizers.joint:
            raise InputError("the two tokenizers differ from the checkpoint's, and a checkpoint has one file for both")
        for name in _TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
        _write_tokenizer(tokenizers.source, folder, tokenizers.source.special_tokens)
    return model_type


def _in_units(module: Transformer, task: TaskRecord) -> Transformer:
    """Return a module that predicts numbers without standardization, because a config has no place for the scale.

    Raises:
        InputError: the last layer has no bias for the mean.
    """
    if (task.number_mean, task.number_scale) == (0.0, 1.0):
        return module
    assert module.spec.head is not None, "a model that predicts numbers has a head"
    last = f"head.layers.{len(module.spec.head.layers) - 1}"
    tensors = dict(module.state_dict())
    if f"{last}.bias" not in tensors:
        raise InputError(
            f"the outputs of this model are differences from {task.number_mean:g}, and its last layer has no bias to "
            "add it to"
        )
    tensors[f"{last}.weight"] = tensors[f"{last}.weight"] * task.number_scale
    tensors[f"{last}.bias"] = tensors[f"{last}.bias"] * task.number_scale + task.number_mean
    return built(module.spec, tensors)


def _with_expressible_dropout(module: Transformer, loaded: LoadedModule | None) -> Transformer:
    """Return the module with the dropout of its config, where the family cannot express that of the last training."""
    if loaded is None:
        return module
    try:
        to_config(loaded.family, loaded.variant, module.spec)
    except InputError:
        expressed = spec_up_to_dropout(loaded.family, loaded.variant, loaded.config, module)
        if expressed is not None and expressed != module.spec:
            return built(expressed, module.state_dict())
    return module


def _fingerprints(tokenizers: TokenizerPair) -> list[str]:
    """Return the fingerprints of tokenizers, whatever their special tokens."""
    return [one.with_special_tokens(SpecialTokens()).fingerprint for one in (tokenizers.source, tokenizers.target)]


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, special_tokens: SpecialTokens) -> None:
    """Write a tokenizer.json with a template for special tokens.

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
        "pair": [_template_part(part, segment, entries) for part, segment in pair],
        "special_tokens": {
            entries[index]: {"id": entries[index], "ids": [index], "tokens": [entries[index]]} for index in sorted(ids)
        },
    }
    write_json(path, document)
    config_path = path.with_name("tokenizer_config.json")
    config = read_json_object(config_path, what="a tokenizer_config.json")
    del config["clearhead"]
    write_json(config_path, config, is_indented=True)


def _template_part(part: int | str, segment: int, entries: Mapping[int, str]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"Sequence": {"id": part, "type_id": segment}}
    return {"SpecialToken": {"id": entries[part], "type_id": segment}}


def _token_ids(module: Transformer, roles: TokenRoles) -> dict[str, int]:
    """Return the ids that a config names; a class that labels texts finds their ends by that of the padding."""
    ids = {"bos_token_id": roles.bos, "eos_token_id": roles.eos, "pad_token_id": roles.pad}
    has_both = module.encoder is not None and module.decoder is not None
    return ids | ({"decoder_start_token_id": roles.bos} if has_both else {})
