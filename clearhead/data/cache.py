"""Cache of prepared data: folders named by a hash of their inputs, and written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.files import cache_root, sync
from clearhead.base.formats import FileFormat

EntryT = TypeVar("EntryT")

# The number also rises with every change in the way an entry is made: older entries are then no longer found.
FORMAT = FileFormat("a store of prepared data", 5, "prepare the data again")
_STALE_SECONDS = 24 * 3600


def load_or_make(
    kind: str, inputs: Sequence[object], load: Callable[[Path], EntryT], make: Callable[[Path], None]
) -> EntryT:
    """Load a cached result, such as tokenized data; make it and cache it if it is missing or damaged.

    Args:
        kind: the kind of entry, which names a folder of the cache.
        inputs: JSON values that determine the entry.
        load: a function that loads an entry from its folder; an InputError means that the entry is damaged.
        make: a function that writes a new entry into an empty folder.

    Raises:
        RunFailure: the cache cannot be written.
    """
    folder = cache_root() / kind / hashlib.sha256(json.dumps([FORMAT.number, *inputs]).encode()).hexdigest()
    if folder.is_dir():
        try:
            return load(folder)
        except InputError:
            _discard(folder)
    with _atomic_folder(folder) as temporary:
        make(temporary)
    return load(folder)


@contextlib.contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `folder` if the with block ends without an error.

    If two processes make the same folder, the first to finish wins, and the other result is discarded.

    Raises:
        RunFailure: the folder cannot be written.
    """
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    is_first = not folder.parent.exists()
    try:
        # Compiled kernels are loaded from this cache, so no other user may write to it.
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.mkdir(parents=True)
        _remove_stale(folder.parent)
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        # Renaming onto a folder that is not empty fails: another process has made the same entry.
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except InputError:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_first:
            with contextlib.suppress(OSError):  # another process already uses it
                folder.parent.rmdir()
        raise
    except OSError as error:
        raise RunFailure(
            f"{folder.parent}: prepared data cannot be written ({error.strerror or error}); "
            "free some space, or set CLEARHEAD_CACHE to another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Remove a damaged folder; it is renamed first, so that other processes never read half of it."""
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove old temporary folders that killed processes left."""
    for left in parent.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
