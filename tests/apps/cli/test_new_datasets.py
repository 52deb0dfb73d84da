"""`clearhead new` reads Parquet files and data sets; what is on a hub is tested in tests/examples/test_hub_data.py."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from clearhead.training.runfile.read import load_run_file
from tests.examples.test_hub_data import parquet

pytestmark = pytest.mark.usefixtures("unmeasured")


def test_new_reads_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"de": f"ein hund\nbellt {number}", "en": f"a dog\nbarks {number}"} for number in range(40)]
    Path("pairs.parquet").write_bytes(parquet(rows))
    assert main(["new", "translate", "--source", "pairs.parquet:de", "--target", "pairs.parquet:en"]) == 0
    tables = tomllib.loads(Path("run.toml").read_text("utf-8"))
    assert tables["data"]["train"] == {"jsonl": "run-data/train.jsonl"}, "a part of it is held out"
    pairs = [json.loads(line) for line in Path("run-data/train.jsonl").read_text("utf-8").splitlines()]
    assert {"source": rows[0]["de"], "target": rows[0]["en"]} in pairs or len(pairs) < 40
    texts = [{"words": f"a text {number}", "kind": "good" if number % 2 else "bad"} for number in range(60)]
    Path("texts.parquet").write_bytes(parquet(texts))
    options = ["--text", "texts.parquet", "--text-column", "words", "--labels", "kind", "--valid-text", "texts.parquet"]
    assert main(["new", "classify", *options, "-o", "labels.toml"]) == 0
    train = load_run_file(Path("labels.toml")).data.train
    assert (train.dataset, train.field, train.labels) == ("texts.parquet", "words", "kind")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["translate", "--source", "hf:a/b:de", "--target", "train.en"], "are not the two sides of one data set"),
        (["translate", "--source", "hf:a/b", "--target", "hf:a/b:en"], "each time with :FIELD behind"),
        (["generate", "--text", "hf:poems"], "names no data set of the Hugging Face hub; expected hf:OWNER/NAME"),
        (["generate", "--text", "missing.parquet"], "dataset 'missing.parquet', split 'train', cannot be loaded"),
    ],
)
def test_what_names_no_data_is_refused(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("clearhead.apps.recipes.draft._with_validation", lambda options: options)
    assert main(["new", *options]) == 2
    message = capfd.readouterr().err
    assert sentence in message and message.count("\n") == 1 and not list(tmp_path.iterdir())
