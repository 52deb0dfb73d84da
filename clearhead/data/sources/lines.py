"""Read text files, whole or line by line: UTF-8, plain or .gz, streamed, cut at line feeds only."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from clearhead.base.errors import InputError
from clearhead.base.files import binary_file_error, explain_absent

_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK_BYTES = 1 << 20
_END_BYTES = 1 << 16


def read_lines(path: Path) -> list[str]:
    """Read the lines of a UTF-8 file, without their line ends.

    Only LF or CR LF ends a line: U+2028 and similar characters stay in the line. A byte-order mark is dropped. The last
    line may lack its line feed.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.

    Raises:
        InputError: the file is missing, empty, unreadable, not UTF-8, or a truncated or damaged gzip file.
    """
    lines = list(stream_lines(path))
    if not lines:
        raise empty_file(path)
    return lines


def stream_lines(path: Path, span: range | None = None) -> Iterator[str]:
    """Yield the lines that `read_lines` returns, one by one; none for an empty file.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.
        span: the byte range of a plain file to read, from the start to the end of a line. None means the whole file.

    Raises:
        InputError: the file is missing, unreadable, not UTF-8, or a truncated or damaged gzip file.
    """
    return split_lines(stream_text(path, span))


def find_share(path: Path, number: int, count: int) -> range:
    """Divide the lines of a file into `count` contiguous shares, and return the byte range of one share.

    The bytes of the file are cut into equal spans. A line belongs to the share whose span contains its first byte. A
    share can therefore be empty. The lines before the share are not read.

    Args:
        path: a plain file.
        number: the number of the share, counted from 1.
        count: the number of shares.

    Raises:
        InputError: the file is missing, empty or cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if not size:
                raise empty_file(path)
            return range(*(_find_line_start(file, size * cut // count, size) for cut in (number - 1, number)))
    except OSError as error:
        raise _unreadable(path, error) from None


def _find_line_start(file: BinaryIO, cut: int, size: int) -> int:
    """Return the offset of the first line that begins at byte `cut` or later, or the size of the file."""
    if not cut:
        return 0
    # A line feed just before the cut means that a line begins at the cut.
    file.seek(cut - 1)
    while block := file.read(_END_BYTES):
        if (feed := block.find(b"\n")) >= 0:
            return file.tell() - len(block) + feed + 1
    return size


def count_lines_before(path: Path, byte: int) -> int:
    """Return the number of lines that end before a byte offset of a plain file.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    return sum(block.count(b"\n") for block in _blocks(path, range(byte)))


def split_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text, without their line feeds.

    Args:
        chunks: the text in chunks of any length.
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


def stream_text(path: Path, span: range | None = None) -> Iterator[str]:
    """Yield the text of a file in chunks of about a megabyte; CR LF becomes LF.

    Args:
        path: a plain file, or a gzip file whose name ends in .gz.
        span: the bytes of a plain file to read, as in `stream_lines`. None means the whole file.

    Raises:
        InputError: the file is missing, unreadable, not UTF-8, or a truncated or damaged gzip file.
    """
    held = ""
    for text in _decode_blocks(path, span):
        text = held + text
        # A carriage return at the end may be the first half of a line end.
        held = "\r" if text.endswith("\r") else ""
        text = text[: len(text) - len(held)].replace("\r\n", "\n")
        if text:
            yield text
    if held:
        yield held


def content_key(path: Path) -> str:
    """Return a key that identifies the text of a file: a digest of its bytes, and whether they are compressed.

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
    """Return the size of a file in bytes, and a digest of its first and last 64 KiB.

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
    """Return the error to raise for a file without text."""
    return InputError(f"{path}: the file is empty; expected at least one line of text")


def _decode_blocks(path: Path, span: range | None) -> Iterator[str]:
    """Yield the decoded text of a file, block by block; an error names the line and the byte in that line."""
    mark = codecs.BOM_UTF8
    start = 0 if span is None else span.start
    line, column = 1, 0  # position of the first byte of `content`; lines count from `start`, columns from 0
    content, is_first = b"", start == 0
    for block in _blocks(path, span):
        content += block
        if is_first and len(content) < len(mark) and block:
            continue  # a byte-order mark has three bytes
        if is_first and content.startswith(mark):
            content, column = content[len(mark) :], len(mark)
        guess = "; it looks like UTF-16" if is_first and content.startswith(_UTF16_MARKS) else ""
        is_first = False
        try:
            text, used = codecs.utf_8_decode(content, "strict", not block)
        except UnicodeDecodeError as error:
            if b"\0" in content and not guess:
                raise binary_file_error(path) from None
            line += content.count(b"\n", 0, error.start) + count_lines_before(path, start)
            line_start = content.rfind(b"\n", 0, error.start) + 1
            column = error.start - line_start + 1 + (0 if line_start else column)
            raise InputError(
                f"{path}:{line}: invalid UTF-8, byte 0x{content[error.start]:02x} at byte {column} of the line{guess}; "
                "convert the file to UTF-8"
            ) from None
        if "\0" in text:
            raise binary_file_error(path)
        last_feed = content.rfind(b"\n", 0, used)
        line += content.count(b"\n", 0, used)
        column = used - last_feed - 1 if last_feed >= 0 else column + used
        content = content[used:]
        yield text


def _blocks(path: Path, span: range | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks, decompressed if its name ends in .gz, and an empty block at the end."""
    left = sys.maxsize if span is None else len(span)
    try:
        with path.open("rb") as file:
            begin = file.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)]
            if path.suffix == ".gz":
                yield from _decompress(path, begin)
            elif begin == _GZIP_MAGIC:
                raise InputError(
                    f"{path}: expected plain text, but this is a gzip file; give it a name that ends in .gz"
                )
            else:
                if span is not None:
                    file.seek(span.start)
                while block := file.read(min(_BLOCK_BYTES, left)):
                    left -= len(block)
                    yield block
    except OSError as error:
        raise _unreadable(path, error) from None
    yield b""


def _decompress(path: Path, begin: bytes) -> Iterator[bytes]:
    num_lines = 0
    try:
        with gzip.open(path, "rb") as file:
            # read1 decodes one read of compressed bytes at a time: all data before a truncation is yielded.
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
        return InputError(f"{path}: {explain_absent(path)}")
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path}: expected a file, but this is a folder")
    return InputError(f"{path}: the file cannot be read ({error.strerror or error})")
