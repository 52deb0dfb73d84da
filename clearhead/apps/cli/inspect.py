"""`clearhead inspect`: parameters, memory, cost, spec tree and weight shapes of a model."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.options import Force, Json, locate_model
from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.printing import human_bytes, human_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from clearhead.checkpoints.reference import ModelReference
    from clearhead.core import Transformer
    from clearhead.fast.memory import MemoryForecast
    from clearhead.fast.runner import ModuleBackend
    from clearhead.fast.stored import StorageFormat
    from clearhead.interpret.maps.shapes import ActivationShape
    from clearhead.spec import Model
    from clearhead.spec.cost import Cost
    from clearhead.spec.tasks.record import TaskRecord

MOST_LABELS = 12
LABEL_KINDS = {"single_label": "one of", "multi_label": "several of", "regression": "a number", None: "one of"}
_LAYER = re.compile(r"layers\.(\d+)\.")
_IN_LAYER = re.compile(r"((?:encoder|decoder)\.layers)\.(\d+)(.*)")
_LENGTH = 32


def inspect(
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="A run directory, a checkpoint, a spec.json or a preset's name.")
    ],
    addresses: Annotated[
        bool, typer.Option("--addresses", help="List the addresses of all activations, with their shapes.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the architecture into this file.")
    ] = None,
    force: Force = False,
    length: Annotated[
        int | None,
        typer.Option("--length", min=1, help="Tokens per side for the cost of attention; by default 32."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the architecture, size, memory and cost of a model.

    \b
    Example:
      clearhead inspect runs/de-en
      clearhead inspect runs/de-en/spec.json --length 128
      clearhead inspect gpt2 --addresses | grep weights
      clearhead inspect runs/de-en --svg de-en.svg

    Shows parameters, memory and cost, the task, and the attention kernel with the reason for it. Then follow the spec
    as a tree without default values, and the shapes of all weights. Each precision has a line with the memory of the
    weights, the peak while loading, and the KV cache. Only the headers of weight files are read, so the model need not
    fit into memory. One multiplication and one addition are 2 FLOPs.

    --addresses lists the addresses for model.capture and model.edit, one activation per line; it needs no weights. Here
    {0..11} means that layers 0 to 11 have the activation, and "2 records" that one call computes it twice. The word
    "identity" marks the position of an absent norm. Option --svg draws the model like figure 1 of "Attention Is All You
    Need".

    With --json, the last line is {"task", "head", "masks", "parameters", "parameter_bytes", "source_flops",
    "target_flops", "precisions", "attention", "spec"} and more, with "addresses" and "picture" if requested. The value
    of "task" is null for a spec.
    """
    _refuse_options(addresses, svg, force, length, as_json)
    inspected = read_reference(ref)
    record, lines = _report(inspected, length or _LENGTH)
    if svg is not None:
        _draw(svg, inspected.spec, ref, record["parameters"], force=force)
        record, lines = record | {"picture": str(svg)}, [str(svg)]
    if addresses:
        from clearhead.interpret.maps.shapes import activation_shapes

        shapes = activation_shapes(inspected.spec)
        record, lines = record | {"addresses": [asdict(shape) for shape in shapes]}, [*_address_lines(shapes)]
    print_either(as_json, record, *lines)


def _draw(file: Path, spec: Model, name: str, parameters: int, *, force: bool) -> None:
    from clearhead.base.files import write_output
    from clearhead.interpret.view.architecture import draw_architecture

    write_output(file, draw_architecture(spec, name, [f"{human_count(parameters)} parameters"]), force=force)


def _refuse_options(addresses: bool, svg: Path | None, force: bool, length: int | None, as_json: bool) -> None:
    """Refuse options without effect and an unwritable file, before the model is read."""
    from clearhead.base.files import refuse_unwritable

    if length is not None and (addresses or svg is not None) and not as_json:
        raise InputError(f"--length has no effect with {'--addresses' if addresses else '--svg'}; leave it out")
    if force and svg is None:
        raise InputError("--force has no effect without --svg; leave it out")
    if svg is not None:
        if svg.suffix.lower() != ".svg":
            raise InputError(f"--svg {svg} is not an SVG: give a name that ends in .svg")
        refuse_unwritable(svg, force=force)


def _report(inspected: _InspectedModel, length: int) -> tuple[dict[str, Any], list[str]]:
    """Return the report of `clearhead inspect` twice: as JSON values and as lines of text."""
    from clearhead.base.printing import num_parameters
    from clearhead.core import build
    from clearhead.core.extensions.modules import part_lines
    from clearhead.spec.base import tree_lines
    from clearhead.spec.cost import FP32_BYTES, cost_per_token
    from clearhead.spec.describe import decoder_masks, head_summary

    spec = inspected.spec
    module = build(spec, device="meta")
    cost = cost_per_token(spec, length, length)
    parameters = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    total = num_parameters(module)
    kernels = _attention_kernels(module)
    headers, fault = _read_headers(inspected)
    served, unknown = _report_kernels(spec, headers)
    forecasts = _forecast_memory(spec, headers, served)
    head = None if spec.head is None else head_summary(spec.head)
    masks = decoder_masks(spec)
    record = {
        "task": None if inspected.task is None else json.loads(inspected.task.to_json()),
        "head": head,
        "masks": masks,
        "parameters": total,
        "parameter_bytes": FP32_BYTES * total,
        "source_flops": cost.source_flops,
        "target_flops": cost.target_flops,
        "cache_bytes_per_target_token": FP32_BYTES * cost.cache_numbers,
        "cache_bytes_per_source_token": FP32_BYTES * cost.memory_numbers,
        "precisions": list(map(asdict, forecasts)),
        "attention": kernels,
        "generation": inspected.notes,
        "spec": json.loads(spec.to_json()),
    }
    lines = [*_cost_lines(total, spec, cost, length), *_task_lines(inspected.task)]
    if head is not None:
        lines.append(f"head        {head}")
    lines += [f"part        {line}" for line in part_lines(module)]
    if masks:
        lines.append(f"mask        {' and '.join(masks)}, in the decoder")
    unknown += fault
    record["served"] = _list_backends(served)
    record["decoding"], decoding_lines = _report_decoding(module)
    lines += [f"{forecast.precision:<11} {forecast.summary()}" for forecast in forecasts]
    lines += [
        *inspected.notes,
        *_kernel_lines(kernels),
        *_runner_lines(served),
        *decoding_lines,
        *unknown,
        "",
        *tree_lines(spec, "model"),
    ]
    return record, [*lines, "", "weights", *_weight_lines(parameters)]


def _forecast_memory(
    spec: Model, headers: _WeightHeaders | None, served: Sequence[ModuleBackend]
) -> Sequence[MemoryForecast]:
    """Return the memory of a model in each precision; without kernels for the decoder, its KV cache is larger."""
    from clearhead.fast.memory import forecast_memory

    has_kernels = not any(entry.backend == "plain" for entry in served if entry.address in ("", "decoder"))
    if headers is None:
        return forecast_memory(spec, is_mapped=False, has_kernels=has_kernels)
    return forecast_memory(spec, headers.dtypes, is_mapped=headers.is_mapped, has_kernels=has_kernels)


def _list_backends(served: Sequence[ModuleBackend]) -> list[dict[str, str]]:
    """Return the kernel of each module as JSON values, with the reason for it."""
    return [{"address": each.address, "by": each.backend, "why": each.detail} for each in served]


def _shape_text(activation: ActivationShape) -> str:
    words = [f"[{', '.join(map(str, activation.shape))}]"]
    if activation.records > 1:
        words.append(f"{activation.records} records")
    if activation.is_identity:
        words.append("identity")
    return "  ".join(words)


def _address_lines(shapes: Sequence[ActivationShape]) -> Iterator[str]:
    """Yield the address and shape of each activation, with equal layers in one entry, wrapped to the terminal."""
    groups: dict[tuple[str, str, ActivationShape], list[int]] = {}
    for activation in shapes:
        match = _IN_LAYER.fullmatch(activation.address)
        start, number, rest = match.groups() if match else (activation.address, "", "")
        layers = groups.setdefault((start, rest, replace(activation, address="")), [])
        if number:
            layers.append(int(number))
    rows = []
    for (start, rest, activation), layers in groups.items():
        address = f"{start}.{_ranges(layers)}{rest}" if layers else start
        rows.append((address, _shape_text(activation)))
    width = max(len(address) for address, _ in rows)
    if sys.stdout.isatty():
        width = min(width, max(0, shutil.get_terminal_size().columns - 2 - max(len(right) for _, right in rows)))
    for address, right in rows:
        if len(address) > width:
            yield address
        yield f"{address if len(address) <= width else '':<{width}}  {right}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as 3 or {0..2,5}."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{first}" if first == last else f"{first}..{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


@dataclass(frozen=True)
class _InspectedModel:
    """Spec, task and weight headers of the inspected model, with notes on its Hugging Face checkpoint.

    The function `read_headers` reads the headers of the weight files. None means that the model has no weights.
    """

    spec: Model
    task: TaskRecord | None
    notes: list[str]
    read_headers: Callable[[], _WeightHeaders] | None = None


@dataclass(frozen=True)
class _WeightHeaders:
    """Dtypes and storage formats of a model's weights, from the headers of its files.

    Args:
        dtypes: the stored dtypes by weight address.
        formats: the formats of quantized matrices by module address.
        is_mapped: True if weights that need no conversion are mapped from their files instead of copied.
    """

    dtypes: Mapping[str, torch.dtype]
    formats: Mapping[str, StorageFormat]
    is_mapped: bool = True


def read_reference(ref: str) -> _InspectedModel:
    """Read a Hugging Face checkpoint, a run directory, a saved model, a spec file or a preset.

    Raises:
        InputError: the model does not exist, or a file is faulty.
    """
    from clearhead.checkpoints.reference import SPEC_FILE, ModelReference
    from clearhead.spec.presets.names import FUNCTIONS

    names = [*FUNCTIONS, *FUNCTIONS.values()]
    if ref in names and not Path(ref).exists():
        from clearhead import presets

        print_message(f"{ref}: using the preset of this name, a spec without weights")
        return _InspectedModel(getattr(presets, FUNCTIONS.get(ref, ref))(), None, [])
    try:
        ref = locate_model(ref)
    except InputError as error:
        raise InputError(f"{error}; or a preset{did_you_mean(ref, names) or ': ' + ', '.join(FUNCTIONS)}") from None
    reference = ModelReference.parse(ref)
    checkpoint = reference.checkpoint_folder()
    if checkpoint is not None:
        return _read_checkpoint(checkpoint)
    from clearhead.base.formats import FORMAT_FILE
    from clearhead.checkpoints.runs.directory import (
        TASK_FILE,
        find_weights,
        missing_file_error,
        read_task,
        refuse_altered,
    )
    from clearhead.spec import Model

    path = reference.folder
    if reference.label is not None:
        find_weights(reference)
    folder, file = (path, path / SPEC_FILE) if path.is_dir() else (path.parent, path)
    if path.is_dir():
        if not file.is_file() and not (folder / FORMAT_FILE).is_file():
            raise missing_file_error(folder)
        refuse_altered(folder)
    spec = Model.from_file(file, what="a run directory or a spec file")
    task = read_task(folder) if (folder / TASK_FILE).is_file() else None
    return _InspectedModel(spec, task, [], partial(_read_saved_headers, reference) if path.is_dir() else None)


def _read_headers(inspected: _InspectedModel) -> tuple[_WeightHeaders | None, list[str]]:
    """Return the headers of the weight files, or None and a line with the reason."""
    try:
        return (None if inspected.read_headers is None else inspected.read_headers()), []
    except InputError as error:
        return None, [f"kernels     unknown, since the weights cannot be loaded: {error}"]


def _read_saved_headers(reference: ModelReference) -> _WeightHeaders:
    from clearhead.fast.stored import formats_of
    from clearhead.model.opening import open_model

    opened = open_model(reference)
    return _WeightHeaders(opened.dtypes, formats_of(opened.saved or {}), opened.is_mapped)


def _read_checkpoint(folder: Path) -> _InspectedModel:
    from clearhead.checkpoints.hf.generation import read_generation_config
    from clearhead.checkpoints.hf.loading import open_checkpoint
    from clearhead.checkpoints.hf.tokenizers import load_tokenizers
    from clearhead.text.tokenizer_files import has_tokenizer

    opened = open_checkpoint(folder)
    loaded = opened.loaded
    notes = [f"note        {note}" for note in loaded.notes]
    if loaded.module.decoder is not None:
        settings = read_generation_config(folder, loaded.config, loaded.module)
        notes += [f"generation  {line}" for line in settings.lines()]
    if has_tokenizer(folder):
        text = load_tokenizers(folder)
        text.pair.check_rows(loaded.module.num_source_ids, loaded.module.num_target_ids, str(folder))
        source = text.pair.source
        special_tokens = source.special_tokens
        around = " ".join([*source.tokens(special_tokens.prefix), "TEXT", *source.tokens(special_tokens.suffix)])
        notes.append(f"tokenizer   {source.vocab_size} entries, {around}, {source.fingerprint[:12]}")
        notes += [f"languages   {', '.join(text.languages)}"] if text.languages else []
        notes += ["chat        has a template"] if text.chat is not None else []
    return _InspectedModel(loaded.module.spec, loaded.task, notes, lambda: _WeightHeaders(opened.dtypes(), {}))


def _task_lines(task: TaskRecord | None) -> Iterator[str]:
    if task is None:
        return
    longest = "" if task.max_length is None else f", on texts of at most {task.max_length} tokens"
    yield f"task        {task.kind}{', on pairs of texts' if task.is_paired else ''}{longest}"
    if task.labels or task.label_kind is not None:
        shown = ", ".join(task.labels[:MOST_LABELS]) + (", ..." if len(task.labels) > MOST_LABELS else "")
        yield f"labels      {LABEL_KINDS[task.label_kind]} {f'{len(task.labels)}: {shown}' if shown else ''}".rstrip()
    if task.facts:
        yield f"facts       {', '.join(f'{name} {value}' for name, value in task.facts.items())}"


def _weight_lines(parameters: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield a report line for each weight tensor; equal tensors of several layers share one line."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in parameters.items():
        groups.setdefault((_LAYER.sub("layers.*.", name), shape), []).append(name)
    rows = []
    for (pattern, shape), names in groups.items():
        numbers = [match[1] for name in names if (match := _LAYER.search(name))]
        label = "-".join(dict.fromkeys([numbers[0], numbers[-1]])) if numbers else ""
        times = f" x {len(names)}" if len(names) > 1 else ""
        rows.append((pattern.replace("*", label), " x ".join(map(str, shape)), human_count(math.prod(shape)) + times))
    width = max(len(row[0]) for row in rows)
    for name, sizes, count in rows:
        yield f"  {name:<{width}}  {sizes:>12}  {count}"


def _cost_lines(total: int, spec: Model, cost: Cost, length: int) -> Iterator[str]:
    from clearhead.spec.cost import FP32_BYTES, TRAINING_BYTES

    yield f"parameters  {total:,} ({human_count(total)}), shared ones counted once"
    weights, training = human_bytes(FP32_BYTES * total), human_bytes(TRAINING_BYTES * total)
    yield f"memory      {weights} in fp32; while training {training} with gradients and Adam's two moments"
    has_source = spec.encoder is not None and spec.decoder is not None
    target, source = human_bytes(FP32_BYTES * cost.cache_numbers), human_bytes(FP32_BYTES * cost.memory_numbers)
    both = f"target token and {source} for each source token" if has_source else "token"
    if spec.decoder is not None:
        yield f"cache       {target} for each {both}, while decoding in fp32"
    target, source = human_count(cost.target_flops), human_count(cost.source_flops)
    both = f"{source} FLOPs for a source token and {target} FLOPs for a target token" if has_source else ""
    lengths = f"{length} tokens on each side" if has_source else f"{length} tokens"
    yield f"cost        {both or f'{target} FLOPs for a token'}, at {lengths}; training costs three times as much"


def _kernel_lines(kernels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each attention kernel: the number of attentions that use it, in which modes, and why."""
    modes: dict[str, list[str]] = {}
    for kernel in kernels:
        modes.setdefault("the {kernel} kernel in {count} of {total}, because {reason}".format(**kernel), []).append(
            kernel["mode"]
        )
    for text, mode_names in modes.items():
        yield f"attention   {' and '.join(mode_names)}: {text}"


def _attention_kernels(module: nn.Module) -> list[dict[str, Any]]:
    """Return the attention kernels of a model in training and in evaluation, with the reasons to use them."""
    from clearhead.core.attention import Attention

    attentions = [submodule for submodule in module.modules() if isinstance(submodule, Attention)]
    used_kernels = []
    for mode in ("training", "evaluation"):
        module.train(mode == "training")
        for (kernel, reason), count in Counter(attention.kernel() for attention in attentions).items():
            used = {"mode": mode, "kernel": kernel, "count": count, "total": len(attentions), "reason": reason}
            used_kernels.append(used)
    return used_kernels


def _report_kernels(spec: Model, headers: _WeightHeaders | None) -> tuple[list[ModuleBackend], list[str]]:
    """Return the kernels that run each module on this processor, and lines about batches and the precision auto."""
    if headers is None:
        return [], []
    from clearhead.fast.runner import Runner, multiplies_in_bf16
    from clearhead.fast.stored import stored_matrices
    from clearhead.model.opening import outline_load

    module = outline_load(spec, headers.dtypes, headers.formats)
    in_16_bits = any(kind.is_exact for kind in stored_matrices(module).values())
    runner = Runner(module, in_bf16=in_16_bits)
    depend = "do not depend" if runner.is_batch_invariant else "depend, in their last digits,"
    lines = [f"batches     results {depend} on the rest of the batch, with the stored weights"]
    if multiplies_in_bf16(module):
        lines.append("precision   auto multiplies in bf16 here: last digits depend on the rest of the batch")
    return runner.report(), lines


def _report_decoding(module: Transformer) -> tuple[dict[str, str] | None, list[str]]:
    """Return how a GPU decodes with a model as JSON values, None without a decoder, and as lines."""
    if module.decoder is None:
        return None, []
    from clearhead.fast.native.load import KERNELS, uses_kernels
    from clearhead.generate.slots.batch import eager_reason

    reason = eager_reason(module) if uses_kernels() else f"{KERNELS}=plain"
    how = f"step by step: {reason}" if reason else "steps are recorded once and replayed as CUDA graphs"
    return {"by": "plain" if reason else "graphs", "why": reason}, [f"decoding    on a GPU, {how}"]


def _runner_lines(served: Sequence[ModuleBackend]) -> Iterator[str]:
    """Yield a report line for each kernel or reason to use plain PyTorch, with the modules that it applies to."""
    groups: dict[tuple[str, str], list[str]] = {}
    for served_module in served:
        groups.setdefault((served_module.backend, served_module.detail), []).append(served_module.address)
    for (by, why), addresses in groups.items():
        shown = ", ".join(addresses[:3]) + (f" and {len(addresses) - 3} more" if len(addresses) > 3 else "")
        how = f"by clearhead kernels, weights in {why}" if by == "kernels" else f"plain: {why}"
        yield f"kernels     {shown or 'model'}: {how}"
