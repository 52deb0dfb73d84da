"""Write small files atomically, and read small files with checks that name every fault."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, TypeVar

from clearhead.base.errors import MOST_FAULTS, InputError, Message, MessageReference, argument, nearest_name, shorten
from clearhead.base.temporary_files import temporary_path

# Maximum bytes of any file that is read whole, of a vocabulary, and of any other JSON file.
LARGEST_FILE, LARGEST_VOCABULARY, LARGEST_JSON = 2**28, 2**26, 2**24
# Honest files have numbers of up to 31 digits (a length for "none"), and 2.6 million quotes (a vocabulary of 262,144
# entries with its merges).
MOST_CONTAINERS, MOST_QUOTES, DEEPEST, MOST_DIGITS = 2**21, 3 * 2**20, 100, 40
_LONG_NUMBER = re.compile(f"[0-9]{{{MOST_DIGITS + 1}}}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_NAMES: dict[type, str] = {list: "a list", dict: "an object"}
_EXPECTED = {"model_type": "an object", "dict_type": "an object", "list_type": "a list", "too_long": "fewer items"}
RUNS, MODEL = Path("runs"), "a run directory, a saved model or a checkpoint's folder"

T = TypeVar("T")


def cache_root() -> Path:
    """Return the cache folder: the environment variable CLEARHEAD_CACHE, or a folder in the user's cache."""
    named = os.environ.get("CLEARHEAD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "clearhead"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write, then flush the file to the disk and rename it to `path`."""
    temporary = temporary_path(path)
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
    """Write a JSON file atomically: a reader sees the old file or the new one.

    Args:
        path: the file to write; its folder must exist.
        content: any value that the json module can write.
        is_indented: True for one value per line, with sorted keys.
    """
    if is_indented:
        text = json.dumps(content, ensure_ascii=False, indent=2, sort_keys=True) + "\n"
    else:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def refuse_unwritable(path: Path, *, force: bool) -> None:
    """Refuse an output file that cannot be written or already exists, before the work for it begins.

    Args:
        path: the output file.
        force: True if an existing file is replaced.

    Raises:
        InputError: the file exists and `force` is False, it is a folder or a device, or its folder is not writable.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        # Renaming the temporary file would replace the device.
        raise InputError(f"{path} is a device or a pipe, not a file: name a file")
    if path.exists() and not force:
        raise InputError(f"{path} exists already: name another file, or replace it with " + argument("force", True))
    refuse_unwritable_place(path)


def refuse_unwritable_place(path: Path) -> None:
    """Refuse an output path whose folder cannot be created or written.

    Raises:
        InputError: the nearest existing folder is a file, or refuses new files.
    """
    folder = next(parent for parent in Path(os.path.abspath(path)).parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise InputError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: {folder} refuses new files; choose another folder")


def write_output(path: Path, text: str, *, force: bool) -> None:
    """Write a file that the user named, atomically; missing folders are created.

    Args:
        path: the file.
        text: the content.
        force: True if an existing file is replaced.

    Raises:
        InputError: the file exists, or cannot be written.
    """
    refuse_unwritable(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def explain_absent(path: Path, what: str = "file", others: Iterable[str] = ()) -> str:
    """Return a message about a missing path: the deepest existing folder, and a similar name if there is one.

    Args:
        path: the missing path.
        what: the kind of file or folder, such as "run".
        others: further paths and names that the user may have meant.
    """
    whole = Path(os.path.abspath(path))
    folder = next(parent for parent in whole.parents if os.path.exists(parent))
    name = whole.relative_to(folder).parts[0]
    if os.path.lexists(folder / name):
        reason = f"'{folder / name}' is a link that leads nowhere"
    elif not folder.is_dir():
        reason = f"{folder} is a file, not a folder"
    else:
        reason = f"{folder} has no '{name}'{_meant(whole.name, folder / name, others)}"
    return f"there is no such {what}: {reason}"


def refuse_absent(path: Path, what: str = "folder", *, expected: str = "") -> None:
    """Refuse a path that does not exist.

    Args:
        path: the path of a run or a model.
        what: the kind of file or folder, such as "run".
        expected: a longer description, for the end of the message.

    Raises:
        InputError: the path does not exist.
    """
    if not path.exists():
        raise InputError(f"{path}: {explain_absent(path, what, runs_nearby())}{expected and f'; expected {expected}'}")


def _meant(name: str, path: Path, others: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for a similar name in the folder of a path or elsewhere, or an empty string."""
    elsewhere = {Path(other).name: other for other in others}
    siblings = names_in(path.parent)
    # Unrelated files may lie in the same folder, so the names must be closer than usual.
    close = partial(nearest_name, least=0.7)
    meant = elsewhere.get(name) or close(path.name, siblings) or elsewhere.get(close(name, elsewhere) or "")
    return f" (did you mean '{meant}'?)" if meant else ""


def runs_nearby() -> list[str]:
    """Return the paths of all runs in the usual folder `runs`, for hints."""
    return [f"{RUNS}/{name}" for name in names_in(RUNS) if (RUNS / name).is_dir()]


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder; an empty list if it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def read_typed(path: Path, kind: type[T], *, what: str) -> T:
    """Read a JSON file of a model or a run as a pydantic type.

    Args:
        path: the file to read.
        kind: a pydantic model or dataclass; values are not converted.
        what: the expected content, for messages.

    Raises:
        InputError: see `read_json`; or a value has a wrong type or is out of range.
    """
    return convert_json(read_json_object(path, what=what), kind, name=str(path))


def convert_json(content: object, kind: type[T] | GenericAlias | UnionType, *, name: str) -> T:
    """Check parsed JSON against a type and return it as this type; only lists are converted, to tuples.

    Args:
        content: the value that `parse_json` returned.
        kind: a pydantic model or dataclass, or a type made of them.
        name: the name of the file, for messages.

    Raises:
        InputError: values have a wrong type or are out of range; the message names all of them.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        # In JSON mode, pydantic accepts a list for a tuple, but no string for a number.
        adapter: TypeAdapter[T] = TypeAdapter(kind)  # type: ignore[arg-type]  # it rejects list[int] as a type
        return adapter.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        expectations: dict[Message, list[str]] = {}
        for fault in error.errors(include_url=False)[:MOST_FAULTS]:
            address, received = _address(fault["loc"], content)
            shown = _JSON_NAMES.get(type(received)) or shorten(repr(received), 60)
            expected = _EXPECTED.get(fault["type"]) or fault["msg"].removeprefix("Input should be ").lower()
            message = "but it is missing" if fault["type"] == "missing" else f"expected {expected}, got {shown}"
            where = Message(f"{name}: ", MessageReference("field", address), ": " if address else "")
            expectations.setdefault(where, []).append(message)
        # pydantic reports a fault for each type of a union.
        faults = [where + "; or ".join(messages) for where, messages in expectations.items()]
        raise InputError.from_faults(faults, subject=name) from None


def _address(location: Sequence[int | str], content: Any) -> tuple[str, Any]:
    """Return the path of a fault, without pydantic's names of types, and the value at this path."""
    parts: list[str] = []
    for number, key in enumerate(location):
        if key == "[key]":  # the fault is the name itself
            return ".".join(parts[:-1]), parts[-1]
        if isinstance(content, dict) and isinstance(key, str) and (key in content or number == len(location) - 1):
            content = content.get(key)
        elif isinstance(content, list) and isinstance(key, int) and key < len(content):
            content = content[key]
        else:
            continue
        parts.append(str(key))
    return ".".join(parts), content


def read_json_object(path: Path, *, what: str, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a file of a model or a run that holds one JSON object.

    Args:
        path: the file to read.
        what: the expected content, for messages.
        largest: the maximum size of the file, in bytes; a larger file is refused.

    Raises:
        InputError: see `read_json`; or the content is not an object.
    """
    content = read_json(path, what=what, largest=largest)
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected {what} as one JSON object, got a {type(content).__name__}")
    return content


def read_json(path: Path, *, what: str, largest: int = LARGEST_JSON) -> Any:
    """Read a JSON file of a model or a run.

    Args:
        path: the file to read.
        what: the expected content, for messages.
        largest: the maximum size of the file, in bytes; a larger file is refused.

    Raises:
        InputError: see `read_model_file`; or the file is not UTF-8, or `parse_json` refuses it.
    """
    try:
        return parse_json(read_model_file(path, what=what, largest=largest).decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected {what} in UTF-8 JSON, but it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected {what} in JSON, but {error.msg.lower()}") from None


def parse_json(text: str) -> Any:
    """Parse untrusted JSON.

    Raises:
        json.JSONDecodeError: the text is not JSON, a key occurs twice in an object, or a number has too many digits or
            is not finite. Also if a string is not Unicode text, or values are too many or nested too deeply.
    """
    containers = text.count("[") + text.count("{")
    if containers > MOST_CONTAINERS or text.count('"') > MOST_QUOTES:
        raise json.JSONDecodeError("it holds too many lists, objects and strings", text, 0)
    # Check digits only if needed: calling a function for each number of a vocabulary would double the time.
    whole = _whole if _LONG_NUMBER.search(text) is not None else None
    try:
        content = json.loads(
            text, object_pairs_hook=_unique, parse_int=whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise json.JSONDecodeError("its values are nested too deeply", text, 0) from None
    except _Refused as error:
        raise json.JSONDecodeError(str(error), text, 0) from None
    if containers > DEEPEST and _is_deep(content):
        raise json.JSONDecodeError("its values are nested too deeply", text, 0)
    if _SURROGATE.search(text) is not None:
        try:
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise json.JSONDecodeError("it holds a lone surrogate, which is not Unicode text", text, 0) from None
    return content


class _Refused(Exception):
    """Raised for JSON that Python accepts but `parse_json` refuses, such as a repeated key or NaN."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _Refused(f"the key {counts.most_common(1)[0][0]!r} occurs twice")
    return content


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise _Refused("a number has too many digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _Refused(f"{digits[:MOST_DIGITS]} is not a finite number")
    return number


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(DEEPEST):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


@contextlib.contextmanager
def open_model_file(path: Path, *, what: str) -> Iterator[BufferedReader]:
    """Open an untrusted file of a model or a run.

    Args:
        path: the file.
        what: the expected content, for messages.

    Raises:
        InputError: the file is missing or unreadable, a pipe or a device, or a link out of its folder.
    """
    refuse_link_out(path, path.parent)
    try:
        # Opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            # Check the open file, which can no longer be replaced by another one.
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{path}: expected {what}, but it is no regular file")
            yield file
    except FileNotFoundError:
        raise InputError(f"{path}: expected {what}, but {explain_absent(path)}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: expected {what}, but it cannot be read ({_reason(error)})") from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_model_file(path: Path, *, what: str, largest: int = LARGEST_FILE) -> bytes:
    """Read a small file that came with a model or a run.

    Args:
        path: the file.
        what: the expected content, for messages.
        largest: the maximum size of the file, in bytes; a larger file is refused.

    Raises:
        InputError: see `open_model_file`; or the file is too large.
    """
    with open_model_file(path, what=what) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise InputError(f"{path}: expected {what}, got a file of {size} bytes (at most {largest} are read)")
        # The file may grow meanwhile.
        return file.read(largest)


def read_model_text(path: Path, *, what: str, largest: int = LARGEST_JSON) -> str:
    """Read a small UTF-8 file that came with a model or a run.

    Args:
        path: the file.
        what: the expected content, for messages.
        largest: the maximum size of the file, in bytes; a larger file is refused.

    Raises:
        InputError: see `read_model_file`; or the file is not UTF-8 (the message names the line).
    """
    return decode_text(read_model_file(path, what=what, largest=largest), str(path))


def refuse_link_out(path: Path, directory: Path) -> None:
    """Refuse a file that is a link out of its folder.

    Links in the hub's cache to the blobs of the same repository are allowed.

    Raises:
        InputError: the file is a link out of the folder, or links lead in a circle.
    """
    try:
        real, home = path.resolve(), directory.resolve()
    except RuntimeError:
        raise InputError(f"{path}: its links lead in a circle; copy the file here") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no file can have this name ({_reason(error)})") from None
    # In the hub's cache, `snapshots/REVISION` and its folders hold links into `blobs` of the same repository.
    store = next((folder.parent / "blobs" for folder in list(home.parents)[:2] if folder.name == "snapshots"), home)
    if not (real.is_relative_to(home) or real.is_relative_to(store)):
        raise InputError(f"{path}: a link out of the folder is not followed; copy the file here")


def file_inside(directory: Path, name: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        InputError: the name leads out of the folder, by itself or through a link.
    """
    if not name or "/" in name or "\\" in name or name in (".", "..") or "\0" in name or len(name.encode()) > 255:
        raise InputError(f"{directory}: '{name}' is not the name of a file in this folder")
    path = directory / name
    refuse_link_out(path, directory)
    return path


def read_text_file(path: Path, what: str) -> str:
    """Read a small UTF-8 file that the user named.

    Args:
        path: the file.
        what: the kind of file, for messages.

    Raises:
        InputError: the file is missing, a folder, not readable or not UTF-8 (the message names the line).
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: {explain_absent(path, what)}") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected a {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    if b"\0" in data:
        raise binary_file_error(path)
    return decode_text(data, str(path))


def binary_file_error(name: object) -> InputError:
    """Return the error for a file that contains bytes of value 0, which text files do not have."""
    return InputError(f"{name}: expected text in UTF-8, but it contains bytes of value 0, like binary files and UTF-16")


def decode_text(data: bytes, name: str) -> str:
    """Return UTF-8 bytes as text.

    Args:
        data: the bytes.
        name: the name of their source, for messages.

    Raises:
        InputError: the bytes are not UTF-8; the message names the line.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\0" in data:
            raise binary_file_error(name) from None
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{name}:{line}: not valid UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None
