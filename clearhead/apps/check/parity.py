"""Parity report: differences between a checkpoint loaded here and in transformers, and their likely causes."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from clearhead import spec
from clearhead.apps.check.trace import (
    ModelPair,
    PointComparison,
    Trace,
    TraceInputs,
    compare_layouts,
    compare_traces,
    first_divergence,
    first_line,
    import_transformers,
    load_with_transformers,
)
from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.base.tensors import relative_error
from clearhead.checkpoints.hf.generation import read_generation_config
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.mapping.tensor_rules import RotaryHalves, Slots
from clearhead.checkpoints.hf.saving import module_to_hf_tensors
from clearhead.checkpoints.hf.tokenizers import CheckpointTokenizers, load_tokenizers
from clearhead.checkpoints.weights.files import build_from_tensors
from clearhead.core import Transformer
from clearhead.text.tokenizer_files import has_tokenizer

TOKENS, TARGETS, LENGTHS = 13, 7, (13, 5, 8)


@dataclass(frozen=True, repr=False)
class ParityReport(Printed):
    """Result of comparing a checkpoint here and in transformers.

    Args:
        folder, reference: folders loaded here and by transformers.
        cls: class in transformers.
        version: version of transformers.
        tolerance: largest relative difference that counts as equal.
        layers: largest relative difference of each layer, on random tokens.
        logits: relative difference of the outputs on random tokens; None if transformers returns none.
        padded: relative difference of the outputs of a padded batch; None if not compared.
        real: relative difference of the outputs on real text; None if there is no tokenizer.
        text: comparison of the tokenizers; None if there are none.
        divergence: first submodule that differs; None if none does.
        causes: likely causes, found by experiments.
    """

    folder: str
    reference: str
    cls: str
    version: str
    tolerance: float
    layers: dict[str, float]
    logits: float | None
    padded: float | None = None
    real: float | None = None
    text: TokenizerParity | None = None
    divergence: str | None = None
    causes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """True if everything that was compared agrees."""
        return self.largest <= self.tolerance and (self.text is None or self.text.is_same)

    @property
    def largest(self) -> float:
        """The largest of all relative differences."""
        return max(
            error for error in (*self.layers.values(), self.logits, self.padded, self.real, 0.0) if error is not None
        )

    def record(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"same": self.is_same, "largest": _finite(self.largest), **_finite(asdict(self))}

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        yield f"{self.folder} here, {self.reference} in transformers {self.version} as {self.cls}; float32, eager"
        yield "largest difference over the largest value"
        for name, value in self.layers.items():
            yield f"  {name:24} {value:.1e}"
        for name, other, reason in (
            ("outputs", self.logits, "transformers returns none"),
            ("outputs, padded", self.padded, "config.json names no padding token"),
            ("outputs, text", self.real, "there is no tokenizer, or no text that it can read"),
        ):
            yield f"  {name:24} {f'not compared: {reason}' if other is None else f'{other:.1e}'}"
        if self.text is not None:
            yield from self.text.lines()
        if self.divergence is not None:
            yield f"first divergence  {self.divergence}"
        for cause in self.causes:
            yield f"likely cause      {cause}"
        verdict = "the same" if self.is_same else "not the same"
        yield f"verdict           {verdict}: largest difference {self.largest:.1e}, tolerance {self.tolerance:.0e}"


def _finite(value: Any) -> Any:
    """Replace infinity, which JSON cannot hold, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and value == float("inf") else value


def compare_with_transformers(folder: Path, *, reference: Path | None = None, tolerance: float = 1e-4) -> ParityReport:
    """Compare a checkpoint loaded here with the same checkpoint loaded by transformers.

    Args:
        folder: folder loaded here.
        reference: folder that transformers loads; None means the same folder.
        tolerance: largest relative difference that counts as equal.

    Raises:
        InputError: transformers is missing, or one of the two cannot load its folder, or their shapes differ.
    """
    version = import_transformers().__version__
    other = folder if reference is None else reference
    pretrained = load_module(folder)
    read_generation_config(folder, pretrained.config, pretrained.module)  # refuses and warns as `load` does
    sides = ModelPair(pretrained, load_with_transformers(other, pretrained))
    inputs = _random_inputs(sides)
    try:
        expected = sides.run_theirs(inputs)
    except (ValueError, RuntimeError, IndexError) as error:
        raise InputError(f"{other}: transformers cannot run it: {first_line(error)}") from None
    points = compare_traces(sides.run_ours(sides.ours, inputs), expected)
    divergence = first_divergence(points, tolerance)
    causes: tuple[str, ...] = ()
    if divergence is not None:
        causes = tuple(find_causes(sides, inputs, expected, tolerance))
    text, real = None, None
    if has_tokenizer(folder):
        texts = load_tokenizers(folder)
        text = compare_tokenizers(texts, other)
        all_inputs = text_inputs(texts, _limit(sides), sides.ours.num_source_ids)
        real = max((_output_error(sides, _with_target(sides, text)) for text in all_inputs), default=None)
    padded = _padded_inputs(sides)
    return ParityReport(
        str(folder), str(other), type(sides.theirs).__name__, version, tolerance,
        layers={point.name: point.error for point in points if point.is_layer},
        logits=next((point.error for point in points if point.name == "outputs"), None),
        padded=None if padded is None else _output_error(sides, padded),
        real=real, text=text, divergence=_describe_point(sides, divergence), causes=causes,
    )  # fmt: skip


def _describe_point(sides: ModelPair, point: PointComparison | None) -> str | None:
    if point is None:
        return None
    pair = sides.pairs.get(point.path)
    return f"{point.name}{f' ({pair[0]})' if pair else ''}: {point.error:.1e}"


def _output_error(sides: ModelPair, inputs: TraceInputs) -> float:
    """Return the relative difference between clearhead's and transformers' outputs, at tokens that are not padding."""
    ours, theirs, mask = sides.run_ours(sides.ours, inputs), sides.run_theirs(inputs), inputs.mask
    if ours.outputs is None or theirs.outputs is None:
        return 0.0
    if mask is not None and ours.outputs.shape[:2] == mask.shape and theirs.outputs.shape[:2] == mask.shape:
        return compare_layouts(ours.outputs[mask], theirs.outputs[mask])
    return compare_layouts(ours.outputs, theirs.outputs)


def _limit(sides: ModelPair) -> int:
    return min(64, sides.ours.max_positions or 64)


def _pad(sides: ModelPair) -> int | None:
    pad = getattr(sides.theirs.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < sides.ours.num_source_ids else None


def _random_ids(sides: ModelPair, shape: tuple[int, int], *, seed: int, limit: int) -> Tensor:
    """Draw ids without padding, because some transformers classes derive positions from the padding id."""
    ids, pad = torch.randint(limit - 1, shape, generator=torch.Generator().manual_seed(seed)), _pad(sides)
    return ids if pad is None else ids + (ids >= pad)


def _random_inputs(sides: ModelPair, rows: int = 1) -> TraceInputs:
    length = min(TOKENS, _limit(sides))
    ids = _random_ids(sides, (rows, length), seed=7, limit=sides.ours.num_source_ids)
    ids = _with_end_tokens(sides, ids, torch.full((rows,), length))
    table = sides.ours.encoder.embedding.segments if sides.ours.encoder is not None else None
    segments = None
    if table is not None and table.weight.shape[0] > 1:
        segments = (torch.arange(length) > 4).long().expand(ids.shape)
    return _with_target(sides, TraceInputs(ids, segments=segments))


def _with_target(sides: ModelPair, inputs: TraceInputs) -> TraceInputs:
    """Add target ids if the model has two stacks."""
    if not sides.has_two_stacks:
        return inputs
    shape = (len(inputs.ids), min(TARGETS, _limit(sides)))
    return replace(inputs, target_ids=_random_ids(sides, shape, seed=11, limit=sides.ours.num_target_ids))


def _padded_inputs(sides: ModelPair) -> TraceInputs | None:
    pad = _pad(sides)
    if pad is None:
        return None
    whole = _random_inputs(sides, rows=len(LENGTHS))
    mask = torch.arange(whole.ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return replace(whole, ids=_with_end_tokens(sides, whole.ids, mask.sum(1)).masked_fill(~mask, pad), mask=mask)


def _with_end_tokens(sides: ModelPair, ids: Tensor, lengths: Tensor) -> Tensor:
    """Put end tokens at the ends of texts that the decoder repeats: some classes pool at that position."""
    end = getattr(sides.theirs.config, "eos_token_id", None)
    if sides.pretrained.task.repeats is None or not isinstance(end, int):
        return ids
    other = next(index for index in range(sides.ours.num_source_ids) if index not in (end, _pad(sides)))
    ids = ids.masked_fill(ids == end, other)
    ids[torch.arange(len(ids)), lengths - 1] = end
    return ids


# Hard cases for tokenizers, without special tokens: here these are plain text, in transformers they are not.
HARD = (
    "The quick brown fox jumps over the lazy dog.",
    "Ein kleiner Hund läuft über die grüne Straße, nicht wahr?",
    "",
    " ",
    "   \t\n ",
    "a",
    " leading and trailing ",
    "many    spaces     inside",
    "x" * 150,
    "UPPER lower MiXeD",
    "e\u0301 é \u0041\u030a Å ﬁ ½ ①",
    "😀 👩\u200d👩\u200d👧 🇩🇪 ❤️",
    "\x01\x1f\x7f control",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी ไทย",
    "▁underline ▁ and ##hash",
    "line\r\nline\rline\u2028line",
    "don't I'LL we'Ve; 3.14 (50%) in 1998!",
    "\u00a0non\u2003breaking\u200bspaces\ufeff",
)
# Normalizations that only one of the two tokenizers may apply.
_CHANGES: dict[str, Callable[[str], str]] = {
    "lower case": str.lower,
    "a space in front": lambda text: f" {text}",
    "spaces at the ends stripped": str.strip,
    "white space collapsed": lambda text: " ".join(text.split()),
    "Unicode composed (NFC)": lambda text: unicodedata.normalize("NFC", text),
    "Unicode composed for compatibility (NFKC)": lambda text: unicodedata.normalize("NFKC", text),
    "accents stripped": lambda text: "".join(
        letter for letter in unicodedata.normalize("NFD", text) if unicodedata.category(letter) != "Mn"
    ),
}


@dataclass(frozen=True, repr=False)
class TokenizerParity(Printed):
    """Result of comparing two tokenizers.

    Args:
        fingerprint: fingerprint of the tokenizer here.
        count: number of compared texts; 0 if transformers could not load a tokenizer.
        differing: texts with different ids.
        cause: likely cause; None if the ids are equal.
    """

    fingerprint: str
    count: int
    differing: tuple[str, ...] = ()
    cause: str | None = None

    @property
    def is_same(self) -> bool:
        """True if all ids are the same."""
        return not self.differing

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines of text."""
        if not self.count:
            yield f"tokenizer         not compared: {self.cause}"
            return
        same = self.count - len(self.differing)
        yield f"tokenizer         {same} of {self.count} texts give the same ids; fingerprint {self.fingerprint[:12]}"
        if self.differing:
            yield f"  first that differs       {self.differing[0]!r}"
        if self.cause is not None:
            yield f"likely cause      the tokenizer: {self.cause}"


def compare_tokenizers(text: CheckpointTokenizers, reference: Path) -> TokenizerParity:
    """Compare a checkpoint's tokenizer with the one that transformers loads from a folder, on hard strings."""
    source = text.pair.source
    try:
        # Explicit, because otherwise the library asks on the terminal whether to run the folder's code.
        theirs: Any = import_transformers().AutoTokenizer.from_pretrained(
            reference, local_files_only=True, trust_remote_code=False
        )
        expected = {hard: list(theirs(hard)["input_ids"]) for hard in HARD}
        plain = {hard: list(theirs(hard, add_special_tokens=False)["input_ids"]) for hard in HARD}
    except Exception as error:  # noqa: BLE001 - another library may raise anything
        return TokenizerParity(source.fingerprint, 0, cause=f"transformers cannot load it: {first_line(error)}")

    def encode(text: str) -> list[int]:
        return list(source.encode(text))

    differing = tuple(hard for hard in HARD if source.special_tokens.add_to(encode(hard))[0] != expected[hard])
    cause = _find_tokenizer_cause(encode, plain, differing) if differing else None
    return TokenizerParity(source.fingerprint, len(HARD), differing, cause)


def _find_tokenizer_cause(
    ours: Callable[[str], list[int]], plain: dict[str, list[int]], differing: tuple[str, ...]
) -> str:
    """Return the likely cause of different token ids."""
    if all(ours(text) == plain[text] for text in differing):
        return "the tokens are equal, but not the special tokens around a text"
    for name, change in _CHANGES.items():
        if all(ours(change(text)) == plain[text] for text in plain):
            return f"transformers reads a text with {name}, clearhead without"
        if all(ours(text) == plain[text] for text in plain if change(text) == text):
            return f"clearhead reads a text with {name}, transformers without"
    return f"tokens differ, first in {next(text for text in differing if ours(text) != plain[text])!r}"


def text_inputs(text: CheckpointTokenizers, limit: int, rows: int) -> Iterator[TraceInputs]:
    """Yield model inputs of the hard strings with special tokens, if they fit the model."""
    source = text.pair.source
    for hard in HARD:
        ids, segments = source.special_tokens.add_to(source.encode(hard))
        if 0 < len(ids) <= limit and max(ids) < rows:
            yield TraceInputs(torch.tensor([ids]), segments=torch.tensor([segments]) if any(segments) else None)


MOST_CAUSES = 4
_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)
_THETAS = (1e4, 1e5, 5e5, 1e6)
_NORMS = (spec.LayerNorm, spec.RMSNorm)
_FIELDS: tuple[tuple[str, tuple[type[spec.Node], ...], str], ...] = (
    ("the epsilon of norms", _NORMS, "eps"),
    ("whether norms add 1 to their weights", _NORMS, "unit_offset"),
    ("the activation variant", (spec.FeedForward,), "activation"),
    ("the activation variant", (spec.Activation,), "function"),
    ("the scale of attention scores", (spec.Attention,), "scale"),
    ("the scale of the embedding", (spec.Embedding,), "scale"),
    ("the scale of the input of the head", (spec.Linear,), "scale"),
    ("the offset of positions", (spec.Learned, spec.Sinusoidal), "offset"),
    ("the theta of RoPE", (spec.Rotary,), "theta"),
)
State = Mapping[str, Tensor]
Conversion = Callable[[list[Tensor], Slots], list[Tensor]]
Change = Callable[[spec.Node], spec.Node]


@dataclass(frozen=True)
class Experiment:
    """A changed model: description of the change, and a function that builds the module."""

    description: str
    make: Callable[[], Transformer]


def find_causes(sides: ModelPair, inputs: TraceInputs, expected: Trace, tolerance: float) -> Iterator[str]:
    """Yield the likely causes of a difference from transformers.

    Args:
        sides: both models.
        inputs: inputs of both models.
        expected: trace of transformers.
        tolerance: largest relative difference that counts as equal.
    """
    module = sides.ours
    for _ in range(MOST_CAUSES):
        trace = sides.run_ours(module, inputs)
        agreement = _measure_agreement(compare_traces(trace, expected), tolerance)
        if agreement is None:
            return
        best, best_agreement = None, agreement
        for experiment in _experiments(sides, module, trace, expected, tolerance):
            try:
                changed = experiment.make()
                new_agreement = _measure_agreement(compare_traces(sides.run_ours(changed, inputs), expected), tolerance)
            except (InputError, RuntimeError):
                continue
            if new_agreement is None:
                yield experiment.description
                return
            # Among experiments that agree equally far, keep the one with the smallest difference.
            if new_agreement[0] > agreement[0] and new_agreement > best_agreement:
                best, best_agreement = (experiment, changed), new_agreement
        if best is None:
            yield _describe_tensors(sides, module)
            return
        yield best[0].description
        module = best[1]


def _measure_agreement(points: list[PointComparison], tolerance: float) -> tuple[int, float] | None:
    """Return index and negative error of the first difference (larger means closer); None if models agree."""
    first = first_divergence(points, tolerance)
    return None if first is None else (points.index(first), -first.error)


def _experiments(
    sides: ModelPair, module: Transformer, trace: Trace, expected: Trace, tolerance: float
) -> Iterator[Experiment]:
    for description, change in _field_changes(module, sides.theirs.config.to_dict()):
        yield Experiment(description, partial(_build_changed, module, change))
    yield from _layout_experiments(module)
    yield from _order_experiments(module, trace, expected, tolerance)


def _build_changed(module: Transformer, change: Change) -> Transformer:
    return build_from_tensors(spec.map_nodes(module.spec, lambda _, node: change(node)), module.state_dict())


def _setter(kinds: tuple[type[spec.Node], ...], name: str, before: Any, after: Any) -> Change:
    def change(node: spec.Node) -> spec.Node:
        is_match = isinstance(node, kinds) and getattr(node, name) == before
        return node.model_copy(update={name: after}) if is_match else node

    return change


def _candidates(node: spec.Node, name: str, width: int, epsilons: Collection[float]) -> Iterable[Any]:
    """Return the values that a spec field may have in another implementation."""
    match node, name:
        case _, "eps":
            return sorted({*_EPSILONS, *epsilons})
        case _, "unit_offset":
            return False, True
        case _, "activation" | "function":
            return get_args(spec.ActivationName)
        case spec.Attention(), _:
            return node.head_size**-0.5, 1.0, 1.0 / node.head_size, width**-0.5
        case spec.Embedding(), _:
            return 1.0, width**0.5
        case spec.Linear(), _:
            return 1.0, width**-0.5
        case spec.Learned() | spec.Sinusoidal(), _:
            return [node.offset + step for step in (-2, -1, 1, 2) if node.offset + step >= 0]
    return _THETAS


def _field_changes(module: Transformer, config: Mapping[str, Any]) -> Iterator[tuple[str, Change]]:
    """Yield changes to the spec fields that are most often wrong, each with a description."""
    known = {value for key, value in config.items() if "eps" in key and isinstance(value, float) and value > 0}
    stack = module.spec.encoder or module.spec.decoder
    assert stack is not None, "a validated model has a stack"
    for label, kinds, name in _FIELDS:
        tried = set()
        for node in [node for _, node in spec.walk(module.spec) if isinstance(node, kinds)]:
            before = getattr(node, name)
            now = node.head_size**-0.5 if isinstance(node, spec.Attention) and before is None else before
            if not isinstance(now, str | float | int):
                continue
            for after in _candidates(node, name, stack.width, known):
                is_other = now != after if isinstance(now, str) else not math.isclose(now, after, abs_tol=0.0)
                if is_other and (now, after) not in tried:
                    tried.add((now, after))
                    yield (
                        f"{label}: {_format_value(now)} in clearhead, {_format_value(after)} in transformers",
                        _setter(kinds, name, before, after),
                    )


def _format_value(value: str | float | int) -> str:
    return f"{value}" if isinstance(value, str | bool) else f"{value:.6g}"


def _attentions(module: Transformer) -> dict[str, spec.Attention]:
    return {path: node for path, node in spec.walk(module.spec) if isinstance(node, spec.Attention)}


def _layout_experiments(module: Transformer) -> Iterator[Experiment]:
    """Yield experiments with the other RoPE layout: interleaved pairs instead of half a head apart, or the reverse."""
    rotating = {path: node for path, node in _attentions(module).items() if node.position is not None}
    if not rotating:
        return
    conversions = (("neighbours", "halves", RotaryHalves().load), ("halves", "neighbours", RotaryHalves().save))
    for there, here, convert in conversions:
        description = f"the layout of rotated pairs: the tensors were read as {here}, and they are {there}"
        yield Experiment(description, partial(_change_layout, module, rotating, convert))


def _change_layout(module: Transformer, rotating: Mapping[str, spec.Attention], convert: Conversion) -> Transformer:
    state = dict(module.state_dict())
    for path, node in rotating.items():
        for name in (f"{path}.{role}.{leaf}" for role in ("query", "key") for leaf in ("weight", "bias")):
            if name in state:
                (state[name],) = convert([state[name]], Slots((state[name].shape,), node))
    return build_from_tensors(module.spec, state)


def _order_experiments(module: Transformer, trace: Trace, expected: Trace, tolerance: float) -> Iterator[Experiment]:
    """Yield experiments that reorder heads, if an attention has the heads of transformers in another order."""
    for path, node in _attentions(module).items():
        orders: dict[str, list[int]] = {}
        for role in ("query", "key", "value"):
            key = (f"{path}.{role}", 0)
            if key not in trace.parts or key not in expected.parts:
                continue
            actual, wanted = (side.parts[key].unflatten(-1, (-1, node.head_size)) for side in (trace, expected))
            differs = relative_error(actual, wanted) > tolerance and actual.shape == wanted.shape
            if differs and (order := _match_heads(actual, wanted, tolerance)) is not None:
                orders[role] = order
        if orders:
            order = next(iter(orders.values()))
            description = (
                f"the order of heads: the {' and '.join(orders)} heads of transformers are heads {order} in clearhead"
            )
            yield Experiment(f"{description}, in {path}", partial(_reorder_heads, module, {path: orders}))
            everywhere = dict.fromkeys(_attentions(module), orders)
            yield Experiment(f"{description}, in every layer", partial(_reorder_heads, module, everywhere))
            return


def _match_heads(actual: Tensor, wanted: Tensor, tolerance: float) -> list[int] | None:
    """Return, for each head of transformers, the number of the equal head here; None if a head has no equal."""
    heads = range(actual.shape[-2])
    order = [
        next((i for i in heads if relative_error(actual[..., i, :], wanted[..., j, :]) <= tolerance), -1) for j in heads
    ]
    return order if sorted(order) == list(heads) else None


def _reorder_heads(module: Transformer, places: Mapping[str, Mapping[str, list[int]]]) -> Transformer:
    state, nodes = dict(module.state_dict()), _attentions(module)
    for path, orders in places.items():
        for role, order in orders.items():
            for name in (f"{path}.{role}.weight", f"{path}.{role}.bias"):
                size = nodes[path].head_size
                if name in state and state[name].shape[0] == len(order) * size:
                    state[name] = state[name].unflatten(0, (-1, size))[torch.tensor(order)].flatten(0, 1)
    return build_from_tensors(module.spec, state)


def _describe_tensors(sides: ModelPair, module: Transformer) -> str:
    """Return a sentence about the tensors that differ, for a divergence that no experiment explains."""
    loaded = sides.pretrained
    mine = module_to_hf_tensors(module, loaded.family, loaded.variant, loaded.prefix, module.state_dict())
    base, theirs = f"{getattr(sides.theirs, 'base_model_prefix', '')}.", sides.theirs.state_dict()
    other = {name.removeprefix(base): tensor for name, tensor in theirs.items()}
    differing = []
    for name, tensor in mine.items():
        known = other.get(name.removeprefix(base))
        if known is not None and not (known.shape == tensor.shape and torch.equal(known.float(), tensor.float())):
            differing.append(name)
    if not differing:
        return "not found by any experiment; all tensors that can be compared are equal"
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"the weights: '{differing[0]}'{more} have other values in transformers"
