"""Temporary names for files and folders while they are written, and removal of leftovers from killed processes."""

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

# Process number, and a checksum of the machine's name, since machines may share a folder.
TEMPORARY: Final = re.compile(r"\..+\.writing-([0-9]+)(?:-([0-9a-f]{8}))?(?:\.removing)?", re.DOTALL)
_STALE_SECONDS: Final = 24 * 3600
_UNFINISHED: Final = set[Path]()


def temporary_path(path: Path) -> Path:
    """Return a temporary name for a file or folder to write, and remove leftovers in its folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if _is_leftover(path.parent / name):
                remove(path.parent / name)
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}-{_machine()}")
    # Finished files have other names by now.
    _UNFINISHED.intersection_update([other for other in _UNFINISHED if os.path.lexists(other)])
    _UNFINISHED.add(temporary)
    return temporary


def remove_unfinished() -> None:
    """Remove the temporary files and folders of this process, before it ends at once."""
    for path in list(_UNFINISHED):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, and ignore what the system refuses to remove."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_leftover(path: Path) -> bool:
    """Return whether the writer of a temporary file is gone; on another machine, it is gone after a day."""
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
    """Return whether a process of this number runs; a zombie does not count."""
    import psutil

    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def _machine() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"
