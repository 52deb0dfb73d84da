"""Small JSON files written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from clearhead.errors import InputError


def write_json(path: Path, content: object) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part of it.

    Args:
        path: the file to write; its folder must exist.
        content: anything that the json module can write.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            json.dump(content, file, ensure_ascii=False, separators=(",", ":"))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json_object(path: Path, *, what: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: the file to read.
        what: what the file is meant to be, for the error sentence.

    Raises:
        InputError: the file is missing, unreadable, not UTF-8, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{path}: expected {what}, but there is no such file") from None
    except OSError as error:
        raise InputError(f"{path}: expected {what}, but it cannot be read ({error.strerror})") from None
    except RecursionError:
        raise InputError(f"{path}: expected {what}, but its values lie in one another too deep to be read") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected {what} in UTF-8 JSON, but it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected {what} in JSON, but {error.msg.lower()}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected {what} as one JSON object, received a {type(content).__name__}")
    return content
