"""The attention explorer on anybody's arrays: weights of any library, as numpy or torch, without a model.

Legend: L layers, H heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from clearhead.base.arguments import checked
from clearhead.base.errors import InputError, argument
from clearhead.base.files import refuse_unwritable
from clearhead.base.printing import Printed
from clearhead.interpret.view.explorer.data import LayerAttention, Page, RowName, Sample, StackAttention, StackName
from clearhead.interpret.view.explorer.write import frame_html, write_page
from clearhead.interpret.view.saved_maps import saved_page, token_row

_FRAME_HEIGHT = 640
_MOST_OFF = 1e-2
_PLACES: Mapping[str, tuple[StackName, RowName, RowName]] = {
    "full": ("encoder.self", "encoder", "encoder"), "causal": ("decoder.self", "decoder", "decoder"),
    "memory": ("decoder.memory", "decoder", "encoder"),
}  # fmt: skip
Weights = Float32[np.ndarray, "layers heads queries keys"]


class AttentionPage(Printed):
    """A page of the attention explorer; it shows itself in a notebook.

    Args:
        page: what it shows.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self.title: str = page.title

    def save_html(self, path: str | Path, *, force: bool = False) -> None:
        """Write the page as one file that needs no network.

        Args:
            path: the file.
            force: whether an existing file is replaced.

        Raises:
            InputError: too many weights for a page, or a file that exists or cannot be written.
        """
        refuse_unwritable(Path(path), force=force)
        write_page(self._page, Path(path))

    def _repr_html_(self) -> str:
        return frame_html(self._page, height=_FRAME_HEIGHT)


@checked
def view_attention(
    weights: Any,
    tokens: Sequence[str] | None = None,
    target_tokens: Sequence[str] | None = None,
    *,
    title: str = "attention",
) -> AttentionPage:
    """Show attention weights of any model in the explorer, or those that were saved.

    Args:
        weights: [layers, heads, queries, keys], numpy or torch, from 0 to 1; or one [heads, queries, keys] for each
            layer, which may have a batch axis of 1. A row sums to one, or to zero where a query sees nothing. Or the
            path of a .npz file of `AttentionMaps.save`, which has its tokens.
        tokens: what is looked at: the keys; also the queries, without `target_tokens`.
        target_tokens: the labels of the rows of cross-attention: the token that is written at each step.
        title: the heading.

    Returns:
        The page, which shows itself in a notebook and is written by `save_html`.

    Raises:
        InputError: weights of another shape, rows that do not sum to one, NaN, or lists of another length; or a file
            that holds something else, or in a format that is not read.
    """
    if isinstance(weights, Path) or (isinstance(weights, str) and weights.endswith(".npz")):
        if tokens is not None or target_tokens is not None:
            raise InputError(f"{weights} has its own tokens: leave " + argument("tokens") + " out")
        return AttentionPage(saved_page(Path(weights), title))
    stack_LHTS = _as_array(weights)
    if tokens is None:
        raise InputError("weights without tokens: give " + argument("tokens") + ", one for each key")
    queries = tokens if target_tokens is None else target_tokens
    _refuse_wrong(stack_LHTS, len(queries), len(tokens))
    place = "full" if np.triu(stack_LHTS, 1).any() else "causal"
    if target_tokens is not None:
        place = "memory"
    stack, top, keys = _PLACES[place]
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
    """Return weights as one array; a list has one array for each layer."""
    if isinstance(weights, list | tuple):
        layers = [one[0] if one.ndim == 4 and len(one) == 1 else one for one in map(_plain, weights)]
        if len({one.shape for one in layers}) != 1:
            raise InputError("weights: the layers have different shapes; expected one [heads, queries, keys] each")
        found = np.stack(layers)
    else:
        found = _plain(weights)
    if found.ndim == 5 and found.shape[1] == 1:
        found = found[:, 0]
    if found.ndim != 4 or not found.size:
        raise InputError(f"weights must be [layers, heads, queries, keys]; got {list(found.shape)}")
    return found


def _plain(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().to("cpu").float().numpy()
    try:
        return np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise InputError(
            f"weights must be numbers, as an array of numpy or torch; got {type(value).__name__}"
        ) from None


def _refuse_wrong(stack_LHTS: Weights, queries: int, keys: int) -> None:
    if stack_LHTS.shape[2:] != (queries, keys):
        raise InputError(
            f"weights have {stack_LHTS.shape[2]} queries and {stack_LHTS.shape[3]} keys; "
            f"the tokens are {queries} and {keys}"
        )
    if not np.isfinite(stack_LHTS).all():
        layer, head, query, _ = np.argwhere(~np.isfinite(stack_LHTS))[0]
        raise InputError(f"weights are not numbers: layer {layer}, head {head}, query {query} has NaN or infinity")
    if stack_LHTS.min() < 0:
        raise InputError("weights must not be negative; these may be scores: take their softmax over the keys")
    sums = stack_LHTS.sum(-1)
    wrong = np.argwhere((np.abs(sums - 1) > _MOST_OFF) & (sums > _MOST_OFF))
    if len(wrong):
        layer, head, query = wrong[0]
        hint = "; the axes may be in another order" if np.allclose(stack_LHTS.sum(-2), 1, atol=_MOST_OFF) else ""
        raise InputError(
            f"the weights of a query must sum to one; in layer {layer}, head {head}, query {query} they sum to "
            f"{sums[layer, head, query]:.3g}{hint}"
        )
