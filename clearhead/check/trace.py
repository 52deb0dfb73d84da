"""The same tokens through a checkpoint here and in transformers, and what comes out of the parts of both.

Legend: B rows, T tokens of the first stack, U tokens of the decoder.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.core.embedding import Table
from clearhead.core.head import Linear
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.core.position import LearnedPosition
from clearhead.core.stack import Stack
from clearhead.data.batches.inputs import shift_right
from clearhead.errors import InputError
from clearhead.hf.loading import LoadedModule, bind_rules
from clearhead.hf.mapping.tensor_rules import BoundRule, Transpose

_KINDS = (nn.Linear, Linear, Table, LearnedPosition, LayerNorm, RMSNorm)


@dataclass(frozen=True)
class ModelInputs:
    """What both models read.

    Args:
        ids: [B, T], of the first stack.
        mask: [B, T], True = a real token; None: all are.
        target_ids: [B, U], of the decoder of two stacks.
        segments: [B, T], of each token.
    """

    ids: Tensor
    mask: Tensor | None = None
    target_ids: Tensor | None = None
    segments: Tensor | None = None


@dataclass
class Trace:
    """What the parts of a model gave, in the order in which they ran: a part that ran twice is there twice."""

    parts: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    layers: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None

    def keep(self, path: str, value: Tensor) -> None:
        """Note what a part gave."""
        count = sum(1 for name, _ in self.parts if name == path)
        self.parts[path, count] = value.detach()


def import_transformers() -> Any:
    """Return the transformers library.

    Raises:
        InputError: it is not installed.
    """
    try:
        found = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "--against transformers needs that library, which is no part of this one: pip install transformers"
        ) from None
    found.utils.logging.disable_progress_bar()
    found.utils.logging.set_verbosity_error()
    return found


def load_with_transformers(folder: Path, pretrained: LoadedModule) -> nn.Module:
    """Load a folder with transformers, as the same class in float32, with attention written out.

    Raises:
        InputError: the library cannot load it.
    """
    classes = pretrained.variant.classes
    said = (pretrained.config.get("architectures") or [classes[0]])[0]
    name = said if said in classes else classes[0]
    try:
        kind = getattr(import_transformers(), name)
        theirs: nn.Module = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever another library makes of a folder
        raise InputError(f"{folder}: transformers cannot load it as {name}: {first_line(error)}") from None
    return theirs.eval()


def first_line(error: Exception) -> str:
    """Return what a failure of another library says first."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class ModelPair:
    """A checkpoint on both sides, and the pairs of parts that should give the same."""

    def __init__(self, pretrained: LoadedModule, theirs: Any) -> None:
        self.pretrained = pretrained
        self.theirs = theirs
        self.pairs = _pairs(pretrained, theirs)

    @property
    def ours(self) -> Transformer:
        """The module as it was loaded."""
        return self.pretrained.module

    def run_ours(self, module: Transformer, reading: ModelInputs) -> Trace:
        """Run a module of ours, which may be a changed one, and note what its parts give."""
        trace, order = Trace(), [one for one in module.named_modules() if one[0] in self.pairs]
        with torch.no_grad(), _watching(order, trace), _layers(module, trace):
            target, mask = self._targets(reading)
            out = module(reading.ids, target, mask=reading.mask, target_mask=mask, segments=reading.segments)
        trace.outputs = out.logits if self._has_logits and out.logits is not None else out.hidden
        return trace

    def run_theirs(self, reading: ModelInputs) -> Trace:
        """Run their module, and note what its parts give, in our order of rows and under our paths."""
        trace, raw = Trace(), Trace()
        modules = {their: self.theirs.get_submodule(their) for their, _ in self.pairs.values()}
        with torch.no_grad(), _watching(list(modules.items()), raw):
            out = self.theirs(**self._arguments(reading))
        done: set[tuple[str, int]] = set()
        for (name, count), value in raw.parts.items():
            mine = {path: bound for path, (their, bound) in self.pairs.items() if their == name}
            bound = next(iter(mine.values()))
            for path, part in zip(_paths(bound), _ours_of(bound, value), strict=True):
                if path in mine and (path, count) not in done:
                    trace.parts[path, count] = part
                    done.add((path, count))
        for side, states in _states(out, self.ours).items():
            trace.layers |= {f"{side} {index}": state for index, state in enumerate(states)}
        names = ("logits", "prediction_logits", "last_hidden_state")
        trace.outputs = next((out[name] for name in names if name in out), None)
        if "start_logits" in out:
            trace.outputs = torch.stack([out["start_logits"], out["end_logits"]], dim=-1)
        return trace

    @property
    def _has_logits(self) -> bool:
        # A folder with modules that make vectors has its states on the other side.
        return self.pretrained.task.kind != "embed"

    def _targets(self, reading: ModelInputs) -> tuple[Tensor | None, Tensor | None]:
        if self.ours.encoder is None or self.ours.decoder is None:
            return None, None
        if self.pretrained.task.repeats is None:
            return reading.target_ids, None
        start = self.pretrained.config.get(
            "decoder_start_token_id", getattr(self.theirs.config, "decoder_start_token_id", None)
        )
        mask = torch.ones_like(reading.ids, dtype=torch.bool) if reading.mask is None else reading.mask
        return shift_right(reading.ids, mask, start=start if self.pretrained.task.repeats == "start" else None), mask

    def _arguments(self, reading: ModelInputs) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": reading.ids, "output_hidden_states": True, "return_dict": True}
        if reading.mask is not None:
            arguments["attention_mask"] = reading.mask.long()
        if reading.segments is not None:
            arguments["token_type_ids"] = reading.segments
        if reading.target_ids is not None and self.pretrained.task.repeats is None:
            arguments["decoder_input_ids"] = reading.target_ids
        return arguments


def _pairs(pretrained: LoadedModule, theirs: nn.Module) -> dict[str, tuple[str, BoundRule]]:
    """Find by the rules of the tensors which of their modules does the work of which of ours."""
    bounds, _ = bind_rules(pretrained.record, pretrained.variant, pretrained.prefix, pretrained.module)
    parts, known = dict(pretrained.module.named_modules()), dict(theirs.named_modules())
    base = str(getattr(theirs, "base_model_prefix", ""))
    found: dict[str, tuple[str, BoundRule]] = {}
    for bound in bounds:
        if len(bound.theirs) != 1 or not all(isinstance(parts.get(path), _KINDS) for path in _paths(bound)):
            continue
        stems = [name.removesuffix(".weight") for name in reversed(bound.theirs[0]) if name.endswith(".weight")]
        spelled = [name for stem in stems for name in (stem, f"{base}.{stem}", stem.removeprefix(f"{base}."))]
        their = next((name for name in spelled if name in known), None)
        if their is not None:
            found |= dict.fromkeys(_paths(bound), (their, bound))
    return found


def _paths(bound: BoundRule) -> list[str]:
    return [address.rpartition(".")[0] for address in bound.ours]


def _ours_of(bound: BoundRule, value: Tensor) -> list[Tensor]:
    """Put what their module gives into our order, as the rows of its matrix are put; a matrix turned has none other."""
    parts = [value.movedim(-1, 0)]
    for change in bound.changes:
        parts = parts if isinstance(change, Transpose) else change.load(parts, bound.place)
    return [part.movedim(0, -1) for part in parts]


@contextmanager
def _watching(modules: list[tuple[str, nn.Module]], trace: Trace) -> Iterator[None]:
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, output, path=path: trace.keep(path, output) if isinstance(output, Tensor) else None
        )
        for path, module in modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _layers(module: Transformer, trace: Trace) -> Iterator[None]:
    """Note what the embedding and each layer of each stack give."""
    seen = {name: Trace() for name in ("encoder", "decoder")}
    watched = {
        name: [("", stack.embedding), *(("", layer) for layer in stack.layers), ("end", stack)]
        for name in seen
        if isinstance(stack := getattr(module, name), Stack)
    }
    with _watching(watched.get("encoder", []), seen["encoder"]), _watching(watched.get("decoder", []), seen["decoder"]):
        yield
    for name, states in seen.items():
        every = [value for (path, _), value in states.parts.items() if not path]
        trace.layers |= {f"{name} {index}": value for index, value in enumerate(every)}
        if ("end", 0) in states.parts:
            trace.layers[f"{name} end"] = states.parts["end", 0]


def _states(out: Mapping[str, Any], ours: Transformer) -> dict[str, tuple[Tensor, ...]]:
    if ours.encoder is not None and ours.decoder is not None:
        sides = {"encoder": out.get("encoder_hidden_states"), "decoder": out.get("decoder_hidden_states")}
    else:
        sides = {"encoder" if ours.encoder is not None else "decoder": out.get("hidden_states")}
    return {name: states for name, states in sides.items() if states is not None}
