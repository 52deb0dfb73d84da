"""Pooling of a sentence-transformers checkpoint: conversion of `modules.json` to a head, and back.

The first module is the checkpoint itself. The next modules are pools, linear layers and normalizations, each with a
folder for its settings.

Source: arXiv 1908.10084, section 3; the layout is that of released checkpoints.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.base.files import convert_json, file_inside, read_json, write_json
from clearhead.checkpoints.hf.files.tensor_files import FLOATS, SINGLE, TensorFiles, read_config
from clearhead.checkpoints.weights.files import build_from_tensors, save_tensors
from clearhead.core import Transformer
from clearhead.spec.base import Count

MODULES, LIMITS, PROMPTS, SETTINGS = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "config.json",
)  # fmt: skip
# Settings of the first module are in the first existing file sentence_KIND_config.json.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TOKENIZER = "tokenizer_config.json"
_TYPE = "sentence_transformers.models."
# Names of pooling modes and their modes in a spec, in the order in which sentence-transformers joins several vectors.
_MODES: Mapping[str, spec.PoolMode] = MappingProxyType(
    {
        "cls": "first", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "root", "weightedmean": "weighted",
        "lasttoken": "last",
    }
)  # fmt: skip
_NAMES = {mode: name for name, mode in _MODES.items()}
# Older keys, one for each pooling mode.
_FLAGS = {
    f"pooling_mode_{name}" + {"cls": "_token", "lasttoken": "", "mean_sqrt_len_tokens": ""}.get(name, "_tokens"): name
    for name in _MODES
}
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.linear.Identity": None,
}
_INERT = frozenset({"module_input_name", "module_output_name"})
Settings = TypeVar("Settings", bound=BaseModel)


class _ModuleEntry(BaseModel):
    path: str
    type: str


class _PoolSettings(BaseModel):
    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool | None = None
    pooling_mode_max_tokens: bool | None = None
    pooling_mode_mean_tokens: bool | None = None
    pooling_mode_mean_sqrt_len_tokens: bool | None = None
    pooling_mode_weightedmean_tokens: bool | None = None
    pooling_mode_lasttoken: bool | None = None
    include_prompt: bool = True
    word_embedding_dimension: Count | None = None
    embedding_dimension: Count | None = None

    @property
    def modes(self) -> list[str]:
        """Pooling modes in the order in which their vectors are concatenated; "mean" if the settings name none."""
        if isinstance(self.pooling_mode, str):
            return [self.pooling_mode]
        return self.pooling_mode or [name for flag, name in _FLAGS.items() if getattr(self, flag)] or ["mean"]


class _LinearSettings(BaseModel):
    in_features: Count
    out_features: Count
    bias: bool = True
    activation_function: str = next(iter(_ACTIVATIONS))


_MaxLength = Annotated[int, Field(ge=3, lt=2**31)]


class _TextSettings(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    max_length: _MaxLength | None = None
    padding: Any = None


class _ProcessingSettings(BaseModel):
    text: _TextSettings | None = None
    common: _TextSettings | None = None


class _TokenizerSettings(BaseModel):
    # A tokenizer without a limit has a huge number.
    model_max_length: Annotated[float, Field(ge=3)] | None = None
    max_len: Annotated[float, Field(ge=3)] | None = None


class _LengthSettings(BaseModel):
    processing_kwargs: _ProcessingSettings = _ProcessingSettings()
    processor_kwargs: _TokenizerSettings = _TokenizerSettings()
    tokenizer_args: _TokenizerSettings = _TokenizerSettings()
    max_seq_length: _MaxLength | None = None
    do_lower_case: bool | None = None

    @property
    def longest(self) -> int | float | None:
        """Maximum text length in tokens; of several settings, the one that sentence-transformers reads first counts."""
        texts = (self.processing_kwargs.common, self.processing_kwargs.text)
        named: list[int | float | None] = [text.max_length for text in texts if text is not None]
        named += [self.tokenizer_args.model_max_length, self.processor_kwargs.model_max_length, self.max_seq_length]
        return next((length for length in named if length is not None), None)


class _PromptSettings(BaseModel):
    default_prompt_name: str | None = None
    prompts: dict[str, str | None] | None = None


@dataclass(frozen=True)
class Pooling:
    """Head in place of the sentence-transformers modules after the transformer, with length limit and prompt of texts.

    Args:
        head: the head that makes vectors.
        tensors: the tensors of the head's linear layers, by address.
        max_length: the longest text in tokens, with special tokens. Longer texts are truncated. None means no limit.
        prompt: the prompt that is put in front of every text.
        files: the settings by their paths in the folder.
    """

    head: spec.Head
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    max_length: int | None = None
    prompt: str = ""
    files: Mapping[str, Any] = field(default_factory=dict)


def has_pooling(directory: Path) -> bool:
    """Return whether a folder is a sentence-transformers checkpoint."""
    return os.path.lexists(directory / MODULES)


def read_pooling(directory: Path, *, width: int, positions: int | None) -> Pooling:
    """Read the sentence-transformers modules after the transformer, such as pooling, as a head.

    Args:
        directory: the folder of the checkpoint.
        width: the width of the hidden states.
        positions: `max_position_embeddings` of the config. None means that the config has no such key.

    Raises:
        InputError: a module, a setting or a size is not supported; every fault is named.
    """
    modules = read_json(file_inside(directory, MODULES), what="a list of modules")
    reader = _ModuleReader(directory, width)
    for index, module in enumerate(convert_json(modules, list[_ModuleEntry], name=str(directory / MODULES))):
        reader.add_module(index, module.type, module.path)
    reader.read_limits(positions)
    if not any(isinstance(layer, spec.Pool) for layer in reader.layers):
        reader.faults.append(f"{MODULES} has no Pooling module, which a vector for a text needs")
    if reader.faults:
        raise InputError.from_faults(reader.faults, subject=str(directory))
    files = {MODULES: modules} | reader.files
    return Pooling(spec.Head(layers=tuple(reader.layers)), reader.tensors, reader.max_length, reader.prompt, files)


@dataclass
class _ModuleReader:
    """Reader that converts sentence-transformers modules one after the other to layers of a head."""

    directory: Path
    width: int
    layers: list[spec.HeadLayer] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    max_length: int | None = None
    prompt: str = ""
    includes_prompt: bool = True

    def add_module(self, index: int, kind: str, path: str) -> None:
        """Convert one sentence-transformers module to layers of the head, or record a fault."""
        name = kind.rpartition(".")[2]
        if (index == 0) != (name == "Transformer") or (index == 0 and path):
            self.faults.append(
                f"{MODULES}: entry {index} is {kind} in '{path}'; expected a Transformer in '' as the first entry only"
            )
        elif name == "Pooling":
            self._add_pool(path)
        elif name == "Dense":
            self._add_linear(path)
        elif name == "Normalize":
            self.layers.append(spec.L2Normalize())
        elif index:
            self.faults.append(
                f"{MODULES}: a module of the type {kind} is not supported; expected Pooling, Dense or Normalize"
            )

    def read_limits(self, positions: int | None) -> None:
        """Read the maximum length of texts and the prompt, and refuse settings that would change texts.

        Args:
            positions: same as in `read_pooling`.
        """
        names = [f"sentence_{kind}_config.json" for kind in _KINDS]
        name = next((name for name in names if os.path.lexists(self.directory / name)), None)
        limits = _LengthSettings() if name is None else self._read_settings("", name, _LengthSettings)
        longest = limits.longest or self._tokenizer_limit(positions)
        self.max_length = int(longest) if longest < 2**31 else None
        if limits.do_lower_case:
            self.faults.append(f"{name}: do_lower_case = true is not supported; set it in the tokenizer")
        if os.path.lexists(self.directory / PROMPTS):
            self._read_prompt()

    def _tokenizer_limit(self, positions: int | None) -> int | float:
        """Return the longest text in tokens that both the tokenizer's settings and the positions allow."""
        path = self.directory / _TOKENIZER
        bounds: list[int | float] = [] if positions is None or positions == -1 else [positions]
        if os.path.lexists(path):
            tokenizer = convert_json(read_config(self.directory, _TOKENIZER), _TokenizerSettings, name=str(path))
            bounds.append(tokenizer.model_max_length or tokenizer.max_len or math.inf)
        return min(bounds, default=math.inf)

    def _read_prompt(self) -> None:
        """Read the prompt that is put in front of every text."""
        settings = self._read_settings("", PROMPTS, _PromptSettings)
        prompts, name = settings.prompts or {}, settings.default_prompt_name
        if name is not None and name not in {"query", "document", *prompts}:
            self.faults.append(f"{PROMPTS}: default_prompt_name is '{name}', but prompts has no entry of this name")
        self.prompt = prompts.get(name or "") or ""
        if self.prompt and not self.includes_prompt:
            self.faults.append(
                f"{PROMPTS}: a default prompt is not supported together with include_prompt = false of the "
                "pooling; set default_prompt_name to null and write the prompt into the texts"
            )

    def _read_settings(self, path: str, name: str, kind: type[Settings]) -> Settings:
        relative_path = f"{path}/{name}" if path else name
        self.files[relative_path] = read_config(self.directory / path, name)
        return convert_json(self.files[relative_path], kind, name=str(self.directory / relative_path))

    def _add_pool(self, path: str) -> None:
        file_inside(self.directory, path)
        settings = self._read_settings(path, SETTINGS, _PoolSettings)
        modes = settings.modes
        content, known = self.files[f"{path}/{SETTINGS}"], {*_PoolSettings.model_fields, *_INERT}
        others = sorted(name for name, value in content.items() if name not in known and value)
        others += [mode for mode in modes if mode not in _MODES]
        if others:
            self.faults.append(
                f"{path}/{SETTINGS}: {', '.join(others)} is not supported; supported pooling modes: {', '.join(_MODES)}"
            )
            return
        self.includes_prompt = settings.include_prompt
        size = settings.word_embedding_dimension or settings.embedding_dimension or self.width
        if size != self.width:
            self.faults.append(
                f"{path}/{SETTINGS}: the pool has a width of {size}; expected {self.width}, that of hidden states"
            )
        chosen = tuple(_MODES[mode] for mode in modes)
        self.layers.append(spec.Pool(by=chosen if len(chosen) > 1 else chosen[0]))
        self.width *= len(chosen)

    def _add_linear(self, path: str) -> None:
        file_inside(self.directory, path)
        settings = self._read_settings(path, SETTINGS, _LinearSettings)
        size, width, bias, function = (
            settings.out_features, settings.in_features, settings.bias, settings.activation_function,
        )  # fmt: skip
        if width != self.width:
            self.faults.append(
                f"{path}/{SETTINGS}: a linear layer has {width} inputs and {size} outputs; expected {self.width} inputs"
            )
            return
        if function not in _ACTIVATIONS:
            self.faults.append(f"{path}/{SETTINGS}: activation {function} is not supported")
            return
        address = f"head.layers.{len(self.layers)}"
        shapes: dict[str, tuple[int, ...]] = {"weight": (size, width)}
        if bias:
            shapes["bias"] = (size,)
        files = TensorFiles(self.directory / path)
        held = {name: header.shape for name, header in files.headers.items()}
        if held != {f"linear.{leaf}": shape for leaf, shape in shapes.items()}:
            self.faults.append(f"{path}/{SINGLE} holds {held}, but its settings need {shapes}")
            return
        if any(header.dtype not in FLOATS for header in files.headers.values()):
            self.faults.append(
                f"{path}/{SINGLE} does not hold floating-point numbers; quantized weights are not supported"
            )
            return
        self.tensors |= {f"{address}.{leaf}": files[f"linear.{leaf}"] for leaf in shapes}
        self.layers.append(spec.Linear(size=size, bias=bias))
        inner: Any = _ACTIVATIONS[function]
        if inner is not None:
            self.layers.append(spec.Activation(function=inner))
        self.width = size


def with_head(module: Transformer, head: spec.Head | None, tensors: Mapping[str, Tensor]) -> Transformer:
    """Return a module with the same stacks and another head; the tensors of the stacks are shared, not copied.

    Args:
        module: the module, with or without a head.
        head: the new head. None means no head.
        tensors: the tensors of the new head, by address.

    Raises:
        InputError: the head does not fit.
    """
    model = spec.validate(module.spec.model_copy(update={"head": head}))
    stack_tensors = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("head.")}
    return build_from_tensors(model, stack_tensors | dict(tensors), training=module.training)


def makes_vectors(model: spec.Model) -> bool:
    """Return whether a head pools one stack and sentence-transformers has modules for all layers of the head."""
    layers = model.head.layers if model.head and (model.encoder is None or model.decoder is None) else ()
    kinds = (spec.Pool, spec.Linear, spec.Activation, spec.L2Normalize)
    return any(isinstance(layer, spec.Pool) for layer in layers) and all(isinstance(layer, kinds) for layer in layers)


def write_pooling(
    directory: Path, module: Transformer, loaded: Pooling | None, *, max_length: int | None, prompt: str
) -> None:
    """Write the head of a model as sentence-transformers modules into the folder of its checkpoint.

    Args:
        directory: the folder of the checkpoint.
        module: the module with a head that makes vectors.
        loaded: the loaded pooling, whose settings are written again. If it is None or its head differs from the
            module's head, new settings are written.
        max_length: the longest text in tokens. None means no limit.
        prompt: the prompt that is put in front of every text.

    Raises:
        InputError: sentence-transformers has no module for a layer of the head.
    """
    assert module.spec.head is not None and makes_vectors(module.spec), "the head pools a text into one vector"
    files, linear_folders = _pooling_files(module.spec, max_length)
    if prompt:
        files[PROMPTS] = {"prompts": {"default": prompt}, "default_prompt_name": "default"}
    if loaded is not None and loaded.head == module.spec.head:
        files = dict(loaded.files)
    for relative_path, content in files.items():
        (directory / relative_path).parent.mkdir(exist_ok=True)
        write_json(directory / relative_path, content, is_indented=True)
    tensors = module.state_dict()
    for address, folder in linear_folders.items():
        layer_tensors = {
            leaf: tensors[f"{address}.{leaf}"] for leaf in ("weight", "bias") if f"{address}.{leaf}" in tensors
        }
        save_tensors(directory / folder / SINGLE, {f"linear.{leaf}": tensor for leaf, tensor in layer_tensors.items()})


def _pooling_files(model: spec.Model, max_length: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the contents of sentence-transformers' JSON files by path, and the folders of linear layers by address."""
    top = model.decoder or model.encoder
    assert top is not None and model.head is not None, "a validated model has a stack"
    width, layers = top.width, list(model.head.layers)
    modules = [("", "Transformer")]
    files: dict[str, Any] = {}
    linear_folders: dict[str, str] = {}
    for index, layer in enumerate(layers):
        folder = f"{len(modules)}_"
        if isinstance(layer, spec.Pool):
            modules.append((f"{folder}Pooling", "Pooling"))
            modes: dict[str, Any] = {flag: _MODES[name] in layer.modes for flag, name in _FLAGS.items()}
            if len(layer.modes) > 1:
                modes = {"pooling_mode": [_NAMES[mode] for mode in layer.modes]}
            files[f"{folder}Pooling/{SETTINGS}"] = {"word_embedding_dimension": width} | modes
            width *= len(layer.modes)
        elif isinstance(layer, spec.L2Normalize):
            modules.append((f"{folder}Normalize", "Normalize"))
        elif isinstance(layer, spec.Linear):
            modules.append((f"{folder}Dense", "Dense"))
            linear_folders[f"head.layers.{index}"] = f"{folder}Dense"
            after = layers[index + 1] if index + 1 < len(layers) else None
            function = after.function if isinstance(after, spec.Activation) else None
            files[f"{folder}Dense/{SETTINGS}"] = {
                "in_features": width, "out_features": layer.size, "bias": layer.bias,
                "activation_function": _activation_name(function),
            }  # fmt: skip
            width = layer.size
        elif not (index and isinstance(layers[index - 1], spec.Linear)):
            raise InputError("saving as sentence-transformers: an activation must follow a linear layer")
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_TYPE}{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    limits = {"max_seq_length": max_length, "do_lower_case": False}
    return {MODULES: entries, LIMITS: limits} | files, linear_folders


def _activation_name(function: str | None) -> str:
    theirs = next((name for name, ours in _ACTIVATIONS.items() if ours == function), None)
    if theirs is None:
        raise InputError(f"saving as sentence-transformers: the activation '{function}' is not supported")
    return theirs
