"""The student's path: building and running the original Transformer, GPT-2 and BERT imports few lines."""

from __future__ import annotations

from tests.house.student_path import student_path

MOST_LINES = 2700


def test_three_models_import_few_lines() -> None:
    lines = student_path()
    longest = "\n".join(f"{count:6,}  {path}" for path, count in sorted(lines.items(), key=lambda item: -item[1]))
    print(f"{sum(lines.values()):,} lines in {len(lines)} modules\n{longest}")
    assert "clearhead/core/attention.py" in lines
    assert sum(lines.values()) <= MOST_LINES, longest


def test_specs_import_neither_presets_nor_tasks() -> None:
    lines = student_path()
    assert not [path for path in lines if path.startswith(("clearhead/spec/presets", "clearhead/spec/tasks"))]
