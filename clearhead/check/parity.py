"""The parity card: how far a checkpoint here is from the same, or another, folder in transformers, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.check.causes import find_causes
from clearhead.check.measure import Comparison, compare_traces, first_divergence, relative_error
from clearhead.check.texts import TokenizerParity, compare_tokenizers, text_inputs
from clearhead.check.trace import ModelInputs, ModelPair, first_line, import_transformers, load_with_transformers
from clearhead.errors import InputError
from clearhead.hf.loading import load_module
from clearhead.hf.tokenizers import load_tokenizers
from clearhead.text.tokenizer_files import has_tokenizer

TOKENS, TARGETS, LENGTHS = 13, 7, (13, 5, 8)


@dataclass(frozen=True)
class ParityReport:
    """What a comparison found.

    Args:
        folder, reference: what was loaded here, and there.
        cls: the class that transformers took.
        version: of transformers.
        tolerance: the largest relative difference that counts as the same.
        layers: the largest relative difference of each layer, random tokens.
        logits: of the outputs, random tokens.
        padded: of the outputs where shorter rows are filled up; None: not compared.
        real: of the outputs on real text; None: there is no tokenizer.
        text: the tokenizers; None: there are none.
        divergence: the first part that differs; None: none does.
        causes: what probably is the reason, by experiment.
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
    causes: tuple[str, ...] = field(default=())

    @property
    def is_same(self) -> bool:
        """Whether everything that was compared agrees."""
        return self.largest <= self.tolerance and (self.text is None or self.text.is_same)

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max(one for one in (*self.layers.values(), self.logits, self.padded, self.real, 0.0) if one is not None)

    def record(self) -> dict[str, Any]:
        """Return the card as JSON values."""
        return {"same": self.is_same, "largest": _finite(self.largest), **_finite(asdict(self))}

    def lines(self) -> Iterator[str]:
        """Yield the card as a person reads it."""
        yield f"{self.folder} here, {self.reference} in transformers {self.version} as {self.cls}; float32, eager"
        yield "largest difference over the largest value"
        for name, value in self.layers.items():
            yield f"  {name:24} {value:.1e}"
        for name, other in (("outputs", self.logits), ("outputs, padded", self.padded), ("outputs, text", self.real)):
            yield f"  {name:24} {'not compared' if other is None else f'{other:.1e}'}"
        if self.text is not None:
            yield from self.text.lines()
        if self.divergence is not None:
            yield f"first divergence  {self.divergence}"
        for cause in self.causes:
            yield f"likely cause      {cause}"
        verdict = "the same" if self.is_same else "not the same"
        yield f"verdict           {verdict}: largest difference {self.largest:.1e}, tolerance {self.tolerance:.0e}"


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and value == float("inf") else value


def compare_with_transformers(folder: Path, *, reference: Path | None = None, tolerance: float = 1e-4) -> ParityReport:
    """Compare a checkpoint's folder with transformers.

    Args:
        folder: what is loaded here.
        reference: what transformers loads; None: the same.
        tolerance: the largest relative difference that counts as the same.

    Raises:
        InputError: transformers is missing, or one of the two cannot load its folder, or they are of different shapes.
    """
    version = import_transformers().__version__
    other = folder if reference is None else reference
    pretrained = load_module(folder, dtype=torch.float32)
    sides = ModelPair(pretrained, load_with_transformers(other, pretrained))
    reading = _random(sides)
    try:
        expected = sides.run_theirs(reading)
    except (ValueError, RuntimeError, IndexError) as error:
        raise InputError(f"{other}: transformers cannot run it: {first_line(error)}") from None
    found = compare_traces(sides.run_ours(sides.ours, reading), expected)
    divergence = first_divergence(found, tolerance)
    causes: tuple[str, ...] = ()
    if divergence is not None:
        causes = tuple(find_causes(sides, reading, expected, tolerance))
    text, real = None, None
    if has_tokenizer(folder):
        texts = load_tokenizers(folder)
        text = compare_tokenizers(texts, other)
        readings = text_inputs(texts, _limit(sides), sides.ours.num_source_ids)
        real = max((_outputs(sides, _completed(sides, one)) for one in readings), default=None)
    filled = _padded(sides)
    return ParityReport(
        str(folder), str(other), type(sides.theirs).__name__, version, tolerance,
        layers={point.name: point.error for point in found if point.is_layer},
        logits=next((point.error for point in found if point.name == "outputs"), None),
        padded=None if filled is None else _outputs(sides, filled),
        real=real, text=text, divergence=_named(sides, divergence), causes=causes,
    )  # fmt: skip


def _named(sides: ModelPair, point: Comparison | None) -> str | None:
    if point is None:
        return None
    pair = sides.pairs.get(point.path)
    return f"{point.name}{f' ({pair[0]})' if pair else ''}: {point.error:.1e}"


def _outputs(sides: ModelPair, reading: ModelInputs) -> float:
    """The difference of the outputs over real places."""
    ours, theirs = sides.run_ours(sides.ours, reading), sides.run_theirs(reading)
    mask = reading.mask
    if ours.outputs is None or theirs.outputs is None:
        return 0.0
    if mask is not None and ours.outputs.shape[:2] == mask.shape and theirs.outputs.shape[:2] == mask.shape:
        return relative_error(ours.outputs[mask], theirs.outputs[mask])
    return relative_error(ours.outputs, theirs.outputs)


def _limit(sides: ModelPair) -> int:
    most = sides.ours.max_positions
    return 64 if most is None else min(64, most)


def _draw(sides: ModelPair, rows: int, length: int, generator: torch.Generator, *, target: bool = False) -> Tensor:
    """Ids that never are the padding's, by which some classes count positions."""
    limit = sides.ours.num_target_ids if target else sides.ours.num_source_ids
    ids = torch.randint(limit - 1, (rows, length), generator=generator)
    pad = _pad(sides)
    return ids if pad is None else ids + (ids >= pad)


def _pad(sides: ModelPair) -> int | None:
    found = getattr(sides.theirs.config, "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < sides.ours.num_source_ids else None


def _random(sides: ModelPair, rows: int = 1) -> ModelInputs:
    generator = torch.Generator().manual_seed(7)
    length = min(TOKENS, _limit(sides))
    ids = _ended(sides, _draw(sides, rows, length, generator), torch.full((rows,), length))
    table = sides.ours.encoder.embedding.segments if sides.ours.encoder is not None else None
    segments = None
    if table is not None and table.weight.shape[0] > 1:
        segments = (torch.arange(length) > 4).long().expand(ids.shape)
    return _completed(sides, ModelInputs(ids, segments=segments))


def _completed(sides: ModelPair, reading: ModelInputs) -> ModelInputs:
    """Add what the decoder of two stacks reads."""
    if sides.ours.encoder is None or sides.ours.decoder is None:
        return reading
    generator = torch.Generator().manual_seed(11)
    target = _draw(sides, len(reading.ids), min(TARGETS, _limit(sides)), generator, target=True)
    return ModelInputs(reading.ids, reading.mask, target, reading.segments)


def _padded(sides: ModelPair) -> ModelInputs | None:
    pad = _pad(sides)
    if pad is None:
        return None
    whole = _random(sides, rows=len(LENGTHS))
    mask = torch.arange(whole.ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    ids = _ended(sides, whole.ids, mask.sum(1)).masked_fill(~mask, pad)
    return ModelInputs(ids, mask, whole.target_ids, whole.segments)


def _ended(sides: ModelPair, ids: Tensor, lengths: Tensor) -> Tensor:
    """Let texts that a decoder reads once more end with the end token, by which some classes find the place to pool."""
    end = getattr(sides.theirs.config, "eos_token_id", None)
    if sides.pretrained.task.repeats is None or not isinstance(end, int):
        return ids
    others = [one for one in range(sides.ours.num_source_ids) if one not in (end, _pad(sides))]
    ids = ids.masked_fill(ids == end, others[0])
    ids[torch.arange(len(ids)), lengths - 1] = end
    return ids
