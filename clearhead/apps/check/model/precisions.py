"""Our kernels and each precision against the result in double precision.

A kernel may be at most `MOST_TIMES` as far from it as the plain layers are that multiply the same rounded inputs.
Legend: B rows, T tokens, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model.flow import Draw
from clearhead.apps.check.model.readers import Reader, Side, of_real
from clearhead.apps.check.model.report import Outcome, Verdict
from clearhead.core import Cache, Sequence, Transformer
from clearhead.core.head import Linear as HeadLinear
from clearhead.fast.cache import IndexedCache
from clearhead.fast.int8 import LARGEST, Int8Linear, to_int8
from clearhead.fast.native.load import library, uses_kernels
from clearhead.fast.replica import converted, override, replica
from clearhead.fast.runner import Runner

GROUP: Final = "kernels and precisions"
MOST_TIMES = 4.0
_FLOOR: Final = {"fp32": 5e-6, "bf16": 4e-3, "mixed": 4e-3, "int8": 4e-3}
"""A difference so small is rounding whatever that of the plain layers is."""
_LENGTHS = (9, 12, 5)
_NEW, _REPEATS = 4, 4


class RoundedToBF16(nn.Module):
    """A linear layer that multiplies numbers rounded to bf16, and sums in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias."""
        weight, bias, scale = _matrix(self)
        return F.linear((x * scale).bfloat16().float(), weight.bfloat16().float(), bias)


class RoundedTo8Bits(nn.Module):
    """A linear layer of weights in 8 bits that rounds each row of its input to 8 bits as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias."""
        weight, bias, scale = _matrix(self)
        x = x * scale
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
        return F.linear((x / step).round() * step, weight, bias)


def _matrix(part: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    """Return weight, bias and the factor of the input of a linear layer."""
    if isinstance(part, HeadLinear):
        projection = part.projection
        return projection.weight_VD, projection.bias_V, projection.scale
    assert isinstance(part, nn.Linear | Int8Linear)
    return part.weight, part.bias, 1.0


@dataclass(frozen=True)
class Precision:
    """A precision, as the plain layers and as the kernels compute in it.

    Args:
        name: in a report.
        kind: fp32, bf16, mixed or int8.
        plain: the plain layers with the same rounded inputs.
        runner: gives the tree with the kernels; None: the precision has none.
    """

    name: str
    kind: str
    plain: Transformer
    runner: Runner | None


def precisions(module: Transformer, chosen: str) -> Iterator[Precision]:
    """Yield the precisions that are checked.

    Args:
        module: in single precision.
        chosen: auto (all of this device), fp32, bf16 or int8.
    """
    on_cpu = next(module.parameters()).device.type == "cpu"
    has_kernels = on_cpu and uses_kernels() and library() is not None
    if chosen in ("auto", "fp32") and has_kernels:
        yield Precision("fp32", "fp32", replica(module), Runner(module))
    if chosen in ("auto", "bf16"):
        if has_kernels:
            yield Precision(
                "fp32 with products in bf16", "mixed", _overridden(module, RoundedToBF16), Runner(module, in_bf16=True)
            )
        half = converted(module, torch.bfloat16)
        yield Precision("bf16", "bf16", half, Runner(half) if has_kernels else None)
    if chosen in ("auto", "int8") and on_cpu:
        small = to_int8(converted(module, torch.float32))
        yield Precision("int8", "int8", _overridden(small, RoundedTo8Bits), Runner(small) if has_kernels else None)


def _overridden(module: Transformer, mixin: type[nn.Module]) -> Transformer:
    made = replica(module)
    for part in made.modules():
        if isinstance(part, nn.Linear | Int8Linear | HeadLinear):
            override(part, mixin)
    return made


@dataclass(frozen=True)
class Way:
    """A way in which kernels are called.

    Args:
        name: of the way.
        run: returns the outputs [N, features] of a tree.
    """

    name: str
    run: Callable[[Transformer], Tensor]


def check_precisions(module: Transformer, exact: Transformer, draw: Draw, chosen: str) -> Iterator[Outcome | Finding]:
    """Yield how far each precision is from the result in double precision.

    Args:
        module: in single precision.
        exact: in double precision.
        draw: ids.
        chosen: auto (all of this device), fp32, bf16 or int8.
    """
    ways = list(_ways(module, draw))
    is_mixture = any(isinstance(node, spec.MixtureOfExperts) for _, node in spec.walk(module.spec))
    tried = False
    for precision in precisions(module, chosen):
        tried = True
        for way in ways:
            measured = _measured(precision, way, exact, is_mixture)
            if measured.is_suspect:
                # One text may be unlucky, with a token that almost attends elsewhere; a defect shows in all of them.
                again = (one for _ in range(_REPEATS) for one in _ways(module, draw) if one.name == way.name)
                measured = _middle([measured, *(_measured(precision, one, exact, is_mixture) for one in again)])
            yield from _judged(measured, is_mixture)
    if not tried:
        yield Outcome(GROUP, chosen, "not tried", "there are no kernels for it on this device")


@dataclass(frozen=True)
class _Measured:
    """How far a precision is from the result in double precision; without kernels both numbers are the same."""

    precision: Precision
    way: Way
    plain: float
    kernels: float

    @property
    def bound(self) -> float:
        return max(MOST_TIMES * self.plain, _FLOOR[self.precision.kind])

    @property
    def is_suspect(self) -> bool:
        return not self.kernels <= self.bound


def _measured(precision: Precision, way: Way, exact: Transformer, is_mixture: bool) -> _Measured:
    with torch.inference_mode():
        expected = way.run(exact)
        plain = _error(way.run(precision.plain), expected, is_mixture)
        if precision.runner is None:
            return _Measured(precision, way, plain, plain)
        return _Measured(precision, way, plain, _error(way.run(precision.runner.tree()), expected, is_mixture))


def _middle(tries: list[_Measured]) -> _Measured:
    """Return the try whose kernels are in the middle, measured by how far the plain layers are."""
    return sorted(tries, key=lambda one: one.kernels / one.bound)[len(tries) // 2]


def _judged(found: _Measured, is_mixture: bool) -> Iterator[Outcome | Finding]:
    name = f"{found.precision.name}, {found.way.name}"
    if found.precision.runner is None:
        verdict: Verdict = "right" if found.plain < float("inf") else "wrong"
        yield Outcome(GROUP, name, verdict, "plain layers", (("distance", found.plain),))
        return
    numbers = (("kernels", found.kernels), ("plain layers", found.plain))
    if not found.is_suspect:
        yield Outcome(GROUP, name, "right", "as near to double precision as the plain layers", numbers)
        return
    times = found.kernels / max(found.plain, 1e-30)
    yield Outcome(GROUP, name, "wrong", f"{times:.0f} times as far as the plain layers", numbers)
    yield Finding(
        where=_first_wrong(found.precision, found.way, found.bound, is_mixture),
        says=(
            f"{name}: the kernels do not compute what the plain layers do; likely cause: a kernel of this part, or the "
            "layout of the weights that it is given; with the environment variable CLEARHEAD_KERNELS=plain none is used"
        ),
        difference=found.kernels,
    )


def _error(found: Tensor, expected: Tensor, is_mixture: bool) -> float:
    """Return the largest error of a token as a share of its values.

    Where experts are chosen, rounding may choose others, so that the error of the middle token is taken.
    """
    if not bool(found.isfinite().all()):
        return float("inf")
    norm = expected.double().norm(dim=-1)
    share = (found.double() - expected).norm(dim=-1) / norm.clamp(min=1e-30)
    return float(share.median() if is_mixture else share.max())


def _first_wrong(precision: Precision, way: Way, bound: float, is_mixture: bool) -> str:
    """Return the address of the first layer whose kernels are wrong: with the layers after it left out they still are.

    What the layers before it give is compared with the plain layers, cut off at the same depth.
    """
    assert precision.runner is not None
    module = precision.runner.module
    for side in ("encoder", "decoder"):
        stack = getattr(module, side)
        for depth in range(1, 0 if stack is None else len(stack.order) + 1):
            cut, plain = _cut(module, side, depth), _cut(precision.plain, side, depth)
            with torch.inference_mode():
                served = Runner(cut, in_bf16=precision.runner.in_bf16).tree()
                wanted = way.run(plain)
                error = _error(way.run(served), wanted.double(), is_mixture)
            if error > bound:
                return f"{side}.layers.{stack.order[depth - 1]}"
    return "head" if module.head is not None else ""


def _cut(module: Transformer, side: str, depth: int) -> Transformer:
    made = replica(module)
    stack = getattr(made, side)
    stack.order = stack.order[:depth]
    return made


def _ways(module: Transformer, draw: Draw) -> Iterator[Way]:
    side: Side = "encoder" if module.decoder is None else "decoder"
    most = min(max(_LENGTHS), module.max_positions or max(_LENGTHS))
    lengths = [min(length, most) for length in _LENGTHS]
    vocabulary = module.num_target_ids
    rows = torch.stack([draw(most, vocabulary) for _ in lengths])
    mask = torch.arange(most) >= most - torch.tensor(lengths)[:, None]
    source = None
    if module.encoder is not None and module.decoder is not None:
        source = Sequence(torch.stack([draw(most, module.num_source_ids) for _ in lengths]), mask.flip(1))

    def whole(tree: Transformer) -> Tensor:
        reader = Reader.of(tree, side, source)
        return _outputs(reader, reader.hidden(Sequence(rows, mask)), mask)

    def alone(tree: Transformer) -> Tensor:
        given = None if source is None else Sequence(source.ids[:1])
        reader = Reader.of(tree, side, given)
        return _outputs(reader, reader.hidden(Sequence(rows[:1])), None)

    def cached(tree: Transformer) -> Tensor:
        reader = Reader.of(tree, side, source)
        cache = _cache(tree, most, mask)
        pieces = [most - new, *[1] * new]
        states, start = [], 0
        for size in pieces:
            part = slice(start, start + size)
            states.append(reader.hidden(Sequence(rows[:, part], mask[:, part]), cache))
            start += size
        return _outputs(reader, torch.cat(states, 1), mask)

    new = min(_NEW, min(lengths) - 1)
    yield Way("one text", alone)
    yield Way("a padded batch", whole)
    if side == "decoder" and new > 0:
        yield Way("token by token with a cache", cached)


def _cache(tree: Transformer, length: int, mask: Tensor) -> Cache:
    """Return the cache with which texts are generated."""
    return IndexedCache(total_length=mask.sum(1))


def _outputs(reader: Reader, hidden: Tensor, mask: Tensor | None) -> Tensor:
    outputs = reader.outputs(hidden, mask)
    return of_real(outputs, mask) if outputs.shape[:2] == hidden.shape[:2] and outputs.dim() == 3 else outputs
