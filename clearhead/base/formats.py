"""Formats: the number in everything that later versions read, and what a reader does with another number."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clearhead.base.errors import InputError
from clearhead.base.files import read_json_object
from clearhead.version import __version__

FORMAT_FILE = "format.json"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,30}")

T = TypeVar("T")


@dataclass(frozen=True)
class Format:
    """A kind of files that later versions read; they carry `header`.

    Args:
        what: their name, with its article.
        number: of what this version writes; it rises with every change of what is written or of what that means.
        mend: what to do where they are not read.
        migrations: by the number that they read: functions that return the content as the next number has it.
    """

    what: str
    number: int
    mend: str
    migrations: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)

    def header(self) -> dict[str, Any]:
        """Return the number, and the version that writes it: a later one may write another."""
        return {"format": self.number, "clearhead": __version__}

    def current(self, content: T, header: Mapping[str, Any], place: object) -> T:
        """Return content as this version writes it.

        Args:
            content: as it was written.
            header: that of the writer.
            place: where both are, for messages.

        Raises:
            InputError: there is no number, it is from a later version, or from an earlier one that is no longer read.
        """
        number, version = header.get("format"), str(header.get("clearhead"))
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{place} has no format number, as {self.what} of clearhead has; {self.mend}")
        if number > self.number:
            needed = f"clearhead {version}" if _VERSION.fullmatch(version) else "a newer clearhead"
            raise InputError(
                f"{place} is {self.what} in format {number}, and clearhead {__version__} reads up to {self.number}: "
                f"install {needed}"
            )
        for older in range(number, self.number):
            if older not in self.migrations:
                raise InputError(f"{place} is {self.what} in format {number}, which is no longer read; {self.mend}")
            content = self.migrations[older](content)
        return content

    def to_json(self) -> str:
        """Return the content of the format file of a folder."""
        return json.dumps(self.header()) + "\n"

    def check_folder(self, folder: Path) -> None:
        """Migrate a folder by its format file, or refuse it.

        Raises:
            InputError: as for `current`.
        """
        file = folder / FORMAT_FILE
        header = read_json_object(file, what="a format number") if file.exists() else {}
        self.current(folder, header, folder)
