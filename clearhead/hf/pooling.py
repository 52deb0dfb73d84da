"""How a folder of sentence-transformers turns token states into one vector: `modules.json` to a head, and back.

The first module is the checkpoint itself; what follows are a pool, maps and a norm, each with a folder of settings.
Source: arXiv 1908.10084, section 3; the layout is that of the published folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.hf.files.tensor_files import FLOATS, SINGLE, TensorFiles, inside, read_json, read_list
from clearhead.weights.files import save_tensors
from clearhead.weights.fill import built

MODULES, LIMITS, PROMPTS, SETTINGS = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "config.json",
)  # fmt: skip
_TYPE = "sentence_transformers.models."
# Their words for ours; the first of several is written.
_POOLS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "root",
    "pooling_mode_lasttoken": "last",
}
_WORDS = {"cls": "first", "mean": "mean", "max": "max", "mean_sqrt_len_tokens": "root", "lasttoken": "last"}
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.linear.Identity": None,
}
_SIZES = ("word_embedding_dimension", "embedding_dimension")
_INERT = frozenset({"include_prompt", "module_input_name", "module_output_name", *_SIZES})


@dataclass(frozen=True)
class Pooling:
    """What stands on a checkpoint's states.

    Args:
        head: of the model that makes vectors.
        tensors: of the head's maps, by their addresses.
        max_length: the longest text that is read, in tokens with special ones; what is behind is cut off. None: any.
        files: the settings as they were read, by their place in the folder.
    """

    head: spec.Head
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    max_length: int | None = None
    files: Mapping[str, Any] = field(default_factory=dict)


def has_pooling(directory: Path) -> bool:
    """Whether a checkpoint's folder says how vectors are made of its states."""
    return (directory / MODULES).is_file()


def read_pooling(directory: Path, *, width: int, dtype: torch.dtype) -> Pooling:
    """Read the modules behind the first.

    Args:
        directory: of the checkpoint.
        width: of its states.
        dtype: of the weights.

    Raises:
        InputError: a module, a setting or a size that is not one of ours; every fault is named.
    """
    modules = read_list(directory, MODULES)
    reader = _Reader(directory, width, dtype)
    for index, module in enumerate(modules):
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("path", "type")):
            raise InputError(f"{directory / MODULES}: entry {index} must be an object with path and type")
        reader.take(index, module["type"], module["path"])
    reader.limits()
    if not any(isinstance(layer, spec.Pool) for layer in reader.layers):
        reader.faults.append(f"{MODULES} names no Pooling, so tokens would have vectors, but texts none")
    if reader.faults:
        raise InputError.from_faults(reader.faults, subject=str(directory))
    files = {MODULES: modules} | reader.files
    return Pooling(spec.Head(layers=tuple(reader.layers)), reader.tensors, reader.max_length, files)


@dataclass
class _Reader:
    """Modules in their order, and what they make of a head."""

    directory: Path
    width: int
    dtype: torch.dtype
    layers: list[spec.HeadLayer] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    max_length: int | None = None

    def take(self, index: int, kind: str, path: str) -> None:
        """Add a module to the head."""
        name = kind.rpartition(".")[2]
        if (index == 0) != (name == "Transformer") or (index == 0 and path):
            self.faults.append(f"{MODULES}: entry {index} is {kind} in '{path}'; the first is a Transformer in ''")
        elif name == "Pooling":
            self._pool(path)
        elif name == "Dense":
            self._map(path)
        elif name == "Normalize":
            self.layers.append(spec.L2Normalize())
        elif index:
            self.faults.append(f"{MODULES}: a module of the type {kind} is not read; Pooling, Dense and Normalize are")

    def limits(self) -> None:
        """Read how long texts may be, and refuse what would be done to them before they are read."""
        if (self.directory / LIMITS).is_file():
            said = self._json("", LIMITS)
            longest = said.get("max_seq_length")
            if longest is not None and (not isinstance(longest, int) or longest < 3):
                self.faults.append(f"{LIMITS}: max_seq_length must be a whole number of at least 3, got {longest}")
            else:
                self.max_length = longest
            if said.get("do_lower_case"):
                self.faults.append(f"{LIMITS}: do_lower_case = true is not supported; the tokenizer's own files lower")
        if (self.directory / PROMPTS).is_file():
            said = self._json("", PROMPTS)
            name = said.get("default_prompt_name")
            if name is not None and (said.get("prompts") or {}).get(name):
                self.faults.append(
                    f"{PROMPTS}: a default prompt in front of every text is not supported; write it into the texts and "
                    "set default_prompt_name to null"
                )

    def _json(self, path: str, name: str) -> dict[str, Any]:
        content = read_json(self.directory / path if path else self.directory, name)
        self.files[f"{path}/{name}" if path else name] = content
        return content

    def _pool(self, path: str) -> None:
        inside(self.directory, path)
        said = self._json(path, SETTINGS)
        chosen = [ours for name, ours in _POOLS.items() if said.get(name)]
        word = said.get("pooling_mode")
        chosen += [_WORDS[word]] if isinstance(word, str) and word in _WORDS else []
        known = {*_POOLS, "pooling_mode"} | _INERT
        others = sorted(name for name, value in said.items() if name not in known and value)
        if others or len(chosen) != 1:
            found = ", ".join([*chosen, *others]) or "nothing"
            self.faults.append(
                f"{path}/{SETTINGS}: exactly one of {', '.join(_POOLS)} is supported, this one asks for {found}"
            )
            return
        size = next((said[name] for name in _SIZES if name in said), self.width)
        if size != self.width:
            self.faults.append(f"{path}/{SETTINGS}: vectors of {size} numbers are pooled, but states have {self.width}")
        self.layers.append(spec.Pool.model_validate({"by": chosen[0]}))

    def _map(self, path: str) -> None:
        inside(self.directory, path)
        said = self._json(path, SETTINGS)
        size, width, bias = said.get("out_features"), said.get("in_features"), said.get("bias", True)
        function = said.get("activation_function", next(iter(_ACTIVATIONS)))
        if not isinstance(size, int) or size < 1 or not isinstance(bias, bool) or width != self.width:
            self.faults.append(f"{path}/{SETTINGS}: a map from {width} to {size} numbers cannot follow {self.width}")
            return
        if function not in _ACTIVATIONS:
            self.faults.append(f"{path}/{SETTINGS}: the activation {function} is not one of {', '.join(_ACTIVATIONS)}")
            return
        address, shapes = (
            f"head.layers.{len(self.layers)}",
            {"weight": (size, width)} | ({"bias": (size,)} if bias else {}),
        )
        files = TensorFiles(self.directory / path)
        held = {name: header.shape for name, header in files.headers.items()}
        if held != {f"linear.{leaf}": shape for leaf, shape in shapes.items()}:
            self.faults.append(f"{path}/{SINGLE} holds {held}, its settings ask for {shapes}")
            return
        if any(header.dtype not in FLOATS for header in files.headers.values()):
            self.faults.append(f"{path}/{SINGLE} does not hold floating-point numbers; quantised weights are not read")
            return
        self.tensors |= {f"{address}.{leaf}": files[f"linear.{leaf}"].to(self.dtype) for leaf in shapes}
        self.layers.append(spec.Linear(size=size, bias=bias))
        inner = _ACTIVATIONS[function]
        self.layers += [] if inner is None else [spec.Activation.model_validate({"function": inner})]
        self.width = size


def with_head(module: Transformer, head: spec.Head | None, tensors: Mapping[str, Tensor]) -> Transformer:
    """Return the same stacks with another head; the tensors of the stacks are shared, not copied.

    Args:
        module: with a head or without one.
        head: the new one; None: none.
        tensors: of the new head, by address.

    Raises:
        InputError: the head does not fit.
    """
    model = spec.validate(module.spec.model_copy(update={"head": head}))
    own = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith("head.")}
    return built(model, own | dict(tensors), training=module.training)


def makes_vectors(model: spec.Model) -> bool:
    """Whether a head pools the states of one stack and does what the modules of such a folder can say."""
    layers = model.head.layers if model.head and (model.encoder is None or model.decoder is None) else ()
    kinds = (spec.Pool, spec.Linear, spec.Activation, spec.L2Normalize)
    return any(isinstance(layer, spec.Pool) for layer in layers) and all(isinstance(layer, kinds) for layer in layers)


def write_pooling(directory: Path, module: Transformer, loaded: Pooling | None, *, max_length: int | None) -> None:
    """Write the modules that a module's head is, beside its checkpoint.

    Args:
        directory: of the checkpoint.
        module: whose head makes vectors.
        loaded: as what the head was read; None, or another head: its settings are written anew.
        max_length: the longest text, in tokens.

    Raises:
        InputError: the head does something that no module of such a folder says.
    """
    assert module.spec.head is not None and makes_vectors(module.spec), "only a head that makes vectors is asked"
    files, maps = _files(module.spec, max_length)
    if loaded is not None and loaded.head == module.spec.head:
        files = dict(loaded.files)
    for place, content in files.items():
        (directory / place).parent.mkdir(exist_ok=True)
        text = json.dumps(content, indent=2, sort_keys=isinstance(content, dict))
        (directory / place).write_text(f"{text}\n", "utf-8")
    tensors = module.state_dict()
    for address, folder in maps.items():
        own = {leaf: tensors[f"{address}.{leaf}"] for leaf in ("weight", "bias") if f"{address}.{leaf}" in tensors}
        save_tensors(directory / folder / SINGLE, {f"linear.{leaf}": tensor for leaf, tensor in own.items()})


def _files(model: spec.Model, max_length: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings by their places, and the folder of each map of the head."""
    top = model.decoder or model.encoder
    assert top is not None and model.head is not None, "a validated model has a stack"
    width, layers = top.output_width, list(model.head.layers)
    modules = [("", "Transformer")]
    files: dict[str, Any] = {}
    maps: dict[str, str] = {}
    for index, layer in enumerate(layers):
        folder = f"{len(modules)}_"
        if isinstance(layer, spec.Pool):
            modules.append((f"{folder}Pooling", "Pooling"))
            modes = {name: ours == layer.by for name, ours in _POOLS.items()}
            files[f"{folder}Pooling/{SETTINGS}"] = {"word_embedding_dimension": width} | modes
        elif isinstance(layer, spec.L2Normalize):
            modules.append((f"{folder}Normalize", "Normalize"))
        elif isinstance(layer, spec.Linear):
            modules.append((f"{folder}Dense", "Dense"))
            maps[f"head.layers.{index}"] = f"{folder}Dense"
            after = layers[index + 1] if index + 1 < len(layers) else None
            function = after.function if isinstance(after, spec.Activation) else None
            files[f"{folder}Dense/{SETTINGS}"] = {
                "in_features": width, "out_features": layer.size, "bias": layer.bias,
                "activation_function": _theirs(function),
            }  # fmt: skip
            width = layer.size
        elif not (index and isinstance(layers[index - 1], spec.Linear)):
            raise InputError("saving as sentence-transformers: an activation stands only behind a map there")
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_TYPE}{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    limits = {"max_seq_length": max_length, "do_lower_case": False}
    return {MODULES: entries, LIMITS: limits} | files, maps


def _theirs(function: str | None) -> str:
    theirs = next((name for name, ours in _ACTIVATIONS.items() if ours == function), None)
    if theirs is None:
        raise InputError(f"saving as sentence-transformers: the activation '{function}' has no name there")
    return theirs
