"""Detection of masks that a model reads with the wrong polarity, by calls of its submodules.

Legend: B batch, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.report import CannotCompare
from clearhead.apps.check.handwritten.running import ROUNDED, NoDropout, describe_error, output_error, tensors_of

TOUCHED = 1e-10
"""Least relative change of an output that counts as a dependency."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_reversed_masks(
    model: nn.Module, run: Callable[[], object], lengths: Sequence[int], *, is_causal: bool
) -> list[str]:
    """Return the paths of the innermost submodules that read their mask with the wrong polarity.

    Such a mask hides everything although nothing is padding; or each token sees the tokens after it and none before.

    Args:
        model: the model.
        run: function that runs the model on texts without padding.
        lengths: the number T of tokens in each text. For a model with two stacks a second number follows: the tokens
            in each source.
        is_causal: True if no token of a text may see later tokens. Otherwise a model may read backwards on purpose.
            Its mask is then reversed only if the last token sees nothing, or sees all tokens alike.
    """
    calls: dict[str, Call] = {}

    def watch(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: calls.update({path: (args, kwargs)})

    modules = dict(model.named_modules())
    handles = [module.register_forward_pre_hook(watch(path), with_kwargs=True) for path, module in modules.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    mixing: list[str] = []
    reversed_paths: list[str] = []
    for path in reversed(modules):
        if not path or path not in calls or any(inner.startswith(f"{path}.") for inner in mixing):
            continue
        leaves = [*calls[path][0], *calls[path][1].values()]
        length = next((length for length in lengths if any(_is_vectors(leaf, length) for leaf in leaves)), None)
        if length is None:
            continue
        try:
            sees, blind = _measure_reads(modules[path], calls[path], length)
        except CannotCompare:
            continue
        if sees.any() or blind.all():
            mixing.append(path)
        is_ahead = torch.equal(sees[:-1], torch.ones_like(sees).triu(1)[:-1])
        is_last_blind = bool(blind[-1] | sees[-1, :-1].all())
        if blind.all() or (is_ahead and (is_last_blind or (is_causal and length == lengths[0]))):
            reversed_paths.insert(0, path)
    return reversed_paths


def _measure_reads(module: nn.Module, call: Call, length: int) -> tuple[Tensor, Tensor]:
    """Return a bool table [T, T], True where an output depends on another token, and a mask [T] of blind outputs.

    A blind output depends on no token. The input vectors are drawn anew, so that earlier faults do not matter. The
    masks stay the same.

    Raises:
        CannotCompare: the module does not return vectors of the tokens, or raises an error.
    """
    args, kwargs = call
    vectors = next(value for value in (*args, *kwargs.values()) if _is_vectors(value, length))
    axis = vectors.shape.index(length)

    def output(changed: int | None = None, *, is_inverted: bool = False) -> Tensor:
        def pass_on(value: Any) -> Any:
            if not _is_vectors(value, length):
                return _invert_mask(value) if is_inverted else value
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(37), dtype=torch.float64)
            if changed is not None:
                drawn.select(axis, changed).neg_()
            return drawn.to(value.dtype)

        try:
            with NoDropout():
                result = module(*map(pass_on, args), **{name: pass_on(value) for name, value in kwargs.items()})
        except Exception as error:  # user code may raise anything
            raise CannotCompare(describe_error(error)) from error
        for tensor in tensors_of(result):
            if tensor.dim() == 3 and tensor.shape[:2] == vectors.shape[:2]:
                return tensor.detach().movedim(axis, 1)[0].double()
        raise CannotCompare("it returns no vectors of the tokens")

    out = output()
    blind = out.isnan().all(-1)
    if blind.all() or _is_uniform(out):
        other = output(is_inverted=True)
        blind[:] = bool(other.isfinite().any()) and not _is_uniform(other)
    scale = float(out.nan_to_num().abs().max()) or 1.0
    changes = [(output(token) - out).nan_to_num().abs().amax(-1) / scale > TOUCHED for token in range(length)]
    return torch.stack(changes, 1).fill_diagonal_(False), blind


def _is_vectors(value: object, length: int) -> bool:
    """Return True if an argument holds vectors of the tokens, [B, T, D] or [T, B, D], and is no mask."""
    if not isinstance(value, Tensor) or value.is_nested or not value.is_floating_point() or value.dim() != 3:
        return False
    return length in value.shape[:2] and value.shape[2] != length


def _is_uniform(out: Tensor) -> bool:
    return output_error(out, out[:1].expand_as(out)) <= ROUNDED


def _invert_mask(value: Any) -> Any:
    """Return a mask with hidden and visible exchanged; return any other value unchanged."""
    if not isinstance(value, Tensor) or not ((value == 0) | (value == 1)).all():
        return value
    return value.logical_not().to(value.dtype)
