"""Find masks that a model reads the other way round, by calls of its submodules.

Legend: B batch, T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.check.handwritten.report import CannotCompare
from clearhead.check.handwritten.running import ROUNDED, NoDropout, relative, shown_error, tensors_of

TOUCHED = 1e-10
Call = tuple[tuple[Any, ...], dict[str, Any]]


def reversed_masks(part: nn.Module, run: Callable[[], object], lengths: Sequence[int], *, is_causal: bool) -> list[str]:
    """Return the paths of the innermost submodules whose mask hides what it should show.

    Such a mask hides everything where nothing is padding; or each token sees what follows it and nothing before it.

    Args:
        part: the model.
        run: runs the model on texts without padding.
        lengths: the number of tokens in each text, T, then perhaps that in each source, another one.
        is_causal: whether no token of a text may see what follows it. Otherwise a model may read backwards on purpose,
            and its mask is reversed only if the last token sees nothing, or everything alike.
    """
    calls: dict[str, Call] = {}

    def watch(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: calls.update({path: (args, kwargs)})

    modules = dict(part.named_modules())
    handles = [one.register_forward_pre_hook(watch(path), with_kwargs=True) for path, one in modules.items()]
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
        length = next((length for length in lengths if any(_is_vectors(one, length) for one in leaves)), None)
        if length is None:
            continue
        try:
            sees, blind = _seen_tokens(modules[path], calls[path], length)
        except CannotCompare:
            continue
        if sees.any() or blind.all():
            mixing.append(path)
        is_ahead = torch.equal(sees[:-1], torch.ones_like(sees).triu(1)[:-1])
        is_last_blind = bool(blind[-1] | sees[-1, :-1].all())
        if blind.all() or (is_ahead and (is_last_blind or (is_causal and length == lengths[0]))):
            reversed_paths.insert(0, path)
    return reversed_paths


def _seen_tokens(module: nn.Module, call: Call, length: int) -> tuple[Tensor, Tensor]:
    """Return which other tokens [T, T] each output of a module depends on, and which outputs [T] are of no token.

    Its vectors are drawn anew, so that what went wrong before this module does not matter; its masks are kept.

    Raises:
        CannotCompare: it does not return vectors of the tokens, or raises an error.
    """
    args, kwargs = call
    vectors = next(one for one in (*args, *kwargs.values()) if _is_vectors(one, length))
    axis = vectors.shape.index(length)

    def output(changed: int | None = None, *, is_inverted: bool = False) -> Tensor:
        def pass_on(value: Any) -> Any:
            if not _is_vectors(value, length):
                return _inverted(value) if is_inverted else value
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(37), dtype=torch.float64)
            if changed is not None:
                drawn.select(axis, changed).neg_()
            return drawn.to(value.dtype)

        try:
            with NoDropout():
                result = module(*map(pass_on, args), **{name: pass_on(value) for name, value in kwargs.items()})
        except Exception as error:  # a stranger's code raises anything
            raise CannotCompare(shown_error(error)) from error
        for one in tensors_of(result):
            if one.dim() == 3 and one.shape[:2] == vectors.shape[:2]:
                return one.detach().movedim(axis, 1)[0].double()
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
    """Whether an argument holds vectors of the tokens, [B, T, D] or [T, B, D], and is no mask."""
    if not isinstance(value, Tensor) or value.is_nested or not value.is_floating_point() or value.dim() != 3:
        return False
    return length in value.shape[:2] and value.shape[2] != length


def _is_uniform(out: Tensor) -> bool:
    return relative(out, out[:1].expand_as(out)) <= ROUNDED


def _inverted(value: Any) -> Any:
    """Return a mask with hidden and visible exchanged; anything else as it is."""
    if not isinstance(value, Tensor) or not ((value == 0) | (value == 1)).all():
        return value
    return value.logical_not().to(value.dtype)
