"""Small files: written atomically, and read with every fault named."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clearhead.errors import InputError

LARGEST_JSON = 2**28


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write, and put the file in the place of `path` once it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: object, *, is_indented: bool = False) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part of it.

    Args:
        path: the file to write; its folder must exist.
        content: anything that the json module can write.
        is_indented: for people: a value per line, with sorted keys.
    """
    if is_indented:
        text = json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
    else:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def neighbours(path: Path) -> list[str]:
    """Return the names in the folder of a path, for the hint where the path itself is not there."""
    try:
        return [one.name for one in path.parent.iterdir()]
    except OSError:
        return []


def read_json_object(path: Path, *, what: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: the file to read.
        what: the expected content, for messages.

    Raises:
        InputError: the file is missing, unreadable, too large, not UTF-8, not JSON, or not an object.
    """
    content = read_json(path, what=what)
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected {what} as one JSON object, received a {type(content).__name__}")
    return content


def read_json(path: Path, *, what: str) -> Any:
    """Read a JSON file.

    Args:
        path: the file to read.
        what: what the file is meant to be, for the error sentence.

    Raises:
        InputError: the file is missing, unreadable, too large, not UTF-8, or not JSON.
    """
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise InputError(f"{path}: expected {what}, but {path.stat().st_size} bytes are too many for one")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{path}: expected {what}, but there is no such file") from None
    except OSError as error:
        raise InputError(f"{path}: expected {what}, but it cannot be read ({error.strerror})") from None
    except RecursionError:
        raise InputError(f"{path}: expected {what}, but its values are nested too deeply") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected {what} in UTF-8 JSON, but it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected {what} in JSON, but {error.msg.lower()}") from None


def read_text_file(path: Path, what: str) -> str:
    """Read a small UTF-8 file that the user named.

    Args:
        path: the file.
        what: the kind of file, for messages.

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
        name: of their source, for messages.

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
