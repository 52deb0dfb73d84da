"""Temporary names of files and folders that are being written, and what killed processes left under them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import time
import zlib
from pathlib import Path
from typing import Final

# The number of the process, and a digest of the name of its machine: a folder may be shared.
TEMPORARY: Final = re.compile(r"\..+\.writing-([0-9]+)(?:-([0-9a-f]{8}))?(?:\.removing)?", re.DOTALL)
_STALE_SECONDS: Final = 24 * 3600


def temporary_path(path: Path) -> Path:
    """Return the temporary name of a file or folder that is written; leftovers in its folder are removed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if _is_leftover(path.parent / name):
                remove(path.parent / name)
    return path.with_name(f".{path.name}.writing-{os.getpid()}-{_machine()}")


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds, as far as the system lets it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_leftover(path: Path) -> bool:
    """Return whether the process that wrote a temporary file or folder is gone; elsewhere a day says so."""
    written = TEMPORARY.fullmatch(path.name)
    if written is None:
        return False
    if written[2] in (None, _machine()) and not is_running(int(written[1])):
        return True
    try:
        return time.time() - path.lstat().st_mtime > _STALE_SECONDS
    except OSError:
        return False


def is_running(process: int) -> bool:
    """Return whether a process of this number runs; one that has ended and was not waited for does not."""
    import psutil

    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def _machine() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"
