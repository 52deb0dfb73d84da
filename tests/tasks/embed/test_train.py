"""A contrastive run from its file to its vectors: it learns what belongs together, and says what it cannot use."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.data.sources.lines import read_lines
from clearhead.errors import InputError
from clearhead.evaluate.retrieval import recall_at
from clearhead.tasks.embed.batches import positive_groups
from clearhead.training.assemble import train_run
from clearhead.training.progress.reports import Progress
from clearhead.training.runfile.read import load_run_file
from tests.tasks.tiny_run import write_tiny_run


def write_pairs(folder: Path) -> None:
    """Two languages of 23 words, one written backwards and in capitals."""
    draw = random.Random(3)
    for part, count in (("train", 331), ("valid", 53)):
        lines = [
            draw.choices([2 * letter for letter in "abcdefghijklmnopqrstuvw"], k=draw.randint(2, 5))
            for _ in range(count)
        ]
        for side, texts in (("a", lines), ("b", [[word.upper() for word in line[::-1]] for line in lines])):
            (folder / f"{part}.{side}").write_text("".join(f"{' '.join(text)}\n" for text in texts), encoding="utf-8")


def run_file(folder: Path, family: str = "encoder") -> Path:
    write_pairs(folder)
    sides = {part: f'source = "{folder}/{part}.a", target = "{folder}/{part}.b"' for part in ("train", "valid")}
    tables = {part: f"{{ {files} }}" for part, files in sides.items()}
    values = {"max_length": 7, "learning_rate": 1e-2, "steps": 20}
    return write_tiny_run(folder, task='kind = "embed"', family=family, **values, **tables)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_it_learns_what_belongs_together(tmp_path: Path, family: str) -> None:
    result = train_run(load_run_file(run_file(tmp_path, family=family)), resume=False, progress=Progress())
    assert result.best == "step-20"
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    model = ch.load(tmp_path / "run", device="cpu")
    firsts, seconds = (read_lines(tmp_path / f"valid.{side}") for side in "ab")
    groups = positive_groups(zip(firsts, seconds, strict=True))
    found = recall_at(model.embed(firsts), model.embed(seconds), groups=groups)
    assert last["valid_score"] == pytest.approx(100 * found.mean), "what validation says is what the vectors do"
    assert found.mean > 0.25, "chance is 0.02"
    assert (model.task.kind, model.task.max_length) == ("embed", 7)
    assert [layer.kind for layer in model.spec.head.layers] == ["pool", "l2_normalize"]
    assert model.spec.head.layers[0].by == ("mean" if family == "encoder" else "last")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.label_smoothing=0.1", "label_smoothing has no effect for the task 'embed'"),
        ("data.max_length=2", r"max_length is 2; .* at least 3"),
        ("data.max_length=3", r"train: .* no pair is left"),
        ("train.batch_tokens=12", "raise batch_tokens to at least 14"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_run(load_run_file(run_file(tmp_path), [change]), resume=False, progress=Progress())
