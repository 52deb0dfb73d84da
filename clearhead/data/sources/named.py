"""Data sets that a command names in one word: hf:OWNER/NAME and what of it is read, or FILE.parquet[:FIELD]."""

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
_FORM: Final = "hf:OWNER/NAME, behind it /CONFIG, @REVISION, [SPLIT] and :FIELD where they are needed"
_VALID: Final = ("validation", "valid", "dev")


@dataclass(frozen=True)
class NamedDataset:
    """A data set that a command names.

    Args:
        table: what names it in [data] of a run file.
        field: the field that is named behind it; None: none is.
    """

    table: Mapping[str, str]
    field: str | None

    def validation(self) -> str | None:
        """Return the word for the validation split of a training split; None: there is none.

        Raises:
            InputError: the data set cannot be found.
        """
        name, split, config, revision = map(self.table.get, ("dataset", "split", "config", "revision"))
        assert name is not None and split is not None, "every data set has them"
        if split != "train" or has_ending(name, *TABLE_FORMATS):
            return None
        names = Dataset(name, split, {}, config, revision=revision).splits()
        valid_split = next((valid for valid in _VALID if valid in names), None)
        parts = f"/{config}" * (config is not None), f"@{revision}" * (revision is not None), f"[{valid_split}]"
        field = "" if self.field is None else f":{self.field}"
        return None if valid_split is None else f"hf:{name}{''.join(parts)}{field}"


def parse_dataset_name(text: str | Path, *, split: str | None = "train") -> NamedDataset | None:
    """Return the data set that the word of a command names; None: it names a file or a folder.

    Args:
        text: the word.
        split: that is meant where the word names none; None: it must name one, or a file.

    Raises:
        InputError: it begins as the name of a data set, and is none, or names no split.
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
        raise InputError(f"{word} names no split of the data set; put one in brackets behind it, such as [test]")
    return NamedDataset({"dataset": keys.pop("dataset"), "split": usual or "", **keys}, field)


def pair_table(source: Path, target: Path, *, split: str | None = "train") -> dict[str, Any]:
    """Return the [data] table of two files, or of two fields of a data set.

    Args:
        source, target: the words of a command.
        split: as for `named_dataset`.

    Raises:
        InputError: one of both is a data set, or they are two, or a field is missing.
    """
    first, second = (parse_dataset_name(text, split=split) for text in (source, target))
    if first is None and second is None:
        return {"source": str(source), "target": str(target)}
    if first is None or second is None or first.table != second.table or None in (first.field, second.field):
        raise InputError(
            f"{source} and {target} are not the two sides of one data set; name it twice, each time with :FIELD behind"
        )
    return {**first.table, "source_field": first.field, "target_field": second.field}


def text_table(text: Path, field: str | None, *, split: str | None = "train") -> dict[str, Any]:
    """Return the [data] table of running text: a file, a folder or a data set, and a field of it.

    Args:
        text: the word of a command.
        field: of the texts, where the word names none; None: the usual one.
        split: as for `named_dataset`.
    """
    named = parse_dataset_name(text, split=split)
    keys = {"text": str(text)} if named is None else dict(named.table)
    if named is None and field is not None and has_ending(text, *TABLE_FORMATS):
        keys = {"dataset": str(text), "split": "train"}
    chosen = field if named is None or named.field is None else named.field
    return keys if chosen is None else {**keys, "field": chosen}
