"""Training from Python: lists instead of files give the same run, for every task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.checkpoints.runs.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("quick_trainings")
LETTERS = "abcdefgh"
TEXTS = [
    " ".join(LETTERS[(start + step * index) % 8] for index in range(5)) for start in range(8) for step in (1, 3, 5)
]
PAIRS = [(text, text[::-1]) for text in TEXTS]
EXAMPLES: dict[str, list[Any]] = {
    "translate": PAIRS,
    "embed": PAIRS,
    "generate": TEXTS,
    "fill": TEXTS,
    "denoise": TEXTS,
    "classify": [(text, "low" if text[0] in "abcd" else "high") for text in TEXTS],
    "tag": [(text.split(), ["L" if word in "abcd" else "H" for word in text.split()]) for text in TEXTS],
    "answer": [(text[0], text, None, None) if text[2] in "ab" else (text[0], text, text[2], 2) for text in TEXTS],
}


def tables(kind: str, run: Path, **train: object) -> dict[str, dict[str, object]]:
    return {
        "task": {"kind": kind},
        "data": {"valid": 0.25, "max_length": 16},
        "tokenizer": {"kind": "word", "vocab_size": 50},
        "model": {"layers": 1, "width": 14, "heads": 2, "feedforward": 19, "dropout": 0.0},
        "train": {"run": str(run), "steps": 4, "batch_tokens": 64, "validate_every": 2, "device": "cpu", **train},
    }


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_task_learns_from_lists(kind: str, tmp_path: Path) -> None:
    result = ch.train(tables(kind, tmp_path / "run"), data={"train": EXAMPLES[kind]})
    assert result.run == tmp_path / "run" and result.step == 4
    assert [row.step for row in read_metrics(result.run / "metrics.jsonl") if row.valid_loss is not None] == [2, 4]
    model = result.load(device="cpu")
    assert model.task.kind == kind


def test_lists_are_files(tmp_path: Path) -> None:
    """Compare the weights of runs with the same examples in lists and in files of lines."""
    (tmp_path / "source.txt").write_text("".join(f"{a}\n" for a, _ in PAIRS), encoding="utf-8")
    (tmp_path / "target.txt").write_text("".join(f"{b}\n" for _, b in PAIRS), encoding="utf-8")
    run_file = tables("translate", tmp_path / "files")
    names = {"source": str(tmp_path / "source.txt"), "target": str(tmp_path / "target.txt")}
    run_file["data"] |= {"train": names, "valid": names}
    files = ch.train(run_file)
    lists = ch.train(tables("translate", tmp_path / "lists"), data={"train": PAIRS, "valid": PAIRS})
    first, second = (result.load(device="cpu").module.state_dict() for result in (files, lists))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_path_overrides_and_a_validation_list(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[task]\nkind = "classify"\n[data]\nvalid = 0.1\n[tokenizer]\nkind = "word"\nvocab_size = 50\n[model]\n'
        "layers = 1\nwidth = 14\nheads = 2\nfeedforward = 19\n[train]\nrun = 'x'\nsteps = 9\nbatch_tokens = 64\n",
        encoding="utf-8",
    )
    pairs = [(text, text[::-1], label) for text, label in EXAMPLES["classify"]]
    changes = {"train.steps": 3, "train.run": str(tmp_path / "run"), "train.device": "cpu"}
    result = ch.train(path, changes, data={"train": pairs, "valid": pairs[:5]})
    assert result.step == 3
    assert len((result.run / "data" / "valid.jsonl").read_text("utf-8").splitlines()) == 5


def test_a_run_continues_without_its_lists(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ch.train(tables("translate", run), data={"train": PAIRS})
    result = ch.train(run / "run.toml", {"train.steps": 6}, resume=True)
    assert result.step == 6


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"train": PAIRS, "vald": PAIRS}, r"`data` has an unknown key 'vald' \(did you mean 'valid'\?\)"),
        (
            {"train": [("a", "b"), "ab"], "valid": PAIRS},
            r"data\['train'\], example 2: expected \(source, target\), got 'ab'",
        ),
        ({"train": [("a", "b", "c")], "valid": PAIRS}, "example 1: expected"),
        ({"train": [("a", {1})], "valid": PAIRS}, "example 1: expected texts"),
        ({"train": 5, "valid": PAIRS}, r"data\['train'\]: expected a list of examples, got int"),
        ({"train": "ab", "valid": PAIRS}, "expected a list of examples, got str"),
        ({"train": [], "valid": PAIRS}, "train.jsonl"),
        ({"train": [("a", 5)], "valid": PAIRS}, "train.jsonl:1"),
    ],
)
def test_data_that_cannot_be_used_leaves_nothing(data: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        ch.train(tables("translate", tmp_path / "run"), data=data)
    assert not (tmp_path / "run").exists()


def test_faults_of_the_tables_are_reported_together(tmp_path: Path) -> None:
    wrong = tables("translate", tmp_path / "run", stesp=3)
    wrong["model"]["layers"] = 0
    with pytest.raises(InputError, match=r"(?s)layers.*stesp|stesp.*layers"):
        ch.train(wrong, data={"train": PAIRS})
    with pytest.raises(InputError, match="expected a dictionary of keys for the table 'task', got 'translate'"):
        ch.train({**wrong, "task": "translate"})
    with pytest.raises(InputError, match="leave `data` out"):
        ch.train(tables("translate", tmp_path / "run"), data={"train": PAIRS}, resume=True)
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="exists: name a new run directory"):
        ch.train(tables("translate", tmp_path / "run"), data={"train": PAIRS})


def test_warmup_and_validation_are_given_in_steps_or_as_shares(tmp_path: Path) -> None:
    """Compare 0.5 of 6 steps with 3 steps: learning rates and validations are equal."""
    rows = []
    for name, count in (("share", 0.5), ("steps", 3)):
        run_file = tables("fill", tmp_path / name, steps=6, schedule="cosine", warmup=count, validate_every=count)
        run = ch.train(run_file, data={"train": TEXTS}).run
        rows.append([(row.step, row.learning_rate, row.valid_loss) for row in read_metrics(run / "metrics.jsonl")])
    assert rows[0] == rows[1] and [step for step, _, loss in rows[0] if loss is not None] == [3, 6]


@pytest.mark.parametrize(
    ("kind", "examples", "field", "expected"),
    [
        ("classify", [(f"text {row}", "good" if row < 60 else "bad") for row in range(120)], "label", {"good", "bad"}),
        (
            "classify",
            [(f"text {row}", ["a", "b", "c"][min(2, row // 40)]) for row in range(83)],
            "label",
            {"a", "b", "c"},
        ),
        ("tag", [([f"w{row}", "x"], ["B-A" if row < 20 else "B-C", "O"]) for row in range(40)], "tags", {"B-A", "B-C"}),
        ("translate", [(f"de {row}", f"en {row}") for row in range(40)], "source", None),
    ],
)
def test_a_share_of_a_sorted_list_has_every_label(
    kind: str, examples: list[Any], field: str, expected: set[str] | None, tmp_path: Path
) -> None:
    """Compare the weights of a list in memory and of the same rows in a file; no row is lost."""
    result = ch.train(tables(kind, tmp_path / "run"), data={"train": examples})
    rows = {name: _records(result.run / "data" / f"{name}.jsonl") for name in ("train", "valid")}
    assert len(rows["valid"]) == round(0.25 * len(examples))
    assert len(rows["train"]) + len(rows["valid"]) == len(examples)
    values = [row[field][0] if isinstance(row[field], list) else row[field] for row in rows["valid"]]
    assert expected is None or set(values) == expected
    assert values != [_first(example, kind) for example in examples[-len(values) :]]
    whole = tmp_path / "all.jsonl"
    fields = {"classify": ("text", "label"), "tag": ("tokens", "tags"), "translate": ("source", "target")}[kind]
    whole.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in examples), "utf-8")
    run_file = tables(kind, tmp_path / "file")
    names = {"classify": {"text": str(whole), "labels": "label"}, "tag": {"text": str(whole)}}
    run_file["data"]["train"] = names.get(kind, {"jsonl": str(whole)})
    of_file = ch.train(run_file).load(device="cpu").module.state_dict()
    of_list = result.load(device="cpu").module.state_dict()
    assert all(torch.equal(of_file[name], of_list[name]) for name in of_list)


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _first(example: Any, kind: str) -> str:
    return {"classify": example[1], "tag": example[1][0], "translate": example[0]}[kind]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_resuming_without_a_sound_checkpoint_does_not_blame_the_precision(tmp_path: Path, is_damaged: bool) -> None:
    """Check that run file and checkpoints contain the precision that "auto" chose."""
    content = tables("generate", tmp_path / "run")
    ch.train(content, data={"train": TEXTS})
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        if is_damaged:
            (checkpoint / "weights.safetensors").write_bytes(b"")
        else:
            shutil.rmtree(checkpoint)
    files = {split: {"text": str(tmp_path / "run" / "data" / f"{split}.jsonl")} for split in ("train", "valid")}
    with pytest.raises(InputError, match="checkpoint") as caught:
        ch.train({**content, "data": {**content["data"], **files}}, resume=True)
    assert "precision" not in f"{caught.value}" and ("no checkpoint yet" in f"{caught.value}") != is_damaged
