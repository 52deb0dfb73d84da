"""The source files of Python's standard library on this machine: real code for training, without a download.

Every Python brings them, in slightly different versions. What is tests, tables or texts in the shape of a module is
left out, so that what remains reads as people write programs.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clearhead.base.errors import InputError

# Packages that users installed, tests, character tables, help texts, and what building Python left behind.
LEFT_OUT = frozenset(
    {
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"),
        *("__pycache__", "__phello__", "lib-dynload"),
    }
)
_BUILT = ("_sysconfigdata", "config-")
_HASHED = 2**32


class SourceFile(NamedTuple):
    """One source file: its name relative to the library's folder, with forward slashes, and its text."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """The size of the text as UTF-8."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class LibrarySources:
    """Source files split into two parts, each sorted by name.

    Args:
        train: files to learn from.
        valid: files held out.
        folder: where they were found.
    """

    train: list[SourceFile]
    valid: list[SourceFile]
    folder: Path


def library_sources(
    *, max_bytes: int, max_valid_bytes: int, valid_share: float = 0.05, folder: Path | None = None
) -> LibrarySources:
    """Read the standard library's source files and split them by file.

    The hash of a file's name decides its part and its turn: a file never changes its part because others came or went,
    and where not all fit, those that are taken are spread over the whole library.

    Args:
        max_bytes: the largest total size of the files to learn from, as UTF-8.
        max_valid_bytes: the largest total size of the files held out.
        valid_share: the share of all files to hold out, between 0 and 1.
        folder: where to look; None: where this Python keeps its library.

    Raises:
        InputError: there are not enough source files for both parts.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    turns = sorted((_hashed(name), name) for name in _names(folder))
    valid = _take(folder, [name for turn, name in turns if turn < valid_share * _HASHED], max_valid_bytes)
    train = _take(folder, [name for turn, name in turns if turn >= valid_share * _HASHED], max_bytes)
    if not train or not valid:
        raise InputError(
            f"expected the source files (*.py) of Python's standard library in {folder}, found {len(turns)}, which is "
            "too few to learn from: use a Python that was installed with its library's sources"
        )
    return LibrarySources(train, valid, folder)


def write_sources(files: list[SourceFile], folder: Path) -> None:
    """Write files below a new folder, under their own names, each with one line feed at a line's end."""
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8", newline="\n")


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of the source files below a folder; links to other folders are not followed."""
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(_BUILT)]
        for name in files:
            if name.endswith(".py") and not name.startswith(_BUILT):
                yield (Path(here) / name).relative_to(folder).as_posix()


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big")


def _take(folder: Path, names: list[str], max_bytes: int) -> list[SourceFile]:
    """Read files in turn, each that still fits, and return them by name."""
    taken: list[SourceFile] = []
    left = max_bytes
    for name in names:
        text = _read(folder / name)
        if text is None:
            continue
        file = SourceFile(name, text)
        if (size := file.num_bytes) <= left:
            taken.append(file)
            left -= size
    return sorted(taken)


def _read(path: Path) -> str | None:
    """Return a file's text, or None where it is empty or cannot be read as UTF-8 text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() and "\0" not in text else None
