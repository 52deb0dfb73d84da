"""The cache of compiled kernels: only what the user wrote and nobody damaged is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from filelock import FileLock

from clearhead.base.files import cache_root

NAME: Final = "native"
LOCK: Final = "lock"
LARGEST: Final = 2**28
_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_EVERYTHING: Final = stat.S_IRWXG | stat.S_IRWXO


def kernel_folder() -> Path:
    """Return the folder of compiled kernels, made where it is missing, and closed to other users.

    Raises:
        OSError: it or the root of the cache belongs to another user, or others can write there; or it cannot be made.
    """
    root = cache_root()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    (root / NAME).mkdir(mode=0o700, exist_ok=True)
    root, folder = root.resolve(), (root / NAME).resolve()
    if not os.environ.get("CLEARHEAD_CACHE"):
        # Nobody shares it on purpose: a umask of 002 opened it.
        _close(root, _WRITE)
    if _close(folder, _EVERYTHING) & _WRITE:
        # Of another user, it could be held forever.
        (folder / LOCK).unlink(missing_ok=True)
    for one in (root, folder):
        if (fault := _open_to_others(one.stat())) is not None:
            raise OSError(f"{one} {fault}: mend that, or set CLEARHEAD_CACHE to a new folder")
    return folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time compile: those that start together, as of a training, wait for the first."""
    with FileLock(folder / LOCK):
        yield


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to work in, without those of killed processes; the cache must be locked."""
    for left in folder.glob("tmp*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def keep(linked: Path, file: Path) -> None:
    """Move a library into the cache, with its size and digest beside it; others see a whole file or none.

    Args:
        linked: the library, in a folder of the cache.
        file: its place.
    """
    record = _record_of(linked)
    record.write_text(_described(file, linked.read_bytes()), encoding="ascii")
    for path in (record, linked):
        path.chmod(0o700)  # whatever the umask is
    os.replace(record, _record_of(file))
    os.replace(linked, file)


def fault_of(file: Path) -> str | None:
    """Return why a library in the folder of kernels must not be loaded; None: it may be."""
    if not os.path.lexists(_record_of(file)):
        return "has no digest"
    try:
        is_whole = read_own(_record_of(file)) == _described(file, read_own(file)).encode("ascii")
    except OSError as error:
        return f"is not to be trusted ({error.strerror or error})"
    return None if is_whole else "is damaged"


def _close(folder: Path, modes: int) -> int:
    """Take permissions away from others where the user can; return those that others had."""
    status = folder.stat()
    open_modes = status.st_mode & modes
    if os.name == "posix" and open_modes and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a disk that cannot be written
            folder.chmod(stat.S_IMODE(status.st_mode) & ~modes)
    return open_modes


def _open_to_others(status: os.stat_result) -> str | None:
    """Return what lets others change a file or a folder, or None; root can change everything anyway."""
    if os.name != "posix":
        return None
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    return "can be written by others" if status.st_mode & _WRITE else None


def _record_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _described(file: Path, content: bytes) -> str:
    # With the name, which is the key: a library of other kernels does not pass for it.
    return f"{hashlib.sha256(content).hexdigest()} {len(content)} {file.name}\n"


def write_own(path: Path, content: bytes) -> None:
    """Write a file into the folder of kernels, which others see whole or not at all; the cache must be locked."""
    with workplace(path.parent) as folder:
        (folder / path.name).write_bytes(content)
        (folder / path.name).chmod(0o700)
        os.replace(folder / path.name, path)


def read_own(path: Path) -> bytes:
    """Return the content of a file that nobody else can have written.

    Raises:
        OSError: it is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise OSError("it is no library")
        if (fault := _open_to_others(status)) is not None:
            raise OSError(f"it {fault}")
        return opened.read()
