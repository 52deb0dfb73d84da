"""Data sets that a command names in one word: hf:OWNER/NAME and what of it is read, or FILE.parquet[:FIELD]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clearhead.data.sources.tables import Dataset
from clearhead.errors import InputError

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
        if split != "train" or name.endswith(".parquet"):
            return None
        names = Dataset(name, split, {}, config, revision=revision).splits()
        found = next((valid for valid in _VALID if valid in names), None)
        parts = f"/{config}" * (config is not None), f"@{revision}" * (revision is not None), f"[{found}]"
        field = "" if self.field is None else f":{self.field}"
        return None if found is None else f"hf:{name}{''.join(parts)}{field}"


def named_dataset(text: str | Path | None) -> NamedDataset | None:
    """Return the data set that the word of a command names; None: it names a file or a folder.

    Raises:
        InputError: it begins as the name of a data set, and is none.
    """
    word = str(text)
    match = _HUB.fullmatch(word) or (None if word.startswith("hf:") else _PARQUET.fullmatch(word))
    if match is None:
        if word.startswith("hf:"):
            raise InputError(f"{word} names no data set of the Hugging Face hub; expected {_FORM}")
        return None
    given = {key: value for key, value in match.groupdict().items() if value is not None}
    field = given.pop("field", None)
    return NamedDataset({"dataset": given.pop("dataset"), "split": "train", **given}, field)
