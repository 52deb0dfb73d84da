"""Encode the content of an explorer page: a JSON object, and compressed arrays that the object names by number.

A weight w from 0 to 1 is stored as the integer round(2047 sqrt(w)). The error is below 5e-4, and smaller for small
weights. Weights that the mask forbids are not stored.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Num, UInt

from clearhead.base.errors import InputError
from clearhead.interpret.view.explorer.data import (
    BeamNode,
    ExactHead,
    HeadColumn,
    LayerAttention,
    Page,
    PageLens,
    Sample,
    StackAttention,
    TokenRow,
)

LEVELS = 2047
LARGEST = 40_000_000
"""Most numbers that one page stores: about 40 MB of file for peaked attention, and 80 MB in the browser."""
Json = dict[str, Any]


@dataclass
class Encoder:
    """Encodes an explorer page as JSON and numbered arrays; weights are computed one layer at a time when written.

    Args:
        makers: functions that return arrays; the arrays are numbered in this order.
        starts: number of the first array of each function.
        num_blobs: number of arrays so far.
        spans: first and last visible key of each query, for each distinct mask; last < first means no key.
    """

    makers: list[Callable[[], list[Num[np.ndarray, "..."]]]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_blobs: int = 0
    spans: list[list[int]] = field(default_factory=list)

    def add_arrays(self, count: int, make: Callable[[], list[Num[np.ndarray, "..."]]]) -> int:
        """Add `count` arrays, which `make` computes when the page is written; return the number of the first."""
        self.makers.append(make)
        self.starts.append(self.num_blobs)
        self.num_blobs += count
        return self.num_blobs - count

    def add_array(self, array: Num[np.ndarray, "..."]) -> int:
        """Add an array, and return its number."""
        return self.add_arrays(1, lambda: [array])

    def texts(self) -> Iterator[str]:
        """Yield the compressed arrays in the order of their numbers."""
        for make in self.makers:
            yield from map(compress_array, make())

    def page(self, page: Page) -> Json:
        """Return an explorer page as JSON values, with the numbers of its arrays."""
        assert page.samples, "a page needs a sample"
        refuse_too_large(page)
        samples = [self.sample(sample) for sample in page.samples]
        facts = [list(fact) for fact in page.facts]
        return {
            "title": page.title, "facts": facts, "timeline": page.is_timeline, "samples": samples, "spans": self.spans,
        }  # fmt: skip

    def sample(self, sample: Sample) -> Json:
        """Return the JSON values of a sample (one text in one model)."""
        return {
            "label": sample.label,
            "facts": list(map(list, sample.facts)),
            "texts": list(map(list, sample.texts)),
            "rows": {name: _token_row(row) for name, row in sample.rows.items()},
            "columns": list(map(_column, sample.columns)),
            "attentions": [self.stack(stack, sample) for stack in sample.attentions],
            "lens": None if sample.lens is None else self.lens(sample.lens),
            "beams": list(map(_beam_node, sample.beams)),
        }

    def stack(self, stack: StackAttention, sample: Sample) -> Json:
        """Return the JSON values of the attention of a stack."""
        size = len(sample.rows[stack.queries].tokens), len(sample.rows[stack.keys].tokens)
        return {
            "stack": stack.stack, "queries": stack.queries, "keys": stack.keys, "measure": stack.measure,
            "layers": [self.layer(layer, size) for layer in stack.layers],
        }  # fmt: skip

    def layer(self, layer: LayerAttention, size: tuple[int, int]) -> Json:
        """Return the JSON values of the attention of one layer; add its arrays."""
        spans = list(layer.spans) or spans_of(layer.mask, size)
        if spans not in self.spans:
            self.spans.append(spans)
        chosen, weights, first = sorted(layer.exact), layer.weights, None
        exact = {}
        if weights is not None:
            allowed = _allowed_pairs(spans, size)
            first = self.add_arrays(1 + len(chosen), lambda: _layer_arrays(layer, weights(), allowed))
            exact = {str(head): _exact_head(layer.exact[head], first + 1 + at) for at, head in enumerate(chosen)}
        effects = layer.key_effects
        return {
            "layer": layer.layer, "heads": list(layer.heads), "numHeads": layer.num_heads,
            "numKvHeads": layer.num_kv_heads, "spans": self.spans.index(spans), "mask": layer.mask_name,
            "sink": layer.has_sink, "bias": layer.score_bias, "weights": first, "exact": exact,
            "values": {name: _numbers(values) for name, values in layer.values.items()},
            "patterns": list(layer.patterns),
            "keyEffects": None if effects is None else self.add_array(effects.astype(np.float32)),
            "feedForward": {name: _number_or_none(value) for name, value in layer.feed_forward.items()},
        }  # fmt: skip

    def lens(self, lens: PageLens) -> Json:
        """Return the JSON values of the logit lens; add its arrays."""
        targets, probabilities, followed = lens.targets, lens.target_probabilities, lens.followed
        return {
            "row": lens.row, "layers": list(lens.layers), "vocabulary": list(lens.vocabulary),
            "top": lens.entries.shape[2],
            "entries": self.add_array(lens.entries.astype(np.int32)),
            "probabilities": self.add_array(lens.probabilities.astype(np.float32)),
            "targets": None if targets is None else targets.tolist(),
            "targetProbabilities": None if probabilities is None else self.add_array(probabilities.astype(np.float32)),
            "followed": None if followed is None else self.add_array(followed.astype(np.float32)),
            "followedName": lens.followed_name,
        }  # fmt: skip


def _token_row(row: TokenRow) -> Json:
    generated, special = (
        None if marks is None else marks.astype(int).tolist() for marks in (row.is_generated, row.is_special)
    )
    return {
        "tokens": list(row.tokens), "texts": list(row.texts), "words": row.words.tolist(), "generated": generated,
        "special": special, "writes": list(row.writes),
    }  # fmt: skip


def _column(item: HeadColumn) -> Json:
    return {"name": item.name, "title": item.title, "description": item.description, "kind": item.kind}


def _beam_node(node: BeamNode) -> Json:
    return {
        "parent": node.parent, "token": node.token, "logProbability": _number_or_none(node.log_probability),
        "score": _number_or_none(node.score), "step": node.step, "state": node.state, "reason": node.reason,
        "rank": node.rank,
    }  # fmt: skip


def _number_or_none(value: float | None) -> float | None:
    """Return a float32 with its shortest digits; None for NaN and infinity, which JSON cannot hold."""
    return None if value is None or not math.isfinite(value) else float(str(np.float32(value)))


def _numbers(values: Float[np.ndarray, " any_size"]) -> list[float | None]:
    return [_number_or_none(float(value)) for value in values]


def spans_of(mask: Bool[np.ndarray, "queries keys"] | None, size: tuple[int, int]) -> list[int]:
    """Return the first and last visible key of each query in turn; 0 and -1 for a query without keys.

    Raises:
        InputError: the visible keys of a query are not contiguous.
    """
    queries, keys = size
    if mask is None:
        return [0, keys - 1] * queries
    assert mask.shape == size, f"a mask of {mask.shape} for {size} tokens"
    seen = mask.sum(axis=1)
    first = np.where(seen > 0, mask.argmax(axis=1), 0)
    last = np.where(seen > 0, keys - 1 - mask[:, ::-1].argmax(axis=1), -1)
    if (last - first + 1 != seen).any():
        raise InputError("the page can only show masks whose visible keys are contiguous, but this mask has gaps")
    return [int(number) for pair in zip(first, last, strict=True) for number in pair]


def _allowed_pairs(spans: list[int], size: tuple[int, int]) -> Bool[np.ndarray, "queries keys"]:
    first, last = np.array(spans[::2])[:, None], np.array(spans[1::2])[:, None]
    key = np.arange(size[1])[None]
    allowed: Bool[np.ndarray, "queries keys"] = (first <= key) & (key <= last)
    return allowed


def _layer_arrays(
    layer: LayerAttention,
    weights: Float[np.ndarray, "heads queries keys"],
    allowed: Bool[np.ndarray, "queries keys"],
) -> list[Num[np.ndarray, "..."]]:
    """Return the weights of all heads of a layer as integers, then the float32 numbers of each exact head."""
    assert weights.shape == (len(layer.heads), *allowed.shape), "weights [heads, queries, keys]"
    exact = [
        _exact_numbers(layer.exact[head], weights[layer.heads.index(head)], allowed) for head in sorted(layer.exact)
    ]
    return [codes(weights, allowed, has_sink=layer.has_sink), *exact]


def codes(
    weights: Float[np.ndarray, "heads queries keys"], allowed: Bool[np.ndarray, "queries keys"], *, has_sink: bool
) -> UInt[np.ndarray, " numbers"]:
    """Return each head's unmasked weights as integers, row by row; then, with a sink, its weight for each query."""
    parts = [weights[:, allowed].ravel()]
    if has_sink:
        parts.append((1.0 - weights.sum(axis=2, dtype=np.float64)).ravel())
    shares = np.clip(np.concatenate(parts), 0.0, 1.0)
    numbers: UInt[np.ndarray, " numbers"] = np.rint(LEVELS * np.sqrt(shares)).astype(np.uint16)
    return numbers


def _exact_head(head: ExactHead, blob: int) -> Json:
    return {
        "blob": blob, "size": head.query.shape[1], "scale": _number_or_none(head.scale),
        "softCap": _number_or_none(head.soft_cap), "sink": _number_or_none(head.sink), "bias": head.bias is not None,
    }  # fmt: skip


def _exact_numbers(
    head: ExactHead, weights: Float[np.ndarray, "queries keys"], allowed: Bool[np.ndarray, "queries keys"]
) -> Float[np.ndarray, " numbers"]:
    """Return a head's unmasked weights, queries, keys and unmasked biases in one float32 array."""
    parts = [weights[allowed], head.query.ravel(), head.key.ravel()]
    if head.bias is not None:
        parts.append(head.bias[allowed])
    return np.concatenate(parts).astype(np.float32)


def compress_array(array: Num[np.ndarray, "..."]) -> str:
    """Return an array deflated and in base64: first the lowest byte of all numbers, then the second, and so on."""
    little = np.ascontiguousarray(array.ravel().astype(array.dtype.newbyteorder("<")))
    planes = little.view(np.uint8).reshape(-1, array.dtype.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def refuse_too_large(page: Page) -> None:
    """Raise InputError if a page would have more numbers than a browser can open easily."""
    refuse_too_many(sum(_stored_size(layer, sizes) for sample in page.samples for layer, sizes in _layers_of(sample)))


def refuse_too_many(count: int) -> None:
    """Raise InputError if a page of `count` numbers is more than a browser can open easily."""
    if count > LARGEST:
        raise InputError(
            f"a page holds up to {LARGEST:,} attention weights, and this one would hold {count:,}: choose some with "
            "--layers and --heads, or give a shorter text"
        )


def _layers_of(sample: Sample) -> Iterator[tuple[LayerAttention, tuple[int, int]]]:
    rows: Mapping[Any, TokenRow] = sample.rows
    for stack in sample.attentions:
        for layer in stack.layers:
            yield layer, (len(rows[stack.queries].tokens), len(rows[stack.keys].tokens))


def _stored_size(layer: LayerAttention, size: tuple[int, int]) -> int:
    """Return how many numbers a page stores for a layer; a float32 counts as three, since it hardly compresses."""
    pairs = size[0] * size[1] if layer.mask is None else int(layer.mask.sum())
    exact = sum(
        pairs * (1 + (head.bias is not None)) + head.query.size + head.key.size for head in layer.exact.values()
    )
    return pairs * len(layer.heads) + 3 * exact
