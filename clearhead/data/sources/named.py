"""Parse the names of data sets on the command line: hf:OWNER/NAME with its options, or FILE.parquet[:FIELD]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clearhead.base.errors import InputError
from clearhead.data.sources.run_file_tables import has_ending
from clearhead.data.sources.tables import TABLE_FORMATS, Dataset

_HUB: Final = re.compile(
    r"hf:(?P<dataset>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?(?:\[(?P<split>[^\]]+)\])?"
    r"(?::(?P<field>.+))?"
)
_PARQUET: Final = re.compile(r"(?P<dataset>.+\.parquet)(?::(?P<field>.+))?")
_FORM: Final = "hf:OWNER/NAME, followed by /CONFIG, @REVISION, [SPLIT] and :FIELD where they are needed"
_VALID: Final = ("validation", "valid", "dev")


@dataclass(frozen=True)
class NamedDataset:
    """A data set named on the command line.

    Args:
        table: the keys that name the data set in the [data] table of a run file.
        field: the field that follows the colon in the name. None means that the name has no field.
    """

    table: Mapping[str, str]
    field: str | None

    def validation(self) -> str | None:
        """Return the name of the validation split of the same data set; None if it has none.

        Raises:
            InputError: the data set cannot be found.
        """
        name, split, config, revision = map(self.table.get, ("dataset", "split", "config", "revision"))
        assert name is not None and split is not None, "a data set of the hub needs a name and a split"
        if split != "train" or has_ending(name, *TABLE_FORMATS):
            return None
        names = Dataset(name, split, {}, config, revision=revision).splits()
        valid_split = next((valid for valid in _VALID if valid in names), None)
        parts = f"/{config}" * (config is not None), f"@{revision}" * (revision is not None), f"[{valid_split}]"
        field = "" if self.field is None else f":{self.field}"
        return None if valid_split is None else f"hf:{name}{''.join(parts)}{field}"


def parse_dataset_name(text: str | Path, *, split: str | None = "train") -> NamedDataset | None:
    """Parse the name of a data set on the command line; return None if the text names a file or a folder.

    Args:
        text: the argument of the command.
        split: the split if the name has none. None means that a data set of the hub must name its split.

    Raises:
        InputError: the name starts like that of a data set but is not one, or names no split.
    """
    word = str(text)
    match = _HUB.fullmatch(word) or (None if word.startswith("hf:") else _PARQUET.fullmatch(word))
    if match is None:
        if word.startswith("hf:"):
            raise InputError(f"{word} names no data set of the Hugging Face hub; expected {_FORM}")
        return None
    keys = {key: value for key, value in match.groupdict().items() if value is not None}
    field, usual = keys.pop("field", None), "train" if match.re is _PARQUET else split
    if usual is None and "split" not in keys:
        raise InputError(f"{word} names no split of the data set; add one in brackets, such as [test]")
    return NamedDataset({"dataset": keys.pop("dataset"), "split": usual or "", **keys}, field)


def pair_table(source: Path, target: Path, *, split: str | None = "train") -> dict[str, Any]:
    """Return the [data] table for two files, or for two fields of one data set.

    Args:
        source, target: the arguments of the command.
        split: the split if a name has none, as in `parse_dataset_name`.

    Raises:
        InputError: only one of them is a data set, they are different data sets, or a field is missing.
    """
    first, second = (parse_dataset_name(text, split=split) for text in (source, target))
    if first is None and second is None:
        return {"source": str(source), "target": str(target)}
    if first is None or second is None or first.table != second.table or None in (first.field, second.field):
        raise InputError(
            f"{source} and {target} are not the two sides of one data set; name it twice, each time with its :FIELD"
        )
    return {**first.table, "source_field": first.field, "target_field": second.field}


def text_table(text: Path, field: str | None, *, split: str | None = "train") -> dict[str, Any]:
    """Return the [data] table for running text: a file, a folder or a data set, and the field to read.

    Args:
        text: the argument of the command.
        field: the field of the texts if `text` names none. None means the default field.
        split: the split if the name has none, as in `parse_dataset_name`.
    """
    named = parse_dataset_name(text, split=split)
    keys = {"text": str(text)} if named is None else dict(named.table)
    if named is None and field is not None and has_ending(text, *TABLE_FORMATS):
        keys = {"dataset": str(text), "split": "train"}
    chosen = field if named is None or named.field is None else named.field
    return keys if chosen is None else {**keys, "field": chosen}
