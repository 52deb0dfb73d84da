"""A file of the same kind is read as the training data was; what is given stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clearhead.data.sources.run_file_tables import apply_data_format, describe_data_format
from clearhead.spec.tasks.record import TaskRecord


@pytest.mark.parametrize(
    ("trained", "changes", "added"),
    [
        ({"text": "a.txt", "document": "line"}, {"text": "b.txt"}, {"document": "line"}),
        ({"text": "a.txt", "document": "line"}, {"text": "b.txt", "document": "file"}, {}),
        ({"text": "a.jsonl", "field": "body"}, {"text": "b.jsonl.gz"}, {"field": "body"}),
        ({"text": "a.jsonl", "field": "body", "document": "line"}, {"text": "b.txt"}, {"document": "line"}),
        ({"text": "a.tsv", "labels": 2, "text_column": 1}, {"text": "b.tsv", "labels": "kind"}, {"text_column": 1}),
        ({"text": "a.tsv", "labels": 2, "text_column": 1}, {"text": "b.csv", "labels": "kind"}, {}),
        ({"text": "a.txt", "labels": "labels.txt"}, {"text": "b.txt"}, {}),
        ({"tsv": "a.tsv", "source_column": 3}, {"tsv": "b.tsv"}, {"source_column": 3}),
        ({"source": "a.de", "target": "a.en"}, {"source": "b.de", "target": "b.en"}, {}),
        ({"dataset": "d", "split": "train", "field": "body"}, {"text": "b.jsonl"}, {}),
        # A form of another package.
        ({"rated": "a.tsv", "loud": True, "at": [1, 2]}, {"rated": "b.tsv"}, {"loud": True, "at": [1, 2]}),
    ],
)  # fmt: skip
def test_what_is_not_given_is_as_in_training(
    trained: dict[str, Any], changes: dict[str, Any], added: dict[str, Any]
) -> None:
    record = TaskRecord(kind="fill", reading=describe_data_format(trained))
    again = TaskRecord.from_json(record.to_json(), "task.json")
    assert apply_data_format(changes, again.reading) == changes | added
    assert apply_data_format(changes, None) == changes


def test_a_field_is_for_json_lines_alone_or_in_a_folder(tmp_path: Path) -> None:
    for name in ("shards/a.jsonl.gz", "texts/a.txt", "one.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    for trained in ("shards", "one.jsonl"):
        reading = describe_data_format({"text": trained, "field": "body"})
        for name, is_read in {"shards": True, "texts": False, "one.jsonl": True, "texts/a.txt": False}.items():
            assert ("field" in apply_data_format({"text": str(tmp_path / name)}, reading)) == is_read


def test_a_pattern_is_for_folders(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("text", encoding="utf-8")
    reading = describe_data_format({"text": "corpus", "pattern": "*.txt"})
    assert apply_data_format({"text": str(tmp_path)}, reading)["pattern"] == "*.txt"
    assert "pattern" not in apply_data_format({"text": str(tmp_path / "one.txt")}, reading)
