"""Check of a hand-written Transformer: information flow, attentions, norms, layers, and wiring of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.layers import attentions_of, is_layer, layer, part_reports
from clearhead.apps.check.handwritten.libraries import spares_libraries
from clearhead.apps.check.handwritten.modules import (
    HandwrittenModel,
    draw_ids,
    expected_flow,
    module,
    read_model,
    with_masks,
)
from clearhead.apps.check.handwritten.polarity import TOUCHED
from clearhead.apps.check.handwritten.report import CannotCompare, Finding, Report, make_report
from clearhead.apps.check.handwritten.running import CandidateRunner, output_error
from clearhead.base.arguments import check_types

_LENGTH = 6


@check_types
@spares_libraries
def transformer(
    candidate: Callable[..., Any], *, width: int, heads: int, vocab_size: int | None = None,
    flow: Literal["causal", "full"] | None = None,
) -> Report:  # fmt: skip
    """Check a hand-written Transformer: dependencies of its outputs, then attentions, norms and layers, then wiring.

    A layer that differs from the usual layers, without a known mistake, is not called wrong.

    Args:
        candidate: module with one stack or two, as in `module`.
        width: number of features of its layers.
        heads: number of heads of its attentions.
        vocab_size: number of ids, as in `module`.
        flow: allowed dependencies, as in `module`.

    Returns:
        The report; its first findings are those of the first wrong attention, norm or layer.

    Raises:
        InputError: not a module, or the size of the vocabulary is not known.
        NotImplementedError: raised by the candidate if it is not written yet.

    Source: arXiv 1706.03762, section 3.
    """
    whole = module(candidate, vocab_size=vocab_size, flow=flow)
    if not isinstance(candidate, nn.Module) or whole.verdict == "cannot compare":
        return whole
    runner = CandidateRunner(candidate, [candidate])
    with runner.borrow():
        attentions = list(attentions_of(candidate, width, heads))
    layers = _layers(candidate, width, heads)
    compared, findings, largest = [*whole.compared, "joined layers"], list(whole.findings), whole.largest
    wrong: tuple[Finding, ...] = ()
    for path, report in (
        *part_reports(candidate, attentions, width, heads),
        *_layer_reports(candidate, layers, width, heads),
    ):
        if report.verdict == "wrong":
            wrong = tuple(replace(finding, where=f"{path}: {finding.where}") for finding in report.findings)
            largest = report.largest
            break
        if report.ok:
            compared.append(path)
    if not {finding.cause for finding in findings} & {"raises", "source_not_read", "mask_polarity"}:
        findings += _check_wiring(candidate, layers, vocab_size, flow)
    if wrong or any(finding.severity == "wrong" for finding in findings):  # unread weights may be a consequence
        findings = [finding for finding in findings if finding.cause != "weights_unread"]
    return make_report(
        whole.subject, [*wrong, *findings], compared=compared, largest=largest, bound=whole.bound, notes=whole.notes
    )


def _layers(candidate: nn.Module, width: int, heads: int) -> list[str]:
    """Return the paths of the layers: the innermost modules with attention, feed-forward and norms, no embedding."""
    layers: list[str] = []
    for path, submodule in reversed([*candidate.named_modules()]):
        is_inner = not any(other.startswith(f"{path}.") for other in layers)
        if path and is_inner and is_layer(submodule, width, heads):
            layers.insert(0, path)
    return layers


def _layer_reports(candidate: nn.Module, layers: Sequence[str], width: int, heads: int) -> Iterator[tuple[str, Report]]:
    """Yield the report of each layer; layers with an unexplained difference are left out, as possible variants."""
    for path in layers:
        report = layer(candidate.get_submodule(path), width=width, heads=heads)
        causes = {finding.cause for finding in report.findings if finding.severity == "wrong"}
        if not causes & {None, "raises"}:
            yield path, report


def _check_wiring(candidate: nn.Module, layers: Sequence[str], vocab_size: int | None, flow: Any) -> Iterator[Finding]:
    """Yield findings about layers and weights that the output does not depend on, and about repeated modules."""
    for path, submodule in candidate.named_modules():
        if (
            isinstance(submodule, nn.ModuleList | nn.Sequential)
            and len({*map(id, submodule)}) < len(submodule)
            and list(submodule.parameters())
        ):
            yield Finding.of("layers_shared", where=f"{path}: {len(submodule)} layers", severity="warning")
    model = read_model(candidate, vocab_size)
    ids = draw_ids(model, _LENGTH, 7)
    with model.runner.borrow():
        try:
            model, error = with_masks(model, ids, expected_flow(model, flow))
            if error is not None:
                return
            output = model(ids)
        except CannotCompare:
            return
        unread = [path for path in layers if _is_unread(model, candidate.get_submodule(path), ids, output)]
        for path in unread:
            yield Finding.of("layer_unread", where=path)
        for path, submodule in candidate.named_modules():
            is_inside = any(path == outer or path.startswith(f"{outer}.") for outer in unread)
            if (
                not is_inside
                and list(submodule.parameters(recurse=False))
                and _is_unread(model, submodule, ids, output)
            ):
                yield Finding.of("weights_unread", where=path or type(submodule).__name__, severity="warning")


def _is_unread(model: HandwrittenModel, submodule: nn.Module, ids: Tensor, output: Tensor) -> bool:
    """Return whether changing the weights of a submodule leaves the output unchanged."""
    generator = torch.Generator().manual_seed(3)
    saved = [(weight, weight.data) for weight in submodule.parameters()]
    try:
        for weight, data in saved:
            weight.data = data + torch.randn(data.shape, generator=generator, dtype=data.dtype)
        return output_error(model(ids), output) <= TOUCHED
    finally:
        for weight, data in saved:
            weight.data = data
