"""Small files: written atomically, and read with every fault named."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, nearest_name

LARGEST_FILE = 2**28
RUNS = Path("runs")


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


def refuse_existing(path: Path, *, force: bool) -> None:
    """Refuse to write a file that is there, before the work for it begins.

    Raises:
        InputError: the file exists and is not to be replaced.
    """
    if path.exists() and not force:
        raise InputError(f"{path} exists already: name another file, or replace it with --force")


def write_output(path: Path, text: str, *, force: bool) -> None:
    """Write a file that the user named, whole or not at all; missing folders are created.

    Args:
        path: the file.
        text: its content.
        force: whether an existing file is replaced.

    Raises:
        InputError: the file exists, or cannot be written.
    """
    refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def absent(path: Path, what: str = "file", others: Iterable[str] = ()) -> str:
    """Say that a path leads nowhere: where it ends, which for a relative one says where it was looked up.

    Args:
        path: to nothing.
        what: was expected there.
        others: paths and names elsewhere that may be meant.
    """
    whole = Path(os.path.abspath(path))
    folder = next(one for one in whole.parents if os.path.exists(one))
    name = whole.relative_to(folder).parts[0]
    if os.path.lexists(folder / name):
        place = f"'{folder / name}' is a link that leads nowhere"
    elif not folder.is_dir():
        place = f"{folder} is a file, not a folder"
    else:
        place = f"{folder} has no '{name}'{_meant(whole.name, folder / name, others)}"
    return f"there is no such {what}: {place}"


def _meant(name: str, path: Path, others: Iterable[str]) -> str:
    """Return a hint at a similar name in the folder of a path, or elsewhere."""
    elsewhere = {Path(one).name: one for one in others}
    siblings = names_in(path.parent)
    found = (
        elsewhere.get(name) or nearest_name(path.name, siblings) or elsewhere.get(nearest_name(name, elsewhere) or "")
    )
    return f" (did you mean '{found}'?)" if found else ""


def runs_nearby() -> list[str]:
    """Return the paths of the folders in which runs are usually written, for hints."""
    return [f"{RUNS}/{name}" for name in names_in(RUNS) if (RUNS / name).is_dir()]


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none where it cannot be read."""
    try:
        return sorted(one.name for one in folder.iterdir())
    except OSError:
        return []


def read_json_object(path: Path, *, what: str) -> dict[str, Any]:
    """Read a file of a model or a run that holds one JSON object.

    Args:
        path: the file to read.
        what: the expected content, for messages.

    Raises:
        InputError: as for `read_json`, or it is not an object.
    """
    content = read_json(path, what=what)
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected {what} as one JSON object, received a {type(content).__name__}")
    return content


def read_json(path: Path, *, what: str) -> Any:
    """Read a JSON file of a model or a run.

    Args:
        path: the file to read.
        what: the expected content, for messages.

    Raises:
        InputError: as for `read_model_file`, or it is not UTF-8 or not JSON, or it holds a key twice.
    """
    try:
        return parse_json(read_model_file(path, what=what).decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected {what} in UTF-8 JSON, but it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected {what} in JSON, but {error.msg.lower()}") from None


def parse_json(text: str) -> Any:
    """Parse JSON of a stranger.

    Raises:
        json.JSONDecodeError: it is not JSON, a key occurs twice in an object, a number has thousands of digits, or
            values are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("its values are nested too deeply", text, 0) from None
    except ValueError as error:  # from the hook, or from int()
        reason = str(error) if isinstance(error, _RepeatedKey) else "a number has too many digits"
        raise json.JSONDecodeError(reason, text, 0) from None


class _RepeatedKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(f"the key {next(name for name in content if names.count(name) > 1)!r} occurs twice")
    return content


def read_model_file(path: Path, *, what: str) -> bytes:
    """Read a small file that came with a model or a run, perhaps from a stranger.

    Args:
        path: the file.
        what: the expected content, for messages.

    Raises:
        InputError: it is missing, unreadable or too large, a pipe or a device, or a link out of its folder.
    """
    refuse_link_out(path, path.parent)
    try:
        # Opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            # Asked of the open file, which nobody can exchange any more.
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path}: expected {what}, but it is no regular file")
            if status.st_size > LARGEST_FILE:
                raise InputError(f"{path}: expected {what}, but {status.st_size} bytes are too many for one")
            return file.read()
    except FileNotFoundError:
        raise InputError(f"{path}: expected {what}, but {absent(path)}") from None
    except OSError as error:
        raise InputError(f"{path}: expected {what}, but it cannot be read ({error.strerror})") from None


def read_model_text(path: Path, *, what: str) -> str:
    """Read a small UTF-8 file that came with a model or a run.

    Raises:
        InputError: as for `read_model_file`, or it is not UTF-8 (with the line).
    """
    return decoded(read_model_file(path, what=what), str(path))


def refuse_link_out(path: Path, directory: Path) -> None:
    """Refuse a file of a folder that is a link out of it.

    A folder inside the hub's cache is made of links to the blobs of the same repository; those are followed.

    Raises:
        InputError: it is such a link, or links lead to each other in a circle.
    """
    try:
        real, home = path.resolve(), directory.resolve()
    except (OSError, RuntimeError):
        raise InputError(f"{path}: links that lead in a circle; copy the file here") from None
    # In the hub's cache, `snapshots/REVISION` and its folders hold links into `blobs` of the same repository.
    store = next((one.parent / "blobs" for one in list(home.parents)[:2] if one.name == "snapshots"), home)
    if not (real.is_relative_to(home) or real.is_relative_to(store)):
        raise InputError(f"{path}: a link out of the folder is not followed; copy the file here")


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
        raise InputError(f"{path}: {absent(path, what)}") from None
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
