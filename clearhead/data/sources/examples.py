"""Lists of examples from Python, in place of files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.data.sources.tables import Examples
from clearhead.errors import InputError

# The fields of an example by the kind of its task; a text alone has no tuple around it.
_PAIR, _TEXT = ("source", "target"), ("text",)
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "translate": _PAIR,
    "embed": _PAIR,
    "classify": ("text", "label"),
    "tag": ("tokens", "tags"),
    "answer": ("question", "context", "answer", "start"),
}
_PAIRED_FIELDS = ("text", "pair", "label")
_ROLES = {"label": "labels"}
_RAW = ("labels", "tokens", "tags", "answer", "start")


def parse_examples(examples: Any, kind: object, *, name: str = "data") -> Examples:
    """Turn a list of examples into a source.

    Args:
        examples: (source, target) for translate and embed; a text for generate, fill and denoise; (text, label) or
            (text, second text, label) for classify; (words, tags) for tag; (question, context, answer, start) for
            answer, where the start counts characters, and both are None where the context holds no answer.
        kind: of the task.
        name: what a message calls the list.

    Raises:
        InputError: not a list, or an example of another form.
    """
    if isinstance(examples, str) or not isinstance(examples, Sequence):
        raise InputError(f"{name}: expected a list of examples, got {type(examples).__name__}")
    fields = _FIELDS.get(str(kind), _TEXT)
    if kind == "classify" and examples and _size(examples[0]) == len(_PAIRED_FIELDS):
        fields = _PAIRED_FIELDS
    records = []
    for number, example in enumerate(examples, start=1):
        values = (example,) if fields == _TEXT else example
        if _size(values) != len(fields):
            raise InputError(f"{name}, example {number}: expected ({', '.join(fields)}), got {example!r:.80}")
        try:
            records.append(json.loads(json.dumps(dict(zip(fields, values, strict=True)))))
        except TypeError:
            raise InputError(f"{name}, example {number}: expected texts, got {example!r:.80}") from None
    return Examples(records, {_ROLES.get(field, field): field for field in fields}, _RAW, name)


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


def _size(values: object) -> int | None:
    """Return the number of values of an example; None: it is not a sequence of values."""
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else None
