"""Format numbers in files that later versions of clearhead read."""

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
    """A kind of files with a format number in their header.

    Args:
        what: the name of the files, with its article, such as "a run".
        number: the format number that this version writes; it rises with every change of the content or its meaning.
        mend: the advice for a file in a format that this version does not read.
        oldest: the oldest format number that this version reads. None means `number`.
    """

    what: str
    number: int
    mend: str
    oldest: int | None = None

    def header(self) -> dict[str, Any]:
        """Return the header of a file: the format number, and the version of clearhead that writes it."""
        return {"format": self.number, "clearhead": __version__}

    def check(self, header: Mapping[str, Any], source: object) -> None:
        """Refuse a format that this version does not read.

        Args:
            header: the header of the file.
            source: the file or folder, for messages.

        Raises:
            InputError: the number is missing, is from a later version, or is too old.
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
        """Return the JSON text of the file that states the format of a folder."""
        return json.dumps(self.header()) + "\n"

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder by its format file.

        Raises:
            InputError: see `check`.
        """
        file = folder / FORMAT_FILE
        self.check(read_json_object(file, what="a format number") if file.exists() else {}, folder)
