"""Training of classifiers from run file to predictions, for all families and label kinds, and refused inputs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.tasks.classify.train import label_loss
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.labelled_models import FAMILIES, character_tokenizer, model
from tests.tasks.labelled_run import noise, write_columns, write_run_file

SIGNS = {"good": "positive", "bad": "negative", "so": "neutral"}


def one_label(draw: random.Random) -> tuple[str, str]:
    sign = draw.choice(list(SIGNS))
    words = [*noise(draw, draw.randint(1, 7)), sign, *noise(draw, draw.randint(0, 5))]
    return " ".join(words), SIGNS[sign]


def rows_of(make: Any, count: int = 301) -> list[tuple[str, ...]]:
    draw = random.Random(4)
    return [make(draw) for _ in range(count)]


def train(path: Path) -> float:
    """Train a run, and return its last validation score."""
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    lines = (path.parent / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(lines[-1])["valid_score"])


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_every_family_learns_the_same_data(tmp_path: Path, family: str) -> None:
    rows = rows_of(one_label)
    write_columns(tmp_path, rows, ("text", "label"), train=240)
    assert train(write_run_file(tmp_path, 'kind = "classify"', family)) > 90, "chance is 33 %"
    model = ch.load(tmp_path / "run", device="cpu")
    assert model.task.labels == ("negative", "neutral", "positive")
    answers = model.classify([text for text, _ in rows[240:]])
    assert sum(answer.label == label for answer, (_, label) in zip(answers, rows[240:], strict=True)) > 54
    saved = tmp_path / "saved"
    model.save(saved)
    assert [answer.label for answer in ch.load(saved, device="cpu").classify([rows[0][0]])] == [rows[0][1]]


def test_pairs_with_a_share_held_out(tmp_path: Path) -> None:
    def same(draw: random.Random) -> tuple[str, str, str]:
        first, second = draw.choice("mn") * 3, draw.choice("mn") * 3
        return " ".join([*noise(draw, 2), first]), " ".join([second, *noise(draw, 2)]), str(first == second)

    write_columns(tmp_path, rows_of(same, 401), ("text", "other", "label"), train=401)
    columns = ', labels = "label", pair = "other"'
    path = write_run_file(tmp_path, 'kind = "classify"', "encoder", labels=columns, valid="0.2", steps=120)
    assert train(path) > 80, "chance is 50 %"
    (answer,) = ch.load(tmp_path / "run", device="cpu").classify([("aa mmm", "mmm bb")])
    assert answer.label == "True"


def test_several_labels(tmp_path: Path) -> None:
    def several(draw: random.Random) -> tuple[str, str]:
        signs = [sign for sign in SIGNS if draw.random() < 0.4]
        return " ".join(draw.sample([*noise(draw, 3), *signs], 3 + len(signs))), ",".join(SIGNS[s] for s in signs)

    write_columns(tmp_path, rows_of(several), ("text", "label"), train=240)
    assert train(write_run_file(tmp_path, 'kind = "classify"\nlabels = "multi_label"', "encoder")) > 90
    (none, two) = ch.load(tmp_path / "run", device="cpu").classify(["aa bb cc", "bad aa bb so"])
    assert (none.labels, two.labels) == ((), ("negative", "neutral"))


def test_numbers(tmp_path: Path) -> None:
    def number(draw: random.Random) -> tuple[str, str]:
        count = draw.randint(0, 6)
        return " ".join(draw.sample(["good"] * count + noise(draw, 6 - count) + ["aa"], 7)), str(100 + 10 * count)

    write_columns(tmp_path, rows_of(number), ("text", "label"), train=240)
    path = write_run_file(tmp_path, 'kind = "classify"\nlabels = "regression"', "encoder", steps=100)
    assert train(path) > 85
    low, high = ch.load(tmp_path / "run", device="cpu").classify(["aa bb cc dd aa ee ff", "good " * 6 + "aa"])
    assert low.value is not None and high.value is not None
    assert 90 < low.value < 120 < 140 < high.value < 170
    smoothed = load_run_file(path, [f"train.run={tmp_path}/other", "train.label_smoothing=0.1"])
    with pytest.raises(InputError, match="label_smoothing has no effect on a regression"):
        train_run(smoothed, resume=False, progress=TrainingProgress())


def test_it_goes_on_from_a_masked_model(tmp_path: Path) -> None:
    rows = rows_of(one_label)
    write_columns(tmp_path, rows, ("text", "label"), train=240)
    (tmp_path / "train.txt").write_text("".join(f"{text}\n" for text, _ in rows), encoding="utf-8")
    filled = write_run_file(tmp_path, 'kind = "fill"', "encoder", ending="txt", labels="", valid="0.1", steps=5)
    train(filled)
    untrained = ch.load(tmp_path / "run", device="cpu")
    with pytest.raises(InputError, match="trained to 'fill', so it cannot predict labels"):
        untrained.classify(["aa"])
    text = write_run_file(tmp_path, f'kind = "classify"\ninit = "{tmp_path}/run"', "encoder").read_text("utf-8")
    head, rest = text.split("[tokenizer]")
    path = tmp_path / "tuned.toml"
    path.write_text(head + rest[rest.index("[train]") :].replace("/run", "/tuned"), encoding="utf-8")
    train_run(load_run_file(path), resume=False, progress=TrainingProgress())
    tuned = ch.load(tmp_path / "tuned", device="cpu")
    assert tuned.tokenizer.fingerprint == untrained.tokenizer.fingerprint
    assert tuned.spec.encoder == untrained.spec.encoder
    answers = tuned.classify([text for text, _ in rows[240:]])
    assert sum(answer.label == label for answer, (_, label) in zip(answers, rows[240:], strict=True)) > 54


def test_a_held_out_label_must_be_known(tmp_path: Path) -> None:
    write_columns(tmp_path, [("aa", "x"), ("bb", "y"), ("cc", "z")], ("text", "label"), train=2)
    with pytest.raises(InputError, match=r'^\[data\] valid: .*valid.tsv:2: the label "z" is not among the 2'):
        train(write_run_file(tmp_path, 'kind = "classify"', "encoder"))


def test_the_first_token_of_a_decoder_says_nothing(tmp_path: Path) -> None:
    write_columns(tmp_path, rows_of(one_label, 31), ("text", "label"), train=20)
    with pytest.raises(InputError, match="pool = 'first' is the start token"):
        train(write_run_file(tmp_path, 'kind = "classify"\npool = "first"', "decoder"))


TEXTS = [[5, 6, 7], [8, 5], [9, 9, 6, 5, 7], [10]]


def batch_for(module: Transformer, labels: Any) -> Batch:
    rectangle = InputCollator.of(module.spec, character_tokenizer()).collate(TEXTS)
    return Batch(
        ids=rectangle.ids,
        mask=rectangle.mask,
        labels=torch.tensor(labels),
        num_labels=4,
        num_tokens=rectangle.num_tokens,
        rows=np.arange(4),
        target_ids=rectangle.target_ids,
    )


def outputs(module: Transformer, batch: Batch) -> list[list[float]]:
    with torch.no_grad():
        logits = module(batch.ids, batch.target_ids, mask=batch.mask).logits
    assert logits is not None
    rows: list[list[float]] = logits.double().tolist()
    return rows


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(value) for value in row))
    return [value - total for value in row]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("family", "pool"), FAMILIES)
def test_one_class(family: str, pool: str, smoothing: float) -> None:
    module = model(family, character_tokenizer(), count=3, pool=pool).eval()
    labels = [0, 2, 1, 2]
    batch = batch_for(module, labels)
    loss, count = label_loss(module, batch, kind="single_label", label_smoothing=smoothing)
    expected = sum(
        -(1 - smoothing) * logs[label] - smoothing * sum(logs) / 3
        for logs, label in zip(map(log_softmax, outputs(module, batch)), labels, strict=True)
    )
    assert (float(loss.detach()), count) == (pytest.approx(expected, rel=1e-5), 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_several_classes(smoothing: float) -> None:
    module = model("encoder", character_tokenizer(), count=3, pool="mean").eval()
    labels = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    batch = batch_for(module, labels)
    loss, count = label_loss(module, batch, kind="multi_label", label_smoothing=smoothing)
    expected = 0.0
    for row, wanted in zip(outputs(module, batch), labels, strict=True):
        for value, yes in zip(row, wanted, strict=True):
            share = yes * (1 - smoothing) + smoothing / 2
            expected += share * math.log1p(math.exp(-value)) + (1 - share) * math.log1p(math.exp(value))
    assert (float(loss.detach()), count) == (pytest.approx(expected, rel=1e-5), 12)


def test_a_number() -> None:
    module = model("encoder", character_tokenizer(), count=1, pool="mean").eval()
    labels = [0.5, -1.0, 2.0, 0.0]
    batch = batch_for(module, labels)
    loss, count = label_loss(module, batch, kind="regression")
    expected = sum((row[0] - label) ** 2 for row, label in zip(outputs(module, batch), labels, strict=True))
    assert (float(loss.detach()), count) == (pytest.approx(expected, rel=1e-5), 4)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_the_gradient_reaches_every_stack(family: str) -> None:
    module = model(family, character_tokenizer(), count=3, pool="mean" if family == "encoder" else "last")
    loss, _ = label_loss(module, batch_for(module, [0, 2, 1, 2]), kind="single_label")
    loss.backward()
    for name, parameter in module.named_parameters():
        # A decoder that reads one token has nothing to choose from; and a bias on keys never changes a softmax.
        is_idle = family == "encoder-decoder" and name.startswith("decoder") and ".steps.0." in name
        if "key" not in name and not (is_idle and "query" in name):
            assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name


def test_the_loss_of_a_batch_is_the_sum_of_its_texts() -> None:
    module = model("decoder", character_tokenizer(), count=3, pool="last").eval()
    batch = batch_for(module, [0, 2, 1, 2])
    parts = 0.0
    for row in range(4):
        alone = InputCollator.of(module.spec, character_tokenizer()).collate([TEXTS[row]])
        single_row = Batch(alone.ids, alone.mask, batch.labels[row : row + 1], 1, alone.num_tokens, np.array([row]))
        parts += float(label_loss(module, single_row, kind="single_label")[0].detach())
    assert float(label_loss(module, batch, kind="single_label")[0].detach()) == pytest.approx(parts, rel=1e-5)
