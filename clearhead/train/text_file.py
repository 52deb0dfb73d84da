"""Small text files that a person named: a run file, a spec."""

from __future__ import annotations

from pathlib import Path

from clearhead.errors import InputError


def read_text_file(path: Path, what: str) -> str:
    """Read a small UTF-8 file that a person named.

    Args:
        path: the file.
        what: what it is called in a message.

    Raises:
        InputError: if it is missing, a folder, not readable or not UTF-8 (with the line).
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such {what}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected a {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    return decoded(data, str(path))


def decoded(data: bytes, name: str) -> str:
    """Return bytes as text.

    Args:
        data: the bytes.
        name: of where they come from, for a message.

    Raises:
        InputError: they are not UTF-8 (with the line).
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{name}:{line}: not valid UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None
