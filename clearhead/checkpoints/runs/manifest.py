"""Manifests: the size and the SHA-256 of every file of a folder, written last and checked whenever it is read.

A manifest tells damage and careless edits. It is no signature: who can change a file can change the manifest as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

from pydantic import BaseModel, Field, StringConstraints

from clearhead.base.errors import InputError
from clearhead.base.files import open_model_file, read_typed, sync

MANIFEST: Final = "manifest.json"


class _FileEntry(BaseModel):
    size: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class _Manifest(BaseModel):
    name: str
    files: dict[str, _FileEntry]


def seal(folder: Path, name: str, files: Iterable[Path]) -> None:
    """Write the manifest of files to the folder that they are in, and flush all to the disk.

    Args:
        folder: where.
        name: of the folder once it is complete.
        files: inside it.
    """
    entries = {}
    for path in sorted(files):
        entries[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        sync(path)
    (folder / MANIFEST).write_text(json.dumps({"name": name, "files": entries}, indent=2), encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)


def manifest_damage(
    folder: Path,
    *,
    needed: Collection[str] = (),
    read: Collection[str] | None = None,
    name: str | None = None,
    present: Iterable[Path] = (),
) -> str | None:
    """Return a sentence about the first difference between a folder and its manifest; None: there is none.

    Args:
        folder: with a manifest.
        needed: files that the manifest must list.
        read: the files whose content is compared; None: all. The sizes of all are compared.
        name: that the manifest must have; None: the folder may have been renamed.
        present: files that are read where they are there, so that the manifest must list them.
    """
    if not (folder / MANIFEST).exists():
        return f"{folder} is damaged: it has no {MANIFEST}."
    try:
        manifest = read_typed(folder / MANIFEST, _Manifest, what="a manifest")
    except InputError as error:
        return f"{folder} is damaged: its {MANIFEST} cannot be read ({error})."
    if name is not None and manifest.name != name:
        return f"{folder} is damaged: its {MANIFEST} belongs to {manifest.name}."
    unlisted = {*needed, *(path.relative_to(folder).as_posix() for path in present)} - manifest.files.keys()
    if unlisted:
        return f"{folder} is damaged: its {MANIFEST} does not list {min(unlisted)}."
    for file, entry in manifest.files.items():
        fault = _find_difference(folder, file, entry, is_read=read is None or file in read)
        if fault is not None:
            return f"{folder} is damaged: {fault}"
    return None


def _find_difference(folder: Path, file: str, entry: _FileEntry, *, is_read: bool) -> str | None:
    relative = PurePosixPath(file)
    if relative.is_absolute() or ".." in relative.parts or "\0" in file:
        return f"its {MANIFEST} lists '{file}', which is outside."
    path = folder / file
    try:
        if not path.is_file():
            return f"{file} is missing."
        size = path.stat().st_size
        if size != entry.size:
            verb = "cut off" if size < entry.size else "too long"
            return f"{file} is {verb} ({size} bytes where {entry.size} were written)."
        if is_read and sha256_of(path) != entry.sha256:
            return f"{file} was altered after it was written."
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})."
    except InputError as error:
        return str(error)
    return None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_model_file(path, what="a file of the manifest") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
