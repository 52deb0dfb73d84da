"""Traces of a checkpoint here and in transformers on the same inputs, and the differences of their submodules.

Legend: B rows, T tokens of the first stack, U tokens of the decoder.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.base.tensors import relative_error
from clearhead.checkpoints.hf.loading import LoadedModule, bind_rules
from clearhead.checkpoints.hf.mapping.tensor_rules import BoundRule, Transpose
from clearhead.core import Transformer
from clearhead.core.embedding import LearnedPosition, Table
from clearhead.core.head import Linear
from clearhead.core.norm import LayerNorm, RMSNorm
from clearhead.data.batches.inputs import shift_right
from clearhead.spec.tasks.registry import find_task

_KINDS = (nn.Linear, Linear, Table, LearnedPosition, LayerNorm, RMSNorm)


@dataclass(frozen=True)
class TraceInputs:
    """Inputs of both models.

    Args:
        ids: ids of the first stack [B, T].
        mask: mask of the ids [B, T], True = a real token; None means that all are real.
        target_ids: ids of the decoder [B, U]; None for a model with one stack.
        segments: segment of each token [B, T]; None means no segments.
    """

    ids: Tensor
    mask: Tensor | None = None
    target_ids: Tensor | None = None
    segments: Tensor | None = None


@dataclass
class Trace:
    """Outputs of a model's submodules by path and number of the call, in the order of the calls."""

    parts: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    layers: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None

    def keep(self, path: str, value: Tensor) -> None:
        """Record the output of one call of a submodule."""
        count = sum(1 for name, _ in self.parts if name == path)
        self.parts[path, count] = value.detach()


def import_transformers() -> Any:
    """Return the transformers library.

    Raises:
        InputError: it is not installed.
    """
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "--against transformers needs the transformers library: install it with "
            f"{make_install_command('transformers')}"
        ) from None
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


def load_with_transformers(folder: Path, pretrained: LoadedModule) -> nn.Module:
    """Load a folder with transformers in float32 with eager attention, as the class that config.json names.

    Raises:
        InputError: transformers cannot load the folder.
    """
    classes = pretrained.variant.classes
    named = (pretrained.config.get("architectures") or [classes[0]])[0]
    name = named if named in classes else classes[0]
    model_class = getattr(import_transformers(), name)
    try:
        model: nn.Module = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - another library may raise anything
        raise InputError(f"{folder}: transformers cannot load it as {name}: {first_line(error)}") from None
    return model.eval()


def first_line(error: Exception) -> str:
    """Return the first line of an error of another library."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class ModelPair:
    """A checkpoint loaded here and in transformers, and the pairs of submodules whose outputs should agree."""

    def __init__(self, pretrained: LoadedModule, theirs: Any) -> None:
        self.pretrained = pretrained
        self.theirs = theirs
        self.pairs: dict[str, tuple[str, BoundRule]] = _pair_submodules(pretrained, theirs)

    @property
    def ours(self) -> Transformer:
        """The module loaded here."""
        return self.pretrained.module

    @property
    def has_two_stacks(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return self.ours.encoder is not None and self.ours.decoder is not None

    def run_ours(self, module: Transformer, inputs: TraceInputs) -> Trace:
        """Run a clearhead module, possibly a changed one, and record the outputs of its submodules."""
        trace, order = Trace(), [(path, submodule) for path, submodule in module.named_modules() if path in self.pairs]
        with torch.no_grad(), _recording(trace, order), _recording_layers(trace, module):
            target, mask = self._targets(inputs)
            out = module(inputs.ids, target, mask=inputs.mask, target_mask=mask, segments=inputs.segments)
        # An embedding model returns its states, as in transformers.
        has_logits = find_task(self.pretrained.task.kind).outputs != "vector" and out.logits is not None
        trace.outputs = out.logits if has_logits else out.hidden
        return trace

    def run_theirs(self, inputs: TraceInputs) -> Trace:
        """Run the transformers module, and record the outputs of its submodules under our paths and row order."""
        trace, raw = Trace(), Trace()
        modules = {their: self.theirs.get_submodule(their) for their, _ in self.pairs.values()}
        with torch.no_grad(), _recording(raw, modules.items()):
            out = self.theirs(**self._arguments(inputs))
        for (name, count), value in raw.parts.items():
            ours = {path: bound for path, (their, bound) in self.pairs.items() if their == name}
            bound = next(iter(ours.values()))
            for path, tensor in zip(_paths(bound), _in_our_order(bound, value), strict=True):
                if path in ours:
                    trace.parts.setdefault((path, count), tensor)
        if self.has_two_stacks:
            states = {"encoder": out.get("encoder_hidden_states"), "decoder": out.get("decoder_hidden_states")}
        else:
            states = {"decoder" if self.ours.encoder is None else "encoder": out.get("hidden_states")}
        for side, layers in states.items():
            trace.layers |= {f"{side} {index}": state for index, state in enumerate(layers or ())}
        names = ("logits", "prediction_logits", "last_hidden_state")
        trace.outputs = next((out[name] for name in names if name in out), None)
        if "start_logits" in out:
            trace.outputs = torch.stack([out["start_logits"], out["end_logits"]], dim=-1)
        return trace

    def _targets(self, inputs: TraceInputs) -> tuple[Tensor | None, Tensor | None]:
        repeats = self.pretrained.task.repeats
        if repeats is None or not self.has_two_stacks:
            return inputs.target_ids, None
        start = self.pretrained.config.get(
            "decoder_start_token_id", getattr(self.theirs.config, "decoder_start_token_id", None)
        )
        mask = torch.ones_like(inputs.ids, dtype=torch.bool) if inputs.mask is None else inputs.mask
        return shift_right(inputs.ids, mask, start=start if repeats == "start" else None), mask

    def _arguments(self, inputs: TraceInputs) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": inputs.ids, "output_hidden_states": True, "return_dict": True}
        if inputs.mask is not None:
            arguments["attention_mask"] = inputs.mask.long()
        if inputs.segments is not None:
            arguments["token_type_ids"] = inputs.segments
        if inputs.target_ids is not None and self.pretrained.task.repeats is None:
            arguments["decoder_input_ids"] = inputs.target_ids
        return arguments


def _pair_submodules(pretrained: LoadedModule, theirs: nn.Module) -> dict[str, tuple[str, BoundRule]]:
    """Pair each of our submodules with that of transformers, by the family's tensor rules."""
    bounds, _ = bind_rules(pretrained.family, pretrained.variant, pretrained.prefix, pretrained.module)
    parts, known = dict(pretrained.module.named_modules()), dict(theirs.named_modules())
    base = str(getattr(theirs, "base_model_prefix", ""))
    pairs: dict[str, tuple[str, BoundRule]] = {}
    for bound in bounds:
        if len(bound.theirs) != 1 or not all(isinstance(parts.get(path), _KINDS) for path in _paths(bound)):
            continue
        stems = [name.removesuffix(".weight") for name in reversed(bound.theirs[0]) if name.endswith(".weight")]
        spellings = [name for stem in stems for name in (stem, f"{base}.{stem}", stem.removeprefix(f"{base}."))]
        their = next((name for name in spellings if name in known), None)
        if their is not None:
            pairs |= dict.fromkeys(_paths(bound), (their, bound))
    return pairs


def _paths(bound: BoundRule) -> list[str]:
    return [address.rpartition(".")[0] for address in bound.ours]


def _in_our_order(bound: BoundRule, value: Tensor) -> list[Tensor]:
    """Split and reorder an output of transformers like the rows of its weight; transposes keep the order."""
    parts = [value.movedim(-1, 0)]
    for change in bound.transforms:
        parts = parts if isinstance(change, Transpose) else change.load(parts, bound.slots)
    return [tensor.movedim(0, -1) for tensor in parts]


@contextmanager
def _recording(trace: Trace, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, module in modules:
            stack.enter_context(module.register_forward_hook(partial(_record, trace, path)))
        yield


def _record(trace: Trace, path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        trace.keep(path, output)


@contextmanager
def _recording_layers(trace: Trace, module: Transformer) -> Iterator[None]:
    """Record the outputs of the embedding, of each layer, and of each whole stack."""
    seen, watched = Trace(), list[tuple[str, nn.Module]]()
    for name in ("encoder", "decoder"):
        stack = getattr(module, name)
        if stack is not None:
            watched += [(name, stack.embedding), *((name, layer) for layer in stack.layers), (f"{name} end", stack)]
    with _recording(seen, watched):
        yield
    for (name, count), value in seen.parts.items():
        trace.layers[name if name.endswith(" end") else f"{name} {count}"] = value


@dataclass(frozen=True, repr=False)
class PointComparison(Printed):
    """Difference of two models at one submodule or layer.

    Args:
        name: name for display.
        path: path of our submodule, or name of the layer.
        error: relative difference.
        is_layer: True for the output of a layer.
    """

    name: str
    path: str
    error: float
    is_layer: bool = False


def compare_layouts(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error of two tensors that may differ in layout, such as heads before tokens."""
    return relative_error(actual, _match_layout(expected, actual))


def compare_traces(ours: Trace, theirs: Trace) -> list[PointComparison]:
    """Return the differences of all submodules, layers and outputs that both traces have."""
    points = [
        PointComparison(
            path if count == 0 else f"{path} (run {count + 1})",
            path,
            compare_layouts(value, theirs.parts[path, count]),
        )
        for (path, count), value in ours.parts.items()
        if (path, count) in theirs.parts and _have_one_shape(value, theirs.parts[path, count])
    ]
    for name, value in ours.layers.items():
        if name not in theirs.layers:
            continue
        side = name.split()[0]
        # The last state in transformers is the output of the stack, or in a few classes the input of the final norm.
        is_last = f"{side} {int(name.split()[1]) + 1}" not in theirs.layers
        ends = [value, ours.layers[f"{side} end"]] if is_last and f"{side} end" in ours.layers else [value]
        points.append(
            PointComparison(
                _layer(name), name, min(compare_layouts(end, theirs.layers[name]) for end in ends), is_layer=True
            )
        )
    if ours.outputs is not None and theirs.outputs is not None:
        points.append(
            PointComparison(
                "outputs", "outputs", compare_layouts(_drop_score_axis(ours.outputs, theirs.outputs), theirs.outputs)
            )
        )
    return points


def first_divergence(points: Sequence[PointComparison], tolerance: float) -> PointComparison | None:
    """Return the first point where two models differ; None if they agree."""
    return next((point for point in points if not point.error <= tolerance), None)


def _layer(name: str) -> str:
    side, number = name.split()
    return f"{side} embedding" if number == "0" else f"{side} layer {int(number) - 1}"


def _drop_score_axis(actual: Tensor, expected: Tensor) -> Tensor:
    """Drop the last axis if it has size 1 and transformers lacks it (one score per token)."""
    return actual[..., 0] if actual.dim() == expected.dim() + 1 and actual.shape[-1] == 1 else actual


def _match_layout(value: Tensor, like: Tensor) -> Tensor:
    """Give a value the layout of `like`: heads before tokens, flattened rows, or one row for all."""
    if value.dim() == 4 and value.transpose(1, 2).shape == like.shape != value.shape:
        return value.transpose(1, 2)
    if value.dim() == 2 and value.numel() == like.numel() and value.shape[-1] == like.shape[-1]:
        return value.view(like.shape)
    if value.dim() == like.dim() and value.shape[1:] == like.shape[1:] and 1 in (len(value), len(like)):
        return value.expand_as(like) if len(value) == 1 else value[:1]
    return value


def _have_one_shape(actual: Tensor, expected: Tensor) -> bool:
    return _match_layout(expected, actual).shape == actual.shape
