"""Files mapped into memory: refuse a file that changes on disk while it is in use, and end the process after SIGBUS.

The pages of a mapped file are read when they are first used. A file that another program overwrites in place would give
a mixture of old and new bytes. Beyond the end of a file that became shorter, the system sends SIGBUS, which ends a
process without a message. A file that is removed or replaced by another file keeps its bytes until its mapping ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

from clearhead.base.errors import InputError
from clearhead.base.temporary_files import remove_unfinished

_FILES: Final = "mapped_files"
"""Name of the attribute of a module that holds its mapped files; replicas of the module share it."""


@dataclass(frozen=True, eq=False)
class MappedFile:
    """A file, and the state in which it was mapped.

    Args:
        path: the path of the file.
        identity: the device and the inode of the file.
        version: the size in bytes and the time of the last change in nanoseconds.
    """

    path: Path
    identity: tuple[int, int]
    version: tuple[int, int]

    @classmethod
    def observe(cls, path: Path) -> MappedFile:
        """Return a file with its present state."""
        file = cls(path, *_state(path.stat()))
        _OBSERVED.add(file)
        return file

    @property
    def is_altered(self) -> bool:
        """True if the file was changed in place; False if it is the same, was removed, or another file replaces it."""
        try:
            identity, version = _state(self.path.stat())
        except OSError:
            return False
        return identity == self.identity and version != self.version

    def open(self) -> BufferedReader:
        """Open the file again.

        Raises:
            InputError: the file is gone, was changed, or was replaced by another one.
        """
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}; load the model again") from None
        if _state(os.fstat(file.fileno())) != (self.identity, self.version):
            file.close()
            raise _error(self.path)
        return file


_OBSERVED: Final = weakref.WeakSet[MappedFile]()
_ENDING: Final = threading.Lock()


def set_mapped_files(module: object, files: Iterable[MappedFile]) -> None:
    """Record the mapped files that hold weights of a module."""
    vars(module)[_FILES] = tuple(files)


def refuse_altered_files(files: Iterable[MappedFile]) -> None:
    """Refuse files that were changed in place after they had been mapped.

    Raises:
        InputError: a file was changed.
    """
    for file in files:
        if file.is_altered:
            raise _error(file.path)


def refuse_altered_weights(module: object) -> None:
    """Refuse a module, or a replica of it, if a mapped file with its weights was changed in place.

    Raises:
        InputError: a file was changed.
    """
    refuse_altered_files(vars(module).get(_FILES, ()))


@contextlib.contextmanager
def ending_at_bus_errors() -> Iterator[None]:
    """End the process with a message and exit code 2 when a mapped file became too short; without effect on Windows.

    The reading thread cannot continue, so no exception is possible.
    """
    number = getattr(signal, "SIGBUS", None)
    if number is None:
        yield
        return
    handler_type = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = handler_type(_end)
    # Python's own handlers run later, between two instructions of Python.
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = set_handler(number, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(number, before)


def _end(number: int) -> None:
    # Several threads may read the file: the first one ends the process, and the others wait here.
    _ENDING.acquire()
    altered = next((file.path for file in list(_OBSERVED) if file.is_altered), None)
    if altered is None:
        message = "a mapped file cannot be read: it became shorter, or its disk failed; check the disk and start again"
    else:
        message = str(_error(altered))
    remove_unfinished()
    os.write(2, f"clearhead: {message}\n".encode(errors="replace"))
    os._exit(2)


def _state(status: os.stat_result) -> tuple[tuple[int, int], tuple[int, int]]:
    return (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)


def _error(path: Path) -> InputError:
    return InputError(
        f"{path} was changed on disk while its weights were in use: wait until it is complete, and load it again"
    )
