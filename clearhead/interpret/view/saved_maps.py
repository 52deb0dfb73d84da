"""Attention maps that were saved as .npz, as a page.

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
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.base.files import open_model_file
from clearhead.base.formats import Format
from clearhead.interpret.view.explorer.data import (
    LayerAttention,
    Page,
    RowName,
    Sample,
    StackAttention,
    StackName,
    TokenRow,
)

# Format 1 has no written tokens, and the page numbers the decoder's steps.
MAPS: Final = Format("saved attention maps", 2, "save them again", oldest=1)
_ROWS: Mapping[StackName, tuple[RowName, RowName]] = {
    "encoder.self": ("encoder", "encoder"), "decoder.self": ("decoder", "decoder"),
    "decoder.memory": ("written", "encoder"),
}  # fmt: skip


def saved_page(path: Path, title: str) -> Page:
    """Return the page of attention maps that were saved.

    Args:
        path: the file.
        title: the heading.

    Raises:
        InputError: they are in a format that is not read, or the file holds something else.
    """
    arrays = _read(path)
    header = {name: arrays[name].item() for name in MAPS.header() if name in arrays and arrays[name].ndim == 0}
    MAPS.check(header, path)
    try:
        stacks = [stack for stack in _ROWS if stack in arrays]
        rows = _rows(arrays, stacks)
        return Page(title, (Sample("", rows, tuple(_stack(name, arrays, rows) for name in stacks)),))
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise InputError(f"{path}: expected the tokens and weights of attention maps, but {error}") from None


def _read(path: Path) -> dict[str, ndarray]:
    """Return the arrays of a .npz file; what is packed small and unfolds is no file of ours."""
    with open_model_file(path, what="attention maps as .npz") as file:
        try:
            if any(part.compress_type != zipfile.ZIP_STORED for part in zipfile.ZipFile(file).infolist()):
                raise ValueError("its arrays are compressed")
            with np.load(file, allow_pickle=False) as found:
                return dict(found)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError) as error:
            raise InputError(f"{path}: expected attention maps as .npz, but {error}") from None


def _rows(arrays: Mapping[str, ndarray], stacks: Sequence[StackName]) -> dict[RowName, TokenRow]:
    """Return the tokens of each row name."""
    # One stack alone has one text, whichever stack it is.
    first: RowName = "encoder" if "target_tokens" in arrays or stacks == ["encoder.self"] else "decoder"
    rows: dict[RowName, TokenRow] = {first: token_row(arrays["tokens"].tolist())}
    if "target_tokens" in arrays:
        rows["decoder"] = token_row(arrays["target_tokens"].tolist())
        rows["written"] = token_row([f"step {number}" for number in range(len(rows["decoder"].tokens))])
    if "written_tokens" in arrays:
        written = token_row(arrays["written_tokens"].tolist())
        if len(written.tokens) != len(rows["decoder"].tokens):
            raise ValueError(f"{len(written.tokens)} tokens are written at {len(rows['decoder'].tokens)} steps")
        rows["decoder"] = replace(rows["decoder"], writes=written.texts)
        if "written" in rows:
            rows["written"] = written
    return rows


def token_row(tokens: list[Any]) -> TokenRow:
    """Return tokens that are words of their own."""
    texts = tuple(map(str, tokens))
    return TokenRow(texts, texts, np.arange(len(texts), dtype=np.int64))


def _stack(stack: StackName, arrays: Mapping[str, ndarray], rows: Mapping[RowName, TokenRow]) -> StackAttention:
    weights_LHTS, numbers = arrays[stack], [int(number) for number in arrays[f"{stack}.heads"]]
    layers = [int(number) for number in arrays[f"{stack}.layers"]]
    queries, keys = _ROWS[stack]
    expected = (len(layers), len(numbers), len(rows[queries].tokens), len(rows[keys].tokens))
    if weights_LHTS.shape != expected or weights_LHTS.dtype != np.float32 or not weights_LHTS.size:
        raise ValueError(f"{stack} is {weights_LHTS.dtype} {list(weights_LHTS.shape)} and not float32 {list(expected)}")
    is_causal = stack == "decoder.self" and not np.nan_to_num(np.triu(weights_LHTS, 1)).any()
    shown = (_layer(*layer, numbers, is_causal=is_causal) for layer in zip(layers, weights_LHTS, strict=True))
    return StackAttention(stack, queries, keys, tuple(shown))


def _layer(layer: int, weights_HTS: ndarray, numbers: list[int], *, is_causal: bool) -> LayerAttention:
    """Return one layer without the heads that it does not have, whose weights are NaN."""
    own = np.flatnonzero(~np.isnan(weights_HTS).any((1, 2))).tolist()
    found_HTS, count = weights_HTS[own], max(numbers) + 1
    if not ((found_HTS >= 0) & (found_HTS <= 1 + 1e-3)).all():
        raise ValueError(f"layer {layer} has weights that are not from 0 to 1")
    heads, weights = tuple(numbers[row] for row in own), partial(np.asarray, found_HTS)
    if is_causal:
        mask = np.tri(found_HTS.shape[1], dtype=np.bool_)
        return LayerAttention(layer, heads, count, count, weights, mask, "causal")
    return LayerAttention(layer, heads, count, count, weights, None, "none")
