"""Formats: the number in all files that later versions read, and the refusal of other numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.base.errors import InputError
from clearhead.base.files import read_json_object
from clearhead.version import __version__

FORMAT_FILE = "format.json"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,30}")


@dataclass(frozen=True)
class FileFormat:
    """A kind of files that later versions read; they carry `header`.

    Args:
        what: name of the files, with its article.
        number: number of the format that this version writes. It rises with every change of the content or its meaning.
        mend: what the user does with files that are not read.
        oldest: number of the oldest format that is read; None means `number`.
    """

    what: str
    number: int
    mend: str
    oldest: int | None = None

    def header(self) -> dict[str, Any]:
        """Return the number, and the version that writes it: a later one may write another."""
        return {"format": self.number, "clearhead": __version__}

    def check(self, header: Mapping[str, Any], source: object) -> None:
        """Refuse a format that this version does not read.

        Args:
            header: header that was written with the content.
            source: file or folder of the content, for messages.

        Raises:
            InputError: there is no number, it is from a later version, or from an earlier one that is no longer read.
        """
        number, version = header.get("format"), str(header.get("clearhead"))
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{source} has no format number, as {self.what} of clearhead has; {self.mend}")
        if number > self.number:
            needed = f"clearhead {version}" if _VERSION.fullmatch(version) else "a newer clearhead"
            raise InputError(
                f"{source} is {self.what} in format {number}, and clearhead {__version__} reads up to {self.number}: "
                f"install {needed}"
            )
        if number < (self.number if self.oldest is None else self.oldest):
            raise InputError(f"{source} is {self.what} in format {number}, which is no longer read; {self.mend}")

    def to_json(self) -> str:
        """Return the content of the format file of a folder."""
        return json.dumps(self.header()) + "\n"

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder by its format file.

        Raises:
            InputError: as for `check`.
        """
        file = folder / FORMAT_FILE
        self.check(read_json_object(file, what="a format number") if file.exists() else {}, folder)
