"""Text files as lines: UTF-8 only, plain or .gz, cut at line feeds and nowhere else."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

from clearhead.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, without their line ends.

    Only a line feed, or a carriage return and a line feed, ends a line: U+2028 and its like stay inside. A byte-order
    mark is dropped. The last line may or may not end in a line feed.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.

    Raises:
        InputError: the file is missing, empty, unreadable, not UTF-8, or a gzip file that is cut off or damaged.
    """
    text = _decode(path, _read_bytes(path))
    if not text:
        raise InputError(f"{path}: the file is empty; expected at least one line of text")
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hexadecimal digits.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_bytes(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            return _read_gzip(path)
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if content.startswith(_GZIP_MAGIC):
        raise InputError(f"{path}: expected plain text, but this is a gzip file; give it a name that ends in .gz")
    return content


def _read_gzip(path: Path) -> bytes:
    packed = path.read_bytes()
    try:
        return gzip.decompress(packed)
    except EOFError:
        num_lines = _count_whole_lines(packed)
        raise InputError(
            f"{path}:{num_lines + 1}: the gzip data is cut off here, after {num_lines} whole lines; "
            "copy or download the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        reason = "it is damaged" if packed.startswith(_GZIP_MAGIC) else "it is not a gzip file"
        raise InputError(f"{path}: expected gzip data because of the name, but {reason} ({error})") from None


def _count_whole_lines(packed: bytes) -> int:
    """Count the lines before the end of gzip data that breaks off; several members may follow each other."""
    count = 0
    while packed:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        count += member.decompress(packed).count(b"\n")
        packed = member.unused_data
    return count


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The error counts from behind a byte-order mark.
        start = error.start + (3 if content.startswith(b"\xef\xbb\xbf") else 0)
        line = content.count(b"\n", 0, start) + 1
        column = start - (content.rfind(b"\n", 0, start) + 1) + 1
        guess = "; it looks like UTF-16" if content.startswith(_UTF16_MARKS) else ""
        raise InputError(
            f"{path}:{line}: invalid UTF-8, byte 0x{content[start]:02x} at byte {column} of the line{guess}; "
            "convert the file to UTF-8"
        ) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: there is no such file")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path}: expected a file, but this is a folder")
    return InputError(f"{path}: the file cannot be read ({error.strerror or error})")
