"""Show attention weights from arrays in the explorer, without a model: arrays of any library, or a saved .npz file.

Legend: L layers, H heads, T queries, S keys.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, argument
from clearhead.base.files import open_model_file, refuse_unwritable
from clearhead.base.formats import FileFormat
from clearhead.base.printing import Printed
from clearhead.interpret.view.explorer.data import (
    LayerAttention,
    Page,
    RowName,
    Sample,
    StackAttention,
    StackName,
    TokenRow,
)
from clearhead.interpret.view.explorer.write import frame_html, write_page

_FRAME_HEIGHT = 640
_MOST_OFF = 1e-2
_LAYOUTS: Mapping[str, tuple[StackName, RowName, RowName]] = {
    "full": ("encoder.self", "encoder", "encoder"), "causal": ("decoder.self", "decoder", "decoder"),
    "memory": ("decoder.memory", "decoder", "encoder"),
}  # fmt: skip
Weights = Float32[np.ndarray, "layers heads queries keys"]


class AttentionPage(Printed):
    """Page of the attention explorer; a notebook displays it.

    Args:
        page: content of the page: its texts and arrays, not yet HTML.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self.title: str = page.title

    def save_html(self, path: str | Path, *, force: bool = False) -> None:
        """Write the page as one HTML file that needs no network.

        Args:
            path: HTML file to write.
            force: True to replace an existing file.

        Raises:
            InputError: the page would have too many weights, or the file exists or cannot be written.
        """
        refuse_unwritable(Path(path), force=force)
        write_page(self._page, Path(path))

    def _repr_html_(self) -> str:
        return frame_html(self._page, height=_FRAME_HEIGHT)


@check_types
def view_attention(
    weights: Any,
    tokens: Sequence[str] | None = None,
    target_tokens: Sequence[str] | None = None,
    *,
    title: str = "attention",
) -> AttentionPage:
    """Show attention weights of any model, or a saved .npz file, in the explorer.

    Args:
        weights: array [layers, heads, queries, keys], numpy or torch, from 0 to 1. You can also pass a list with one
            array [heads, queries, keys] per layer, which may have a batch axis of size one. A row sums to one, or to
            zero if a query sees no key. You can also pass the path of a .npz file of `AttentionMaps.save`, which has
            its tokens.
        tokens: labels of the keys; without `target_tokens` also of the queries. None means that a file has them.
        target_tokens: labels of the rows of cross-attention: the token that is written at each step. None means
            self-attention.
        title: heading of the page.

    Returns:
        The page, which a notebook displays and `save_html` writes.

    Raises:
        InputError: the weights have another shape, NaN, or rows that do not sum to one. A list of tokens has another
            length. The file has other content or an unsupported format.
    """
    if isinstance(weights, Path) or (isinstance(weights, str) and weights.endswith(".npz")):
        if tokens is not None or target_tokens is not None:
            raise InputError(f"{weights} has the tokens of its weights: leave " + argument("tokens") + " out")
        return AttentionPage(load_saved_page(Path(weights), title))
    stack_LHTS = _as_array(weights)
    if tokens is None:
        raise InputError("weights need labels: give " + argument("tokens") + ", one for each key")
    queries = tokens if target_tokens is None else target_tokens
    _refuse_wrong(stack_LHTS, len(queries), len(tokens))
    layout = "full" if np.triu(stack_LHTS, 1).any() else "causal"
    if target_tokens is not None:
        layout = "memory"
    stack, top, keys = _LAYOUTS[layout]
    mask = np.tri(len(tokens), dtype=np.bool_) if stack == "decoder.self" else None
    num_heads = stack_LHTS.shape[1]
    layers = tuple(
        LayerAttention(
            layer=index, heads=tuple(range(num_heads)), num_heads=num_heads, num_kv_heads=num_heads,
            weights=partial(np.asarray, layer_HTS), mask=mask, mask_name="none" if mask is None else "causal",
        )
        for index, layer_HTS in enumerate(stack_LHTS)
    )  # fmt: skip
    rows = {top: token_row(list(queries)), keys: token_row(list(tokens))}
    return AttentionPage(Page(title, (Sample("", rows, (StackAttention(stack, top, keys, layers),)),)))


def _as_array(weights: Any) -> Weights:
    """Convert weights to one array; a list has one array per layer."""
    if isinstance(weights, list | tuple):
        layers = [array[0] if array.ndim == 4 and len(array) == 1 else array for array in map(_plain, weights)]
        if len({layer.shape for layer in layers}) != 1:
            raise InputError("weights must have the same shape [heads, queries, keys] in every layer")
        array = np.stack(layers)
    else:
        array = _plain(weights)
    if array.ndim == 5 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 4 or not array.size:
        raise InputError(f"weights must be [layers, heads, queries, keys], got {list(array.shape)}")
    return array


def _plain(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().to("cpu").float().numpy()
    try:
        return np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise InputError(
            f"weights must be a numpy array or a torch tensor of numbers, got {type(value).__name__}"
        ) from None


def _refuse_wrong(stack_LHTS: Weights, queries: int, keys: int) -> None:
    if stack_LHTS.shape[2:] != (queries, keys):
        raise InputError(
            f"weights have {stack_LHTS.shape[2]} queries and {stack_LHTS.shape[3]} keys, but "
            f"the tokens are {queries} and {keys}: give one token for each"
        )
    if not np.isfinite(stack_LHTS).all():
        layer, head, query, _ = np.argwhere(~np.isfinite(stack_LHTS))[0]
        raise InputError(f"weights must be finite, but layer {layer}, head {head}, query {query} has NaN or infinity")
    if stack_LHTS.min() < 0:
        raise InputError("weights must not be negative: if these are scores, apply softmax over the keys")
    sums = stack_LHTS.sum(-1)
    wrong = np.argwhere((np.abs(sums - 1) > _MOST_OFF) & (sums > _MOST_OFF))
    if len(wrong):
        layer, head, query = wrong[0]
        hint = ": swap the last two axes" if np.allclose(stack_LHTS.sum(-2), 1, atol=_MOST_OFF) else ": normalize them"
        raise InputError(
            f"the weights of a query must sum to one, but in layer {layer}, head {head}, query {query} they sum to "
            f"{sums[layer, head, query]:.3g}{hint}"
        )


# Format 1 has no written tokens, so the page numbers the decoder's steps.
MAPS: Final = FileFormat("saved attention maps", 2, "save them again", oldest=1)
_ROWS: Mapping[StackName, tuple[RowName, RowName]] = {
    "encoder.self": ("encoder", "encoder"), "decoder.self": ("decoder", "decoder"),
    "decoder.memory": ("written", "encoder"),
}  # fmt: skip


def load_saved_page(path: Path, title: str) -> Page:
    """Load a .npz file of attention maps as a page.

    Args:
        path: .npz file.
        title: heading of the page.

    Raises:
        InputError: the file has an unsupported format or other content.
    """
    arrays = _read(path)
    header = {name: arrays[name].item() for name in MAPS.header() if name in arrays and arrays[name].ndim == 0}
    MAPS.check(header, path)
    try:
        stacks = [stack for stack in _ROWS if stack in arrays]
        rows = _rows(arrays, stacks)
        return Page(title, (Sample("", rows, tuple(_stack(name, arrays, rows) for name in stacks)),))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise InputError(f"{path} must have the tokens and weights of attention maps, but {error}") from None


def _read(path: Path) -> dict[str, ndarray]:
    """Return the arrays of a .npz file; compressed files are refused, since they could expand without limit."""
    with open_model_file(path, what="attention maps as .npz") as file:
        try:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(file).infolist()):
                raise ValueError("its arrays are compressed")
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
            raise InputError(f"{path} must be attention maps as .npz, but {error}") from None


def _rows(arrays: Mapping[str, ndarray], stacks: Sequence[StackName]) -> dict[RowName, TokenRow]:
    """Return the token rows of the page, by name, from the arrays of a .npz file."""
    # With one stack there is one text, for an encoder or a decoder.
    first: RowName = "encoder" if "target_tokens" in arrays or stacks == ["encoder.self"] else "decoder"
    rows: dict[RowName, TokenRow] = {first: token_row(arrays["tokens"].tolist())}
    if "target_tokens" in arrays:
        rows["decoder"] = token_row(arrays["target_tokens"].tolist())
        rows["written"] = token_row([f"step {number}" for number in range(len(rows["decoder"].tokens))])
    if "written_tokens" in arrays:
        written = token_row(arrays["written_tokens"].tolist())
        if len(written.tokens) != len(rows["decoder"].tokens):
            raise ValueError(f"it has {len(written.tokens)} written tokens for {len(rows['decoder'].tokens)} steps")
        rows["decoder"] = replace(rows["decoder"], writes=written.texts)
        if "written" in rows:
            rows["written"] = written
    return rows


def token_row(tokens: list[Any]) -> TokenRow:
    """Return a page's row of tokens from labels; each token counts as a separate word."""
    texts = tuple(map(str, tokens))
    return TokenRow(texts, texts, np.arange(len(texts), dtype=np.int64))


def _stack(stack: StackName, arrays: Mapping[str, ndarray], rows: Mapping[RowName, TokenRow]) -> StackAttention:
    weights_LHTS, numbers = arrays[stack], [int(number) for number in arrays[f"{stack}.heads"]]
    layers = [int(number) for number in arrays[f"{stack}.layers"]]
    queries, keys = _ROWS[stack]
    expected = (len(layers), len(numbers), len(rows[queries].tokens), len(rows[keys].tokens))
    if weights_LHTS.shape != expected or weights_LHTS.dtype != np.float32 or not weights_LHTS.size:
        raise ValueError(f"{stack} is {weights_LHTS.dtype} {list(weights_LHTS.shape)}, not float32 {list(expected)}")
    is_causal = stack == "decoder.self" and not np.nan_to_num(np.triu(weights_LHTS, 1)).any()
    shown = (_layer(*layer, numbers, is_causal=is_causal) for layer in zip(layers, weights_LHTS, strict=True))
    return StackAttention(stack, queries, keys, tuple(shown))


def _layer(layer: int, weights_HTS: ndarray, numbers: list[int], *, is_causal: bool) -> LayerAttention:
    """Return the page's attention of one layer, without the heads that it does not have (their weights are NaN)."""
    rows = np.flatnonzero(~np.isnan(weights_HTS).any((1, 2))).tolist()
    found_HTS, count = weights_HTS[rows], max(numbers) + 1
    if not ((found_HTS >= 0) & (found_HTS <= 1 + 1e-3)).all():
        raise ValueError(f"layer {layer} has weights that are not from 0 to 1")
    heads, weights = tuple(numbers[row] for row in rows), partial(np.asarray, found_HTS)
    if is_causal:
        mask = np.tri(found_HTS.shape[1], dtype=np.bool_)
        return LayerAttention(layer, heads, count, count, weights, mask, "causal")
    return LayerAttention(layer, heads, count, count, weights, None, "none")
