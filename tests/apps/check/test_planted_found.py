"""Planted mistakes are found under their names, and correct parts are not called wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import clearhead as ch
from tests.apps.check.planted import attention_correct, attention_masks, attention_wrong, small_parts
from tests.apps.check.planted import transformers as whole_models
from tests.apps.check.planted.entry import Planted
from tests.apps.check.planted.whole_parts import DECODER, LAYER, MODULE, CausalModel, DecoderLayer, EncoderLayer

WIDTH, HEADS = 12, 3
LEAST_NAMED = 0.95
MEANINGS = {"attend": "attend", "block": "block", "additive": "additive", "ones": "ones", "float ones": "ones",
            "causal attend": "attend"}  # fmt: skip
SAME = {"second_residual_missing": "residual_missing"}
# Mistakes that no run of the module alone can name. Another scale of the embedding is another model, and a mean over
# the text reads the future, like a missing mask.
NOT_NAMED = {"embedding_scale_missing", "future_by_mean"}


def find_causes(report: ch.check.Report) -> set[str | None]:
    return {cause for finding in report.findings for cause in (finding.cause, *finding.alternatives)}


def attention(entry: Planted) -> ch.check.Report:
    torch.manual_seed(3)
    return ch.check.attention(
        entry.make(WIDTH, HEADS), width=WIDTH, heads=1 if entry.shows == "long" else HEADS,
        mask=MEANINGS.get(entry.mask), causal=True if "causal" in entry.mask else None,
        batch_first=False if entry.time_first else None,
    )  # fmt: skip


def check_one(name: str, cause: str | None, report: ch.check.Report) -> bool:
    """Require that a wrong part is found and a right one is not; return whether the cause was named."""
    if cause is None:
        assert report.ok, f"{name}: {report}"
        return True
    assert report.findings, f"{name} ({cause}): {report}"
    return SAME.get(cause, cause) in find_causes(report)


def small() -> Iterator[tuple[str, str | None, Callable[[], ch.check.Report]]]:
    for name, make, cause in small_parts.POSITIONS:
        yield name, cause, lambda make=make: ch.check.positions(make)
    for name, make, cause in small_parts.NORM:
        yield name, cause, lambda make=make: ch.check.norm(make(8), kind="layer")
    for name, make, cause in small_parts.RMS_NORM:
        yield name, cause, lambda make=make: ch.check.norm(make(8), kind="rms")
    for name, make, cause in small_parts.LOSS:
        yield name, cause, lambda make=make: ch.check.loss(make)
    yield "loss of targets", "targets_shifted", lambda: ch.check.loss(small_parts.loss, shifts=False)
    for name, make, cause in small_parts.ROPE:
        yield name, cause, lambda make=make: ch.check.rope(make)


def whole() -> Iterator[tuple[str, str | None, Callable[[], ch.check.Report]]]:
    for cls, causes in ((EncoderLayer, LAYER), (DecoderLayer, DECODER)):
        for cause in causes:
            yield (
                f"{cls.__name__} {cause}",
                cause,
                lambda cls=cls, cause=cause: ch.check.layer(
                    cls(8, 2, cause), width=8, heads=2, norm_place="post", activation="relu", mask="block"
                ),
            )
    for cause in MODULE:
        if cause != "embedding_scale_missing":
            yield (
                f"CausalModel {cause}",
                cause,
                lambda cause=cause: ch.check.module(CausalModel(8, 2, cause), vocab_size=11),
            )


@pytest.mark.parametrize("table", ["attention_correct", "attention_wrong", "attention_masks"])
def test_attention(table: str) -> None:
    tables = {"attention_correct": attention_correct.CORRECT, "attention_wrong": attention_wrong.WRONG}
    entries = tables.get(table, attention_masks.WRONG)
    missed = [entry.name for entry in entries if not check_one(entry.name, entry.cause, attention(entry))]
    assert len(missed) <= (1 - LEAST_NAMED) * len(entries), missed


@pytest.mark.parametrize("parts", [small, whole])
def test_other_parts(parts: Callable[[], Iterator[tuple[str, str | None, Callable[[], ch.check.Report]]]]) -> None:
    missed_causes = []
    for name, cause, check in parts():
        torch.manual_seed(0)
        missed_causes.append((name, cause, check_one(name, cause, check())))
    missed = [name for name, cause, is_named in missed_causes if not is_named and cause not in NOT_NAMED]
    assert len(missed) <= (1 - LEAST_NAMED) * len(missed_causes), missed


def transformer(candidate: nn.Module) -> ch.check.Report:
    return ch.check.transformer(candidate, width=whole_models.WIDTH, heads=whole_models.HEADS)


@pytest.mark.parametrize(("cls", "variant"), whole_models.RIGHT)
def test_right_transformers(cls: type[nn.Module], variant: str | None) -> None:
    torch.manual_seed(0)
    report = transformer(cls(variant))
    assert report.ok, report
    warnings = {"padding_side", "masked_rows_uniform"}
    assert not {finding.cause for finding in report.findings} - warnings, report
    assert "joined layers" in report.compared


def test_wrong_transformers() -> None:
    """The planted cause is the first finding, and layers whose output is not passed on are named."""
    for cls, cause in whole_models.WRONG:
        torch.manual_seed(0)
        report = transformer(cls(cause))
        first = report.findings[0]
        expected = {
            "memory_of_first_layer": "layer_unread",
            "layer_never_run": "layer_unread",
            "norm_unread": "weights_unread",
        }.get(cause, cause.split(" in ")[0])
        assert first.cause == expected, f"{cls.__name__} {cause}: {report}"
        assert report.ok == (cause in ("norm_unread", "layers_shared"))
        if expected == "mask_polarity":  # whatever follows from it is not accused as well
            assert {finding.cause for finding in report.findings} == {"mask_polarity"}, report
            assert "attn" in first.where and first.where.endswith(": the mask")
        if cause == "memory_of_first_layer":
            assert [finding.where for finding in report.findings] == ["encoder.1"]


@pytest.mark.parametrize("cls", whole_models.RAISING)
def test_an_error_is_named_with_its_line(cls: type[nn.Module]) -> None:
    """An error is shown at the user's last line, even if a library raised it."""
    report = transformer(cls("raises"))
    assert not report.ok
    lines = Path(whole_models.__file__).read_text().splitlines()
    number = 1 + next(number for number, line in enumerate(lines) if "scores = scores @ self.cause" in line)
    says = "\n".join(report.lines())
    assert f"forward raised TypeError at transformers.py:{number}: scores @ self.cause: unsupported" in says
    assert "the mode of the module" not in says


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_mask_that_raises_is_no_other_mistake(is_scaled: bool) -> None:
    """Without a mask the attention is compared; the error that each mask raises is named, and nothing else."""

    class Raising(whole_models.Attention):
        def forward(self, query: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if mask is not None:
                query = query + mask.no_such_name
            return super().forward(query, query, query)

    candidate = Raising(None if is_scaled else "no_scaling")
    report = ch.check.attention(candidate, width=whole_models.WIDTH, heads=whole_models.HEADS)
    if is_scaled:
        assert report.verdict == "cannot compare" and not report.findings, report
        assert re.search(r"with a mask of any form, forward raised AttributeError at \S+:\d+: mask\.no", report.reason)
    else:
        assert find_causes(report) == {"no_scaling"}, report


def test_no_report_contradicts_itself() -> None:
    """A part that is wrong by its numbers is not called equal up to rounding."""
    for entry in (*attention_correct.CORRECT, *attention_wrong.WRONG, *attention_masks.WRONG):
        report = ch.check.attention(entry.make(WIDTH, HEADS), width=WIDTH, heads=HEADS)
        if report.verdict == "wrong" and report.largest is not None and report.largest <= report.bound:
            assert "apart from the findings" in f"{report}", report
            assert not any(finding.difference for finding in report.findings), report
        if "mask_polarity" in find_causes(report):
            assert report.largest > report.bound and report.findings[0].difference > report.bound, report


def test_more_positions_than_ids() -> None:
    """A model of characters has more positions than ids; the meaning of its second argument is not clear."""

    class Characters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places, self.head = nn.Embedding(9, 4), nn.Embedding(64, 4), nn.Linear(4, 9)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            return self.head((self.table(ids) + self.places(torch.arange(ids.shape[1]))).cumsum(1))

    class Labelled(Characters):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(ids)

    class Memory(Characters):
        def forward(self, ids: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + memory

    assert ch.check.module(Characters()).ok
    assert "give 'targets' a default" in ch.check.module(Labelled()).reason
    assert "a memory of vectors" in ch.check.module(Memory()).reason
