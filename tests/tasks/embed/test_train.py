"""Contrastive training from run file to vectors: partners get similar vectors, and unusable data are refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.data.sources.lines import read_lines
from clearhead.tasks.embed.batches import positive_groups
from clearhead.tasks.embed.train import contrastive_loss
from clearhead.tasks.evaluate.retrieval import recall_at
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.tiny_run import write_tiny_run


def write_pairs(folder: Path) -> None:
    """Write pairs of two languages of 23 words; the second one is reversed and in capitals."""
    draw = random.Random(3)
    for split, count in (("train", 331), ("valid", 53)):
        lines = [
            draw.choices([2 * letter for letter in "abcdefghijklmnopqrstuvw"], k=draw.randint(2, 5))
            for _ in range(count)
        ]
        for side, texts in (("a", lines), ("b", [[word.upper() for word in line[::-1]] for line in lines])):
            (folder / f"{split}.{side}").write_text("".join(f"{' '.join(text)}\n" for text in texts), encoding="utf-8")


def run_file(folder: Path, family: str = "encoder") -> Path:
    write_pairs(folder)
    sides = {split: f'source = "{folder}/{split}.a", target = "{folder}/{split}.b"' for split in ("train", "valid")}
    tables = {split: f"{{ {files} }}" for split, files in sides.items()}
    values = {"max_length": 7, "learning_rate": 1e-2, "steps": 20}
    return write_tiny_run(folder, task='kind = "embed"', family=family, **values, **tables)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_it_learns_what_belongs_together(tmp_path: Path, family: str) -> None:
    result = train_run(load_run_file(run_file(tmp_path, family=family)), resume=False, progress=TrainingProgress())
    assert result.best == "step-20"
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    model = ch.load(tmp_path / "run", device="cpu")
    firsts, seconds = (read_lines(tmp_path / f"valid.{side}") for side in "ab")
    groups = positive_groups(zip(firsts, seconds, strict=True))
    recall = recall_at(model.embed(firsts), model.embed(seconds), groups=groups)
    assert last["valid_score"] == pytest.approx(100 * recall.mean), "what validation says is what the vectors do"
    assert recall.mean > 0.25, "chance is 0.02"
    assert (model.task.kind, model.task.max_length) == ("embed", 7)
    assert [layer.kind for layer in model.spec.head.layers] == ["pool", "l2_normalize"]
    assert model.spec.head.layers[0].by == ("mean" if family == "encoder" else "last")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.label_smoothing=0.1", "label_smoothing has no effect for the task 'embed'"),
        ("data.max_length=2", r"max_length is 2; .* at least 3"),
        ("data.max_length=3", r"train: .* no pair from here on can be used"),
        ("train.batch_tokens=12", "raise batch_tokens to at least 14"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_run(load_run_file(run_file(tmp_path), [change]), resume=False, progress=TrainingProgress())


PAIRS, WIDTH = 7, 5


def vectors(seed: int, count: int = PAIRS) -> Tensor:
    return 3.0 * torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_by_hand(first: Tensor, second: Tensor, groups: list[int], temperature: float) -> float:
    """Return the loss, summed over pairs and both directions with plain loops."""

    def cosine(left: Tensor, two: Tensor) -> float:
        return float(left.double() @ two.double() / (left.double().norm() * two.double().norm()))

    total = 0.0
    for row in range(len(first)):
        wrong = [index for index in range(len(first)) if groups[index] != groups[row]]
        right = cosine(first[row], second[row]) / temperature
        for scores in (
            [cosine(first[row], second[index]) / temperature for index in wrong],
            [cosine(first[index], second[row]) / temperature for index in wrong],
        ):
            total += -right + math.log(math.exp(right) + sum(map(math.exp, scores)))
    return total / 2


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 3, 1, 5, 0], [0] * PAIRS])
def test_it_is_the_sum_written_out(groups: list[int], temperature: float) -> None:
    first, second = vectors(1), vectors(2)
    loss, count = contrastive_loss(first, second, torch.tensor(groups), temperature=temperature)
    assert count == PAIRS
    assert float(loss) == pytest.approx(loss_by_hand(first, second, groups, temperature), rel=1e-5, abs=1e-6)


def test_length_does_not_count_and_both_sides_count_alike() -> None:
    first, second, groups = vectors(1), vectors(2), torch.arange(PAIRS)
    loss, _ = contrastive_loss(first, second, groups, temperature=0.1)
    longer, _ = contrastive_loss(7.0 * first, 0.3 * second, groups, temperature=0.1)
    turned, _ = contrastive_loss(second, first, groups, temperature=0.1)
    torch.testing.assert_close(longer, loss)
    torch.testing.assert_close(turned, loss)


def test_the_order_of_pairs_does_not_count() -> None:
    first, second, groups = vectors(1), vectors(2), torch.tensor([0, 1, 0, 3, 1, 5, 0])
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    loss, _ = contrastive_loss(first, second, groups, temperature=0.1)
    other, _ = contrastive_loss(first[order], second[order], groups[order], temperature=0.1)
    torch.testing.assert_close(other, loss)


def test_equal_vectors_give_the_logarithm_of_the_choices() -> None:
    same = vectors(1)[:1].expand(PAIRS, WIDTH)
    loss, count = contrastive_loss(same, same, torch.arange(PAIRS), temperature=0.05)
    assert float(loss) / count == pytest.approx(math.log(PAIRS), rel=1e-4)


def test_a_right_answer_is_never_a_wrong_one_too() -> None:
    """The same text twice: as a wrong answer it would hold the loss at log 2 however good the vectors are."""
    basis = torch.eye(WIDTH)
    twice = basis[[0, 1, 2, 0]]
    known, _ = contrastive_loss(twice, twice, torch.tensor([0, 1, 2, 0]), temperature=0.05)
    unknown, _ = contrastive_loss(twice, twice, torch.arange(4), temperature=0.05)
    assert float(known) < 1e-6
    assert float(unknown) == pytest.approx(2 * math.log(2), rel=1e-4)


def test_one_pair_has_nothing_to_learn() -> None:
    first = vectors(1, 1).requires_grad_()
    loss, count = contrastive_loss(first, vectors(2, 1), torch.zeros(1, dtype=torch.long), temperature=0.05)
    loss.backward()
    assert (loss.item(), count) == (0.0, 1)
    assert first.grad is not None and not first.grad.any()


def test_the_gradient_is_that_of_the_sum() -> None:
    first, second = vectors(1).double().requires_grad_(), vectors(2).double()
    groups = torch.tensor([0, 1, 0, 3, 1, 5, 0])
    contrastive_loss(first, second, groups, temperature=0.5)[0].backward()
    assert first.grad is not None
    step = 1e-3
    for row, column in ((0, 1), (3, 4), (6, 2)):
        moved = []
        for sign in (1, -1):
            shifted = first.detach().clone()
            shifted[row, column] += sign * step
            moved.append(loss_by_hand(shifted, second, groups.tolist(), 0.5))
        assert float(first.grad[row, column]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-3, abs=1e-5)


def test_sixteen_bits_are_widened_before_the_temperature_divides() -> None:
    first, second = vectors(1).bfloat16(), vectors(2).bfloat16()
    groups = torch.arange(PAIRS)
    exact, _ = contrastive_loss(first.float(), second.float(), groups, temperature=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = contrastive_loss(first, second, groups, temperature=0.05)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_is_positive(temperature: float) -> None:
    with pytest.raises(InputError, match=r"temperature is .*; expected a positive number"):
        contrastive_loss(vectors(1), vectors(2), torch.arange(PAIRS), temperature=temperature)
