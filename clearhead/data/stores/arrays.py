"""Named arrays in a folder: written atomically, and memory-mapped when they are read."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from clearhead.errors import RunFailure
from clearhead.files import sync

Ids = Integer[ndarray, " tokens"]
Rows = Int64[ndarray, " pairs"]
Indices = Int64[ndarray, " _"]


_RECORD = "store.json"


_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Ragged:
    """The ids of one side, one text behind the other.

    Args:
        ids: all ids, without special ones.
        offsets: where each text starts, and behind the last one where it ends.
    """

    ids: Ids
    offsets: Int64[ndarray, " boundaries"]

    @property
    def lengths(self) -> Rows:
        """The number of ids of each text."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int | np.int64) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


def pack(texts: Sequence[Sequence[int]], *, vocab_size: int) -> Ragged:
    """Put lists of ids behind each other, in the narrowest type that holds the vocabulary.

    Args:
        texts: the ids of each text.
        vocab_size: one more than the largest id.
    """
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)), out=offsets[1:])
    narrow = np.uint16 if vocab_size <= 1 << 16 else np.int32
    ids = np.fromiter(itertools.chain.from_iterable(texts), dtype=narrow, count=int(offsets[-1]))
    return Ragged(ids, offsets)


def select(side: Ragged, keep: Bool[ndarray, " pairs"]) -> Ragged:
    """Keep some texts of a side."""
    lengths = side.lengths
    return Ragged(side.ids[np.repeat(keep, lengths)], np.concatenate([[0], np.cumsum(lengths[keep])]))


def join(parts: Sequence[Ragged]) -> Ragged:
    """Put sides behind each other; at least one."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.ids for part in parts]), np.concatenate([[0], np.cumsum(lengths)]))


def write_arrays(folder: Path, arrays: Mapping[str, ndarray], record: Mapping[str, Any]) -> None:
    """Write arrays and a record, together with a hash of the arrays, so that others see all of it or nothing.

    Args:
        folder: where they go; what another process put there meanwhile stays.
        arrays: by name, in the order in which they are hashed.
        record: JSON values; its key "identity" becomes the hash.

    Raises:
        RunFailure: the folder cannot be written.
    """
    with atomic_folder(folder) as temporary:
        identity = hashlib.sha256()
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array, allow_pickle=False)
            identity.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
        (temporary / _RECORD).write_text(json.dumps({**record, "identity": identity.hexdigest()}), encoding="utf-8")


def read_arrays(folder: Path, names: Sequence[str]) -> tuple[dict[str, ndarray], dict[str, Any]]:
    """Map the arrays that `write_arrays` wrote into memory, and read their record.

    Raises:
        OSError, ValueError: a file is missing or damaged.
    """
    record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(ndarray) for name in names}
    return arrays, record


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill, and put it in the place of `folder` when it is whole.

    Two processes may do this for one folder at once: the first to finish wins, and the other's work is thrown away.

    Raises:
        RunFailure: the folder cannot be written, for want of space or of permission.
    """
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        # A rename onto a folder that is not empty fails, which is how the loser of a race learns of it.
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise RunFailure(
            f"{folder.parent}: prepared data cannot be written ({error.strerror or error}); "
            "free some space, or set CLEARHEAD_CACHE to another folder"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard_folder(folder: Path) -> None:
    """Remove a damaged folder; a reader in another process never sees half of it."""
    aside = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Clear what killed processes left behind."""
    for left in parent.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
