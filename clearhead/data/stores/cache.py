"""Prepared data kept between runs: tokenizers and tokenised pairs, found again by what they were made from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from clearhead.data.sources.records import identity_key

Progress = Callable[[int, int], None]

# Raised whenever what is written, or how it is made, changes: older entries are then no longer found.
_FORMAT = 1


def cache_root() -> Path:
    """Return the folder of prepared data: the environment variable CLEARHEAD_CACHE, or a folder in the user's cache."""
    named = os.environ.get("CLEARHEAD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "clearhead"


def cache_folder(what: str, *inputs: object) -> Path:
    """Return where the cache keeps what is made from some inputs.

    Args:
        what: the kind of thing.
        inputs: JSON values, all that it depends on.
    """
    return cache_root() / what / identity_key(_FORMAT, *inputs)
