"""Lists of examples from Python, written as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from clearhead.data.sources.tables import Examples


def json_lines(examples: Examples) -> str:
    """Return the records of examples as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in examples.records)


def json_lines_entry(examples: Examples, path: Path) -> dict[str, str]:
    """Return the entry of [data] in a run file that reads examples from a file of their JSON lines."""
    if "source" in examples.columns:
        return {"jsonl": str(path)}
    return {
        "text": str(path),
        **{role: field for role, field in examples.columns.items() if role in ("labels", "pair")},
    }
