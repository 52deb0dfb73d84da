"""Errors that refuse a request, and the JSON body of the answer to a refused request."""

from __future__ import annotations

import logging
from typing import Final

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from clearhead.base.errors import InputError, RunFailure, is_out_of_memory

_LOGGER: Final = logging.getLogger("clearhead.apps.serve")


class Busy(Exception):
    """Error: too many requests wait; the message says how many."""


class Closing(Exception):
    """Error: the server is shutting down and accepts no new requests."""


def to_client_error(error: Exception) -> Exception:
    """Return the error for the client; an unexpected error becomes a `RunFailure`, and the log has its details."""
    if is_out_of_memory(error):
        return RunFailure("not enough memory for this request: send a shorter one, or fewer at once")
    if isinstance(error, InputError | RunFailure):
        return error
    _LOGGER.error("a request failed", exc_info=error)
    return RunFailure(f"unexpected failure: {type(error).__name__}")


LONGEST_MESSAGE: Final = 1000
_KINDS: Final = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit"}


class Refusal(BaseModel):
    """JSON body of the answer to a refused request: an error with its message, type, parameter and code."""

    error: dict[str, str | None]


def make_refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Return the response to a refused request, in the form of OpenAI's protocol.

    Args:
        status: the HTTP status.
        message: one sentence.
        param: the field that the message is about. None means no field.
        code: a code for programs, such as "context_length_exceeded". None means no code.
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # A message may quote the client: a key of a megabyte, or half a character, which UTF-8 cannot encode.
    message, param = _writable(message), None if param is None else _writable(param)
    content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status == 503:
        headers["Connection"] = "close"
    return JSONResponse(content, status, headers)


def _writable(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."
