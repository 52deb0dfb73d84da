"""A hand-written Transformer compared from the whole to the first part that differs: flow, joints, layers, parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.layers import attentions_of, is_layer, layer, part_reports
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.modules import Model, drawn_ids, expected_flow, module, read_model, with_masks
from clearhead.apps.check.handwritten.polarity import TOUCHED
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report, judged
from clearhead.apps.check.handwritten.running import Runner, output_error
from clearhead.base.arguments import checked

_LENGTH = 6


@checked
@spares_libraries
def transformer(
    part: Callable[..., Any], *, width: int, heads: int, vocab_size: int | None = None,
    flow: Literal["causal", "full"] | None = None,
) -> Report:  # fmt: skip
    """Compare a hand-written Transformer: what its outputs depend on, then how its layers are joined, then each part.

    A layer that no usual one is like, nor with a known mistake, is not called wrong.

    Args:
        part: a module of one stack or of two, as for `module`.
        width: of its layers.
        heads: of its attentions.
        vocab_size: as for `module`.
        flow: as for `module`.

    Returns:
        The report; where a part differs, that is its first finding.

    Raises:
        InputError: not a module, or the size of the vocabulary is not known.
        NotImplementedError: the part is not written yet.

    Source: arXiv 1706.03762, section 3.
    """
    whole = module(part, vocab_size=vocab_size, flow=flow)
    if not isinstance(part, nn.Module) or whole.verdict == "cannot compare":
        return whole
    runner = Runner(part, [part])
    with runner.borrow():
        attentions = list(attentions_of(part, width, heads))
    layers = _layers(part, width, heads)
    compared, findings, largest = [*whole.compared, "joined layers"], list(whole.findings), whole.largest
    wrong: tuple[Finding, ...] = ()
    for path, report in (*part_reports(part, attentions, width, heads), *_layer_reports(part, layers, width, heads)):
        if report.verdict == "wrong":
            wrong = tuple(replace(one, where=f"{path}: {one.where}") for one in report.findings)
            largest = report.largest
            break
        if report.ok:
            compared.append(path)
    if not {finding.cause for finding in findings} & {"raises", "source_not_read", "mask_polarity"}:
        findings += _wiring(part, layers, vocab_size, flow)
    if wrong or any(one.severity == "wrong" for one in findings):  # weights that nothing reads may follow from it
        findings = [one for one in findings if one.cause != "weights_unread"]
    return judged(
        whole.subject, [*wrong, *findings], compared=compared, largest=largest, bound=whole.bound, notes=whole.notes
    )


def _layers(part: nn.Module, width: int, heads: int) -> list[str]:
    """Return the paths of the layers: the innermost modules with attention, feed-forward and norms, and no table."""
    found: list[str] = []
    for path, one in reversed([*part.named_modules()]):
        is_inner = not any(other.startswith(f"{path}.") for other in found)
        if path and is_inner and is_layer(one, width, heads):
            found.insert(0, path)
    return found


def _layer_reports(part: nn.Module, layers: Sequence[str], width: int, heads: int) -> Iterator[tuple[str, Report]]:
    """Yield the report of each layer; one that no known mistake explains may be a variant."""
    for path in layers:
        report = layer(part.get_submodule(path), width=width, heads=heads)
        causes = {one.cause for one in report.findings if one.severity == "wrong"}
        if not causes & {None, "raises"}:
            yield path, report


def _wiring(part: nn.Module, layers: Sequence[str], vocab_size: int | None, flow: Any) -> Iterator[Finding]:
    """Yield layers and weights that the output does not depend on, and layers that are one and the same."""
    for path, one in part.named_modules():
        if (
            isinstance(one, nn.ModuleList | nn.Sequential)
            and len({*map(id, one)}) < len(one)
            and list(one.parameters())
        ):
            yield Finding.of("layers_shared", where=f"{path}: {len(one)} layers", severity="warning")
    model = read_model(part, vocab_size)
    ids = drawn_ids(model, _LENGTH, 7)
    with model.runner.borrow():
        try:
            model, error = with_masks(model, ids, expected_flow(model, flow))
            if error is not None:
                return
            output = model(ids)
        except CannotCompare:
            return
        unread = [path for path in layers if _is_unread(model, part.get_submodule(path), ids, output)]
        for path in unread:
            yield Finding.of("layer_unread", where=path)
        for path, one in part.named_modules():
            is_inside = any(path == outer or path.startswith(f"{outer}.") for outer in unread)
            if not is_inside and list(one.parameters(recurse=False)) and _is_unread(model, one, ids, output):
                yield Finding.of("weights_unread", where=path or type(one).__name__, severity="warning")


def _is_unread(model: Model, one: nn.Module, ids: Tensor, output: Tensor) -> bool:
    """Whether other weights of a module leave the output as it is."""
    generator = torch.Generator().manual_seed(3)
    kept = [(weight, weight.data) for weight in one.parameters()]
    try:
        for weight, data in kept:
            weight.data = data + torch.randn(data.shape, generator=generator, dtype=data.dtype)
        return output_error(model(ids), output) <= TOUCHED
    finally:
        for weight, data in kept:
            weight.data = data
