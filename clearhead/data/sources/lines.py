"""Text files, whole or as lines: UTF-8 only, plain or .gz, streamed, cut at line feeds and nowhere else."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.base.files import absent, binary

_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK_BYTES = 1 << 20
_END_BYTES = 1 << 16


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, without their line ends.

    Only a line feed, or a carriage return and a line feed, ends a line: U+2028 and similar characters stay inside. A
    byte-order mark is dropped. The last line may or may not end in a line feed.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.

    Raises:
        InputError: the file is missing, empty, unreadable, not UTF-8, or a gzip file that is cut off or damaged.
    """
    lines = list(stream_lines(path))
    if not lines:
        raise empty_file(path)
    return lines


def stream_lines(path: Path) -> Iterator[str]:
    """Go through the lines that `read_lines` returns, one by one; an empty file has none.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.

    Raises:
        InputError: as for `read_lines`, but for an empty file.
    """
    return split_lines(stream_text(path))


def split_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text at its line feeds.

    Args:
        chunks: the text in parts of any lengths.
    """
    begun: list[str] = []
    for text in chunks:
        first, *more = text.split("\n")
        begun.append(first)
        if more:
            yield "".join(begun)
            yield from more[:-1]
            begun = [more[-1]]
    rest = "".join(begun)
    if rest:
        yield rest


def stream_text(path: Path) -> Iterator[str]:
    """Go through the text of a file in chunks of about a megabyte; every line ends in a single line feed.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.

    Raises:
        InputError: the file is missing, unreadable, not UTF-8, or a gzip file that is cut off or damaged.
    """
    held = ""
    for text in _decoded(path):
        text = held + text
        # A carriage return at the end may be the first half of a line end.
        held = "\r" if text.endswith("\r") else ""
        text = text[: len(text) - len(held)].replace("\r\n", "\n")
        if text:
            yield text
    if held:
        yield held


def content_key(path: Path) -> str:
    """Return what the text of a file depends on: its bytes, and whether they are compressed.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None
    return f"{'gz' if path.suffix == '.gz' else 'plain'} {digest}"


def size_and_ends(path: Path) -> tuple[int, str]:
    """Return the bytes of a file, and a digest of its first and its last ones, whatever its size.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            begin = file.read(_END_BYTES)
            file.seek(max(0, size - _END_BYTES))
            return size, hashlib.sha256(begin + file.read()).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def empty_file(path: Path) -> InputError:
    """Return the error of a file without text."""
    return InputError(f"{path}: the file is empty; expected at least one line of text")


def _decoded(path: Path) -> Iterator[str]:
    """Decode a file block by block; an error names the line and the byte in that line."""
    mark = codecs.BOM_UTF8
    line, column = 1, 0  # of the first byte of `content`; columns count from 0 here
    content, is_first = b"", True
    for block in _blocks(path):
        content += block
        if is_first and len(content) < len(mark) and block:
            continue  # whether a mark is there shows with the third byte
        if is_first and content.startswith(mark):
            content, column = content[len(mark) :], len(mark)
        guess = "; it looks like UTF-16" if is_first and content.startswith(_UTF16_MARKS) else ""
        is_first = False
        try:
            text, used = codecs.utf_8_decode(content, "strict", not block)
        except UnicodeDecodeError as error:
            if b"\0" in content and not guess:
                raise binary(path) from None
            line += content.count(b"\n", 0, error.start)
            line_start = content.rfind(b"\n", 0, error.start) + 1
            column = error.start - line_start + 1 + (0 if line_start else column)
            raise InputError(
                f"{path}:{line}: invalid UTF-8, byte 0x{content[error.start]:02x} at byte {column} of the line{guess}; "
                "convert the file to UTF-8"
            ) from None
        if "\0" in text:
            raise binary(path)
        last_feed = content.rfind(b"\n", 0, used)
        line += content.count(b"\n", 0, used)
        column = used - last_feed - 1 if last_feed >= 0 else column + used
        content = content[used:]
        yield text


def _blocks(path: Path) -> Iterator[bytes]:
    """Read the bytes of a file, decompressed if its name ends in .gz, and an empty block at the end."""
    try:
        with path.open("rb") as file:
            begin = file.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)]
            if path.suffix == ".gz":
                yield from _decompressed(path, begin)
            elif begin == _GZIP_MAGIC:
                raise InputError(
                    f"{path}: expected plain text, but this is a gzip file; give it a name that ends in .gz"
                )
            else:
                while block := file.read(_BLOCK_BYTES):
                    yield block
    except OSError as error:
        raise _unreadable(path, error) from None
    yield b""


def _decompressed(path: Path, begin: bytes) -> Iterator[bytes]:
    num_lines = 0
    try:
        with gzip.open(path, "rb") as file:
            # One read of the compressed bytes at a time: what comes before a cut is seen before the cut is.
            while block := file.read1(_BLOCK_BYTES):
                num_lines += block.count(b"\n")
                yield block
    except EOFError:
        raise InputError(
            f"{path}:{num_lines + 1}: the gzip data is cut off here, after {num_lines} whole lines; "
            "copy or download the file again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        reason = "it is damaged" if begin == _GZIP_MAGIC else "it is not a gzip file"
        raise InputError(
            f"{path}: expected gzip data because of the name, but {reason} ({error}); if it is plain text, give "
            "it a name without .gz"
        ) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: {absent(path)}")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path}: expected a file, but this is a folder")
    return InputError(f"{path}: the file cannot be read ({error.strerror or error})")
