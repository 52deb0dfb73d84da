"""`clearhead inspect`: the spec tree, the shapes, the parameters, the memory and the cost of a model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import human_bytes, human_count, print_json, print_result
from clearhead.cli.options import Json
from clearhead.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from clearhead.spec import Head, Model, Node
    from clearhead.spec.cost import Cost
    from clearhead.task import TaskRecord


@dataclass(frozen=True)
class _CheckpointSummary:
    """What is shown of a checkpoint, besides what is shown of every model."""

    spec: Model
    task: TaskRecord
    lines: list[str]


MOST_LABELS = 12
_LAYER = re.compile(r"layers\.(\d+)\.")


def inspect(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A run directory, a checkpoint or a spec.json.")],
    length: Annotated[
        int, typer.Option("--length", min=1, help="Tokens on each side, for the cost of attention.")
    ] = 32,
    as_json: Json = False,
) -> None:
    """Show what a model is and what it costs.

    \b
    Example:
      clearhead inspect runs/de-en
      clearhead inspect runs/de-en/spec.json --length 128

    What it was trained for, its spec tree, shapes, parameters, memory and cost, and which attention body runs and why.
    One multiplication and one addition are 2 FLOPs. Nothing is searched or trained here, so no length penalty and no
    early-stop rule apply. --json ends with {"task", "head", "masks", "parameters", "parameter_bytes", "source_flops",
    "target_flops", "attention", "spec"} and more; "task" is null for a spec file that stands alone.
    """
    from clearhead.core import build
    from clearhead.spec.cost import cost_per_token

    summary = summarize_checkpoint(ref)
    spec = read_spec(ref) if summary is None else summary.spec
    record = read_record(ref) if summary is None else summary.task
    module = build(spec, device="meta")
    cost = cost_per_token(spec, length, length)
    parameters = [_Weights(name, tuple(one.shape), one.numel()) for name, one in module.named_parameters()]
    total = sum(one.count for one in parameters)
    bodies = attention_bodies(module)
    if as_json:
        print_json(
            {
                **_purpose(spec, record),
                "parameters": total,
                "parameter_bytes": 4 * total,
                "source_flops": cost.source_flops,
                "target_flops": cost.target_flops,
                "cache_bytes_per_target_token": 4 * cost.cache_numbers,
                "cache_bytes_per_source_token": 4 * cost.memory_numbers,
                "attention": [asdict(body) for body in bodies],
                "generation": [] if summary is None else summary.lines,
                "spec": json.loads(spec.to_json()),
            }
        )
        return
    for line in [
        *_purpose_lines(spec, record),
        *([] if summary is None else summary.lines),
        "",
        *tree_lines(spec),
        "",
        "weights",
        *_weight_lines(parameters),
        "",
        *_cost_lines(total, spec, cost, length),
    ]:
        print_result(line)
    for body in bodies:
        print_result(
            f"attention   {body.mode}: the {body.body} body in {body.count} of {body.total}, because {body.reason}"
        )


def _purpose(spec: Model, record: TaskRecord | None) -> dict[str, Any]:
    """Return what `_purpose_lines` says, as JSON values."""
    return {
        "task": None if record is None else json.loads(record.to_json()),
        "head": None if spec.head is None else head_line(spec.head),
        "masks": decoder_masks(spec),
    }


def _purpose_lines(spec: Model, record: TaskRecord | None) -> Iterator[str]:
    """Yield what a model was trained for, what its head does, and what its decoder sees."""
    if record is not None:
        longest = "" if record.max_length is None else f", on texts of at most {record.max_length} tokens"
        paired = ", on pairs of texts" if record.is_paired else ""
        yield f"task        {record.kind}{paired}{longest}"
        if record.labels or record.label_kind is not None:
            kinds = {"single_label": "one of", "multi_label": "several of", "regression": "a number", None: "one of"}
            shown = ", ".join(record.labels[:MOST_LABELS]) + (", ..." if len(record.labels) > MOST_LABELS else "")
            yield f"labels      {kinds[record.label_kind]} {f'{len(record.labels)}: {shown}' if shown else ''}".rstrip()
    if spec.head is not None:
        yield f"head        {head_line(spec.head)}"
    if spec.decoder is not None:
        yield f"mask        {' and '.join(decoder_masks(spec))}, in the decoder"


def head_line(head: Head) -> str:
    """Return the layers of a head in one line: pool mean, linear 64, activation tanh, linear 2."""
    return ", ".join(
        " ".join([layer.kind, *(str(getattr(layer, key)) for key in ("by", "size", "function") if hasattr(layer, key))])
        for layer in head.layers
    )


def decoder_masks(spec: Model) -> list[str]:
    """Return the kinds of mask over its own tokens that a decoder has."""
    from clearhead.spec import Attention, walk

    if spec.decoder is None:
        return []
    nodes = (node for _, node in walk(spec.decoder))
    return sorted({node.mask.kind for node in nodes if isinstance(node, Attention) and node.source == "self"})


def summarize_checkpoint(ref: str) -> _CheckpointSummary | None:
    """Read a checkpoint in the layout of the hub; None: the reference is another one.

    Raises:
        InputError: it cannot be loaded.
    """
    from clearhead.hf.checkpoint import read_generation_config
    from clearhead.hf.files.hub import find_checkpoint
    from clearhead.hf.loading import load_module
    from clearhead.hf.tokenizers import load_tokenizers
    from clearhead.text.tokenizer_files import has_tokenizer

    folder = find_checkpoint(ref)
    if folder is None:
        return None
    loaded = load_module(folder)
    lines = [f"note        {note}" for note in loaded.notes]
    if loaded.module.decoder is not None:
        lines += [f"generation  {line}" for line in read_generation_config(folder).lines()]
    if has_tokenizer(folder):
        text = load_tokenizers(folder)
        text.pair.check_rows(loaded.module.num_source_ids, loaded.module.num_target_ids, str(folder))
        source = text.pair.source
        special_tokens = source.special_tokens
        around = " ".join([*source.tokens(special_tokens.prefix), "TEXT", *source.tokens(special_tokens.suffix)])
        lines.append(f"tokenizer   {source.vocab_size} entries, {around}, {source.fingerprint[:12]}")
        lines += [f"languages   {', '.join(text.languages)}"] if text.languages else []
        lines += ["chat        has a template"] if text.chat is not None else []
    return _CheckpointSummary(loaded.module.spec, loaded.task, lines)


def read_record(ref: str) -> TaskRecord | None:
    """Read what a model was trained for; None where a spec stands alone.

    Raises:
        InputError: the record is faulty.
    """
    from clearhead.runs.directory import TASK_FILE, read_task, split_reference

    folder = split_reference(ref)[0]
    folder = folder if folder.is_dir() else folder.parent
    return read_task(folder) if (folder / TASK_FILE).is_file() else None


def _weight_lines(parameters: list[_Weights]) -> Iterator[str]:
    """Yield a line for each tensor; layers that are alike share their lines."""
    alike: dict[tuple[str, tuple[int, ...]], list[_Weights]] = {}
    for one in parameters:
        alike.setdefault((_LAYER.sub("layers.*.", one.name), one.shape), []).append(one)
    rows = []
    for (name, shape), group in alike.items():
        numbers = [found.group(1) for one in group if (found := _LAYER.search(one.name))]
        label = numbers[0] if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}" if numbers else ""
        times = f" x {len(group)}" if len(group) > 1 else ""
        rows.append((name.replace("*", label), " x ".join(map(str, shape)), human_count(group[0].count) + times))
    width = max(len(row[0]) for row in rows)
    for name, sizes, count in rows:
        yield f"  {name:<{width}}  {sizes:>12}  {count}"


def _cost_lines(total: int, spec: Model, cost: Cost, length: int) -> Iterator[str]:
    yield f"parameters  {total} ({human_count(total)}), shared ones counted once"
    weights, training = human_bytes(4 * total), human_bytes(16 * total)
    yield f"memory      {weights} in fp32; while training {training} with gradients and Adam's two moments"
    has_source = spec.encoder is not None and spec.decoder is not None
    target, source = human_bytes(4 * cost.cache_numbers), human_bytes(4 * cost.memory_numbers)
    both = f"target token and {source} for each source token" if has_source else "token"
    if spec.decoder is not None:
        yield f"cache       {target} for each {both}, while decoding in fp32"
    target, source = human_count(cost.target_flops), human_count(cost.source_flops)
    both = f"{source} FLOPs for a source token and {target} FLOPs for a target token" if has_source else ""
    lengths = f"{length} tokens on each side" if has_source else f"{length} tokens"
    yield f"cost        {both or f'{target} FLOPs for a token'}, at {lengths}; training costs three times as much"


def read_spec(ref: str) -> Model:
    """Read the spec of a run directory, of any folder with a spec.json, or of a spec file.

    Raises:
        InputError: there is none, or it is faulty.
    """
    from clearhead.files import read_text_file
    from clearhead.runs.directory import resolve_reference, split_reference
    from clearhead.spec import Model

    path, label = split_reference(ref)
    if label is not None:
        resolve_reference(ref)
    path = path / "spec.json" if path.is_dir() else path
    text = read_text_file(path, "run directory or spec file")
    try:
        return Model.from_json(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def tree_lines(spec: Model) -> list[str]:
    """Return the spec as an indented tree; a line for each part, one line for equal neighbours."""
    return list(_tree(spec, "model", 0))


def _tree(node: Node, name: str, depth: int) -> Iterator[str]:
    from clearhead.spec import Node

    values = {key: getattr(node, key) for key in type(node).model_fields if key != "kind"}
    plain = [
        f"{key}={value}" for key, value in values.items() if not isinstance(value, Node | tuple) and value is not None
    ]
    yield f"{'  ' * depth}{name}: {type(node).__name__}{'(' + ', '.join(plain) + ')' if plain else ''}"
    for key, value in values.items():
        if isinstance(value, Node):
            yield from _tree(value, key, depth + 1)
        elif isinstance(value, tuple):
            for label, child in _folded(value):
                yield from _tree(child, f"{key}.{label}", depth + 1)


def _folded(children: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield runs of equal neighbours once, labelled with their first and last index."""
    start = 0
    for end in range(1, len(children) + 1):
        if end == len(children) or children[end] != children[start]:
            yield (str(start) if end == start + 1 else f"{start}-{end - 1}"), children[start]
            start = end


@dataclass(frozen=True)
class _Weights:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class AttentionBody:
    """Which of the two bodies of attention runs.

    Attributes:
        mode: "training" or "evaluation".
        body: "explicit" or "fused".
        count: in how many attentions of the model.
        total: how many there are.
        reason: why this one.
    """

    mode: str
    body: str
    count: int
    total: int
    reason: str


def attention_bodies(module: nn.Module) -> list[AttentionBody]:
    """Ask every attention of a model which body runs in each mode, and why."""
    from clearhead.core.attention import Attention

    attentions = [part for part in module.modules() if isinstance(part, Attention)]
    found = []
    for mode in ("training", "evaluation"):
        module.train(mode == "training")
        bodies = Counter(attention.kernel() for attention in attentions)
        found += [AttentionBody(mode, body, count, len(attentions), why) for (body, why), count in bodies.items()]
    return found
