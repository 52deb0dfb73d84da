"""Reading of nanoGPT's `ckpt.pt`: a module, its tokenizer, and the files that a saved model keeps of its origin.

A nanoGPT model is GPT-2 with the exact GELU, matrices stored as [out, in], and optional biases. A file of nanochat has
the same ending; it is refused, with the modules that the core lacks.

Source: the names and settings of nanoGPT and nanochat, read from their released code.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.base.files import convert_json, file_inside, write_json
from clearhead.checkpoints.hf.checkpoint import TOKENIZER_FILES, HFCheckpoint, find_variant, with_decoder_tokens
from clearhead.checkpoints.hf.families import gpt2
from clearhead.checkpoints.hf.files.from_bin import load_pickle, read_plain_pickle, read_tables
from clearhead.checkpoints.hf.generation import GENERATION_CONFIG, read_generation_config
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, Transpose, bind
from clearhead.checkpoints.hf.tokenizers import CheckpointTokenizers, load_tokenizers
from clearhead.checkpoints.reference import CONFIG
from clearhead.checkpoints.weights.files import build_from_tensors
from clearhead.core import Transformer, build
from clearhead.spec.base import MAX_LAYERS, MAX_SIZE, Rate
from clearhead.spec.presets.hyperparameters import build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import tokenizer_of_characters

CHECKPOINT: Final = "ckpt.pt"
META: Final = "meta.pkl"
TASK: Final = TaskRecord(kind="generate")
_COMPILED = "_orig_mod."  # torch.compile adds it to the names of tensors
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")  # the causal mask, which older versions stored
_HEAD, _TABLE = "lm_head.weight", "transformer.wte.weight"
# Logit bias of the rows for "<unk>" and "</s>": their probability is 0 in fp32, and training can still raise it.
_NEVER = -100.0
# Patterns of the tensors of nanochat's files, and the modules that they belong to.
_NANOCHAT: Final = {
    r"value_embeds\.|.*\.ve_gate\.": "value embeddings with their gates (value_embeds, ve_gate)",
    r"resid_lambdas": "a trained factor on the residual stream of each layer (resid_lambdas)",
    r"x0_lambdas": "the embedding added again before each layer (x0_lambdas)",
    r"smear_": "the embedding of the previous token mixed into each token (smear_gate, smear_lambda)",
    r"backout_lambda": "the state of the middle layer subtracted before the head (backout_lambda)",
}
_NANOCHAT_ATTENTION = re.compile(r"transformer\.h\.\d+\.attn\.c_q\.weight")
_Count = Annotated[int, Field(ge=1, le=MAX_SIZE)]


class Sizes(BaseModel):
    """The entry `model_args` of a nanoGPT checkpoint."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True)

    n_layer: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    n_head: _Count
    n_embd: _Count
    block_size: _Count
    vocab_size: _Count
    bias: bool = True
    dropout: Rate = 0.0


def find_checkpoint(path: Path) -> Path | None:
    """Return the file of a reference that `torch.save` wrote for nanoGPT or nanochat; None if there is none.

    Args:
        path: the file, or its folder. A folder with several files of nanochat gives the last.
    """
    if path.is_file():
        return path if path.suffix == ".pt" else None
    if (path / CHECKPOINT).is_file():
        return path / CHECKPOINT
    return max(path.glob("model_*.pt"), default=None)


def read_checkpoint(path: Path, tokenizer: Path | None, folder: Path) -> tuple[Transformer, HFCheckpoint]:
    """Read a nanoGPT checkpoint. The state of its optimizer is left out.

    Args:
        path: the file, such as `out/ckpt.pt`.
        tokenizer: a `meta.pkl`, or a folder or file with a tokenizer. None means `meta.pkl` in the folder of the
            checkpoint.
        folder: an empty folder for the files that describe the origin of the model. It must exist while the result is
            used.

    Returns:
        The module, and the checkpoint with the tokenizers and the settings of generation.

    Raises:
        InputError: the file is damaged, contains code, or does not fit its sizes. Or it is a file of nanochat, or its
            tokenizer is missing or too large.
    """
    content = load_pickle(path)
    if not isinstance(content, dict) or "model_args" not in content:
        _refuse_nanochat(path, content)
        raise InputError(f"{path} has no entry 'model_args' with sizes; expected a file that nanoGPT saved")
    sizes = _read_sizes(path, content["model_args"])
    tensors = _rename(path, read_tables(path, content, "model"))
    source = _find_tokenizer(path, tokenizer)
    module = _fill(path, sizes, tensors, is_plain=source.suffix != ".pkl")
    _write_config(folder, sizes)
    if source.suffix == ".pkl":
        tokenizers = _read_characters(source, sizes, folder)
    else:
        tokenizers = _copy_tokenizer(source, folder)
    config = _config(sizes)
    generation_config = read_generation_config(folder, config, module)
    tokenizers = with_decoder_tokens(tokenizers, generation_config, module)
    tokenizers.pair.check_rows(module.num_source_ids, module.num_target_ids, str(path))
    loaded = find_variant(config, module, TASK, {}, pad=tokenizers.pair.source.pad_id)
    return module, HFCheckpoint(folder, tokenizers, generation_config, config, loaded)


def _refuse_nanochat(path: Path, content: object) -> None:
    """Refuse a file of nanochat, with the modules that are missing in the core."""
    names = [str(name).removeprefix(_COMPILED) for name in content] if isinstance(content, dict) else []
    if not any(_NANOCHAT_ATTENTION.fullmatch(name) for name in names):
        return
    missing = [text for pattern, text in _NANOCHAT.items() if any(re.match(pattern, name) for name in names)]
    if missing:
        raise InputError(
            f"{path} is a checkpoint of nanochat, which needs modules that do not exist here: "
            + "; ".join(missing)
            + ". Checkpoints of the transformers type nanochat load"
        )
    raise InputError(
        f"{path} is a checkpoint of nanochat's first version: convert it to the transformers type nanochat, which loads"
    )


def _read_sizes(path: Path, arguments: object) -> Sizes:
    if not isinstance(arguments, dict) or not all(isinstance(value, int | float) for value in arguments.values()):
        raise InputError(f"{path}: model_args must be a dict of numbers; expected a file that nanoGPT saved")
    return convert_json({str(key): value for key, value in arguments.items()}, Sizes, name=f"{path}: model_args")


def _rename(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under nanoGPT's names, without masks and without the copy of the tied table."""
    renamed = {name.removeprefix(_COMPILED): tensor for name, tensor in tensors.items()}
    renamed = {name: tensor for name, tensor in renamed.items() if not _MASK.fullmatch(name)}
    head = renamed.pop(_HEAD, None)
    if head is not None and _TABLE in renamed and not torch.equal(head, renamed[_TABLE]):
        raise InputError(f"{path}: {_HEAD} differs from {_TABLE}; nanoGPT's models have one tensor for both")
    return renamed


def _model(sizes: Sizes, *, rows: int, is_plain: bool) -> spec.Model:
    """Return the spec of a nanoGPT model; without `is_plain`, its head has a bias for the rows that it never writes."""
    hparams = replace(
        PRESETS["gpt2"],
        layers=sizes.n_layer,
        heads=sizes.n_head,
        width=sizes.n_embd,
        feedforward=4 * sizes.n_embd,
        activation="gelu",
        bias=sizes.bias,
        max_positions=sizes.block_size,
        dropout=sizes.dropout,
        attention_dropout=sizes.dropout,
        output_bias=not is_plain,
    )
    return build_spec(hparams, source_vocab=rows, target_vocab=rows)


def _rules() -> Iterable[Rule]:
    for rule in gpt2.RULES:
        transforms = tuple(transform for transform in rule.transforms if not isinstance(transform, Transpose))
        yield replace(rule, theirs=tuple(f"transformer.{name}" for name in rule.theirs), transforms=transforms)


def _fill(path: Path, sizes: Sizes, tensors: dict[str, Tensor], *, is_plain: bool) -> Transformer:
    """Return the module with the weights of the file; without `is_plain`, two more rows, for "<unk>" and "</s>"."""
    num_added = 0 if is_plain else 2
    model = _model(sizes, rows=sizes.vocab_size + num_added, is_plain=is_plain)
    if _TABLE in tensors and num_added:
        tensors[_TABLE] = F.pad(tensors[_TABLE], (0, 0, 0, num_added))
    outline = build(model, device="meta")
    slots = outline.state_dict()
    bounds, _ = bind(tuple(_rules()), slots, model)
    state: dict[str, Tensor] = {}
    faults: list[str] = []
    for bound in bounds:
        (names,) = bound.theirs
        if names[0] not in tensors:
            faults.append(f"{path} lacks the tensor {names[0]}")
            continue
        try:
            loaded = bound.load([tensors.pop(names[0])])
        except ValueError as error:
            faults.append(f"{path}: {names[0]} does not fit model_args: {error}")
            continue
        for address, tensor in zip(bound.ours, loaded, strict=True):
            if tensor.shape != slots[address].shape:
                shapes = f"{list(slots[address].shape)}, got {list(tensor.shape)}"
                faults.append(f"{path}: {names[0]} does not fit model_args: expected {shapes}")
            state[address] = tensor.contiguous()
    faults += [f"{path}: the tensor {name} belongs to no module of nanoGPT" for name in tensors]
    if faults:
        raise InputError.from_faults(faults, subject=str(path))
    if not is_plain:
        bias = torch.zeros(sizes.vocab_size + num_added)
        bias[sizes.vocab_size :] = _NEVER
        state["head.layers.0.bias"] = bias
    return build_from_tensors(model, state)


def _find_tokenizer(path: Path, tokenizer: Path | None) -> Path:
    source = path.with_name(META) if tokenizer is None else tokenizer
    if source.exists():
        return source
    if tokenizer is not None:
        raise InputError(f"{tokenizer} does not exist; expected a meta.pkl, or the folder of a tokenizer")
    raise InputError(
        f"{path.parent} has no {META}: name the tokenizer with --tokenizer PATH, a meta.pkl or a folder with GPT-2's "
        "vocab.json and merges.txt"
    )


def _config(sizes: Sizes) -> dict[str, Any]:
    """Return the config.json of the nearest family, without ids of special tokens."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": sizes.vocab_size,
        "n_positions": sizes.block_size, "n_embd": sizes.n_embd, "n_layer": sizes.n_layer, "n_head": sizes.n_head,
        "activation_function": "gelu", "embd_pdrop": sizes.dropout, "attn_pdrop": sizes.dropout,
        "resid_pdrop": sizes.dropout, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _write_config(folder: Path, sizes: Sizes) -> None:
    write_json(folder / CONFIG, _config(sizes), is_indented=True)


def _read_characters(path: Path, sizes: Sizes, folder: Path) -> CheckpointTokenizers:
    """Read the characters of `meta.pkl`, and write their tokenizer and the settings of generation."""
    content = read_plain_pickle(path)
    ids = content.get("stoi") if isinstance(content, dict) else None
    if not isinstance(ids, dict) or not ids:
        raise InputError(f"{path} has no entry 'stoi' with the id of each character; expected nanoGPT's {META}")
    for character, index in ids.items():
        if not isinstance(character, str) or len(character) != 1 or "\ud800" <= character <= "\udfff":
            raise InputError(f"{path}: 'stoi' must have single characters, got {character!r}")
        if type(index) is not int or not 0 <= index < sizes.vocab_size:
            raise InputError(f"{path}: the id of {character!r} must be 0 to {sizes.vocab_size - 1}, got {index!r}")
    if len(set(ids.values())) < len(ids):
        raise InputError(f"{path}: two characters of 'stoi' have one id; make the file again")
    tokenizer = tokenizer_of_characters(ids, first=sizes.vocab_size)
    tokenizer.save(folder / "tokenizer.json")
    start = {"bos_token_id": ids["\n"]} if "\n" in ids else {}
    write_json(folder / GENERATION_CONFIG, {**start, "eos_token_id": tokenizer.eos_id}, is_indented=True)
    return CheckpointTokenizers(TokenizerPair(tokenizer, tokenizer, joint=True))


def _copy_tokenizer(source: Path, folder: Path) -> CheckpointTokenizers:
    """Copy the files of a tokenizer, and write its end token as that of generation."""
    directory = source if source.is_dir() else source.parent
    for name in TOKENIZER_FILES:
        is_named = source.is_dir() or name in (source.name, "tokenizer_config.json")
        if is_named and (directory / name).is_file():
            shutil.copyfile(file_inside(directory, name), folder / name)
    tokenizers = load_tokenizers(folder)
    end = tokenizers.pair.target.eos_id
    write_json(folder / GENERATION_CONFIG, {"bos_token_id": end, "eos_token_id": end}, is_indented=True)
    return tokenizers
