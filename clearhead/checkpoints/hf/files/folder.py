"""The folder of a checkpoint: which of its files may be read. Nothing here needs torch, which takes seconds to load."""

from __future__ import annotations

import os
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.base.files import refuse_link_out

CONFIG = "config.json"
READ = (".json", ".txt", ".model", ".spm", ".jinja", ".safetensors")


def inside(directory: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        InputError: the name leads out of the folder, by itself or through a link.
    """
    if not name or "/" in name or "\\" in name or name in (".", "..") or "\0" in name or len(name.encode()) > 255:
        raise InputError(f"{directory}: '{name}' is not the name of a file in this folder")
    path = directory / name
    refuse_link_out(path, directory)
    return path


def check_links(directory: Path) -> None:
    """Refuse a folder with links out of it among the files that could be read.

    Raises:
        InputError: there is such a link.
    """
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and path.suffix in READ:
            inside(directory, path.name)


def is_checkpoint(directory: Path) -> bool:
    """Whether a folder looks like a Hugging Face checkpoint: it has a config.json."""
    return os.path.lexists(directory / CONFIG)
