"""Why a request is not answered."""

from __future__ import annotations

import logging
from typing import Final

from clearhead.base.errors import InputError, RunFailure

OUT_OF_MEMORY: Final = ("not enough memory", "can't allocate memory", "out of memory")
_LOGGER: Final = logging.getLogger("clearhead.apps.serve")


class Busy(Exception):
    """Too many requests wait; the message says how many."""


class Closing(Exception):
    """The server ends and takes nothing new."""


def named_failure(error: Exception) -> Exception:
    """Return an error for a client: all but wrong input is a failure while running; the log has what happened."""
    text = f"{error}"
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in OUT_OF_MEMORY):
        return RunFailure("there is not enough memory for this request: send a shorter one, or fewer at once")
    if isinstance(error, InputError | RunFailure):
        return error
    _LOGGER.error("a request failed", exc_info=error)
    return RunFailure(f"unexpected failure: {type(error).__name__}")
