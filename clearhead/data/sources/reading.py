"""How a run reads its training data, which is how the same kind of file is read wherever else it is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clearhead.data.sources.run_file_tables import has_ending, user_path
from clearhead.spec.tasks.record import Reading

_FORMS = ("text", "tsv", "jsonl", "dataset", "source")
# Keys that name the data itself.
_NAMES = frozenset({*_FORMS, "target", "split", "config", "revision"})
_ENDINGS = (".tsv", ".csv", ".jsonl")


def reading_of(table: Mapping[str, Any]) -> Reading:
    """Return how the data of a [data] table is read, without what names it.

    Args:
        table: the keys that were given.
    """
    form, ending = _kind(table)
    # Beside plain text these are files of their own.
    files = ("labels", "pair") if form == "text" and not ending else ()
    keys = {key: value for key, value in table.items() if key not in _NAMES and key not in (form, *files)}
    return Reading(form=form, ending=ending, keys=keys)


def read_alike(table: Mapping[str, Any], reading: Reading | None) -> dict[str, Any]:
    """Return a [data] table with the keys by which the training data was read, where it is of the same kind.

    Args:
        table: the keys that are given, which stay.
        reading: of the training data; None: not known.
    """
    if reading is None:
        return dict(table)
    form, ending = _kind(table)
    keys = dict(reading.keys) if (form, ending) == (reading.form, reading.ending) else {}
    if form == "text":
        path = user_path(str(table["text"]))
        has_fields = reading.form == "text" and (ending == ".jsonl" or any(path.rglob("*.jsonl*")))
        for name, is_read in {"document": True, "pattern": path.is_dir(), "field": has_fields}.items():
            keys.pop(name, None)
            if is_read and name in reading.keys:
                keys[name] = reading.keys[name]
    return {**keys, **table}


def _kind(table: Mapping[str, Any]) -> tuple[str, str]:
    """Return the form of a table, and the ending of a text file that has columns or fields."""
    form = next((form for form in _FORMS if form in table), next(iter(table), ""))
    ending = next((one for one in _ENDINGS if form == "text" and has_ending(str(table[form]), one)), "")
    return form, ending
