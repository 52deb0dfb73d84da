"""The run files in examples/ find their data on a hub, and so does `clearhead new`; the client is the real one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from clearhead.training.runfile.read import load_run_file
from tests.checkpoints.hf.files.fake_hub import COMMITS, Hub, job, serving
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
OWN = ("copy", "reverse", "tags-library", "multi30k-bpe-en-de")
"""Examples whose data comes from a script next to them, or from no data set of the hub."""
POEM = "Die Luft ging durch die Felder,\ndie Aehren wogten sacht,\n" * 40


def parquet(rows: list[dict[str, Any]], classes: dict[str, list[str]] | None = None) -> bytes:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    dataset = datasets.Dataset.from_list(rows)
    for name, names in (classes or {}).items():
        dataset = dataset.cast_column(name, datasets.ClassLabel(names=names))
    file = io.BytesIO()
    dataset.to_parquet(file)
    return file.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def captions(what: str, count: int) -> bytes:
    return lines([{"en": f"a {what} barks {number}", "de": f"ein {what} bellt {number}"} for number in range(count)])


def reviews(what: str, count: int) -> list[dict[str, Any]]:
    return [{"sentence": f"a {what} film {number}", "label": number % 2} for number in range(count)]


def make_hub() -> Hub:
    """Return a hub with repositories that have the names, files and columns of the real ones."""
    names = {"label": ["negative", "positive"]}
    main = {
        "bentrevett/multi30k": {"train.jsonl": captions("dog", 40), "val.jsonl": captions("hound", 5)},
        "SetFit/sst2": {"train.jsonl": lines([{"text": "a fine film", "label": 1, "label_text": "positive"}] * 3)},
        "stanfordnlp/sst2": {
            "data/train-00000-of-00001.parquet": parquet(reviews("fine", 60), names),
            "data/validation-00000-of-00001.parquet": parquet(reviews("poor", 8), names),
        },
        "some/poems": {"train.jsonl": lines([{"verse": POEM}])},
        "some/script": {"script.py": b"raise SystemExit"},
    }
    files = {(f"datasets/{name}", COMMITS["main"]): content for name, content in main.items()}
    shakespeare = {
        f"data/{split}-00000-of-00001.parquet": parquet([{"text": f"{split}: {POEM}"}])
        for split in ("train", "validation", "test")
    }
    files["datasets/karpathy/tiny_shakespeare", COMMITS["refs/pr/2"]] = shakespeare
    files["datasets/karpathy/tiny_shakespeare", COMMITS["main"]] = {"tiny_shakespeare.py": b"raise SystemExit"}
    return Hub(files, {})


NEW = {
    "translate": ["translate", "--source", "hf:bentrevett/multi30k:de", "--target", "hf:bentrevett/multi30k:en"],
    "classify": ["classify", "--text", "hf:stanfordnlp/sst2:sentence", "--labels", "label"],
    "generate": ["generate", "--text", "hf:some/poems", "--text-column", "verse"],
}


def test_examples_and_new_read_a_hub(tmp_path: Path) -> None:
    with serving(make_hub()) as (_, endpoint):
        done = job(endpoint, tmp_path, "tests.examples.hub_data_job", str(EXAMPLES), str(tmp_path), json.dumps(NEW))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    read = {record.pop("file"): record for record in answers if "file" in record}
    assert set(read) == {path.stem for path in EXAMPLES.glob("*.toml")}
    assert {name for name, row in read.items() if not row} == set(OWN)
    assert read["multi30k-de-en"] == {
        "train": ["ein dog bellt 0", "a dog barks 0"],
        "valid": ["ein hound bellt 0", "a hound barks 0"],
    }
    assert read["sst2"]["train"] == ["a fine film 0", "negative"] and read["sst-start"] == read["sst2"]
    assert read["fill-multi30k"] == {"train": "a dog barks 0", "valid": "a hound barks 0"}
    assert read["tinyshakespeare"]["valid"].startswith("validation: Die Luft")
    assert {record["new"]: record["code"] for record in answers if "new" in record} == dict.fromkeys(NEW, 0), (
        done.stderr
    )
    data = {name: load_run_file(tmp_path / f"{name}.toml").data for name in NEW}
    assert data["translate"].train.model_dump(exclude_none=True) == {
        "dataset": "bentrevett/multi30k", "split": "train", "source_field": "de", "target_field": "en",
    }  # fmt: skip
    assert data["translate"].valid.split == data["classify"].valid.split == "validation"
    assert (data["classify"].train.field, data["classify"].train.labels) == ("sentence", "label")
    assert "verse" not in str(data["generate"]) or data["generate"].train.field == "verse"
    refused = {record["refused"]: record["error"] for record in answers if "refused" in record}
    assert "dataset 'some/missing', split 'train', cannot be loaded" in refused["some/missing"]
    assert "no longer supported" in refused["some/script"], "nothing that was downloaded is run"
