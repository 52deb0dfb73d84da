"""Lines of files: what ends one, and what is wrong with a file, with the place."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import clearhead.data.sources.lines as lines_module
from clearhead.base.errors import InputError
from clearhead.data.sources.lines import (
    count_lines_before,
    find_share,
    read_lines,
    stream_lines,
    stream_text,
)


def write(folder: Path, content: bytes, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\r\n\r\ntwo", ["one", "", "two"]),
        (b"\n\n", ["", ""]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
        ("a\u2028b\u0085c\x0bd\x0ce\x1cf\n\u2029g".encode(), ["a\u2028b\u0085c\x0bd\x0ce\x1cf", "\u2029g"]),
        (b"in\rside\n", ["in\rside"]),
    ],
)
def test_only_a_line_feed_ends_a_line(tmp_path: Path, name: str, content: bytes, lines: list[str]) -> None:
    assert read_lines(write(tmp_path, content, name)) == lines


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InputError, match=r"a\.txt: the file is empty"):
        read_lines(write(tmp_path, content))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.txt: there is no such file"):
        read_lines(tmp_path / "none.txt")
    with pytest.raises(InputError, match=r"none\.gz: there is no such file"):
        read_lines(tmp_path / "none.gz")
    with pytest.raises(InputError, match="this is a folder"):
        read_lines(tmp_path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_invalid_utf8_names_file_line_and_byte(tmp_path: Path, mark: bytes) -> None:
    path = write(tmp_path, mark + b"gr\xc3\xbcn\nblau\ncaf\xe9 noir\n")
    with pytest.raises(InputError, match=r"a\.txt:3: invalid UTF-8, byte 0xe9 at byte 4 of the line; convert"):
        read_lines(path)


def test_utf16_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.txt:1: .*looks like UTF-16"):
        read_lines(write(tmp_path, "grün\n".encode("utf-16")))


def test_a_gzip_that_is_cut_off_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress("".join(f"line {n * n * 7919 % 10007}\n" for n in range(20_011)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"a\.txt\.gz:(\d+): the gzip data is cut off here, after \d+ whole lines"):
        read_lines(path)
    path.write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"a\.txt\.gz:20012: the gzip data is cut off here, after 20011 whole lines"):
        read_lines(path)


def test_a_damaged_gzip_and_a_wrong_name_are_told_apart(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(b"some text that is long enough\n" * 101))
    whole[-6] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(whole)
    with pytest.raises(InputError, match="it is damaged"):
        read_lines(tmp_path / "a.gz")
    (tmp_path / "b.gz").write_bytes(b"plain\n")
    with pytest.raises(InputError, match="it is not a gzip file"):
        read_lines(tmp_path / "b.gz")
    (tmp_path / "c.txt").write_bytes(gzip.compress(b"text\n"))
    with pytest.raises(InputError, match=r"give it a name that ends in \.gz"):
        read_lines(tmp_path / "c.txt")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_blocks_of_any_size_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, name: str) -> None:
    texts = ["grün\r\n東京\n👩\r\n\r\n\rx\r", "\n", "a\r\n", "é"]
    whole = [stream(write(tmp_path, text.encode(), name)) for text in texts]
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", size)
    for text, lines in zip(texts, whole, strict=True):
        path = write(tmp_path, text.encode(), name)
        assert stream(path) == lines == text.replace("\r\n", "\n")
        assert list(stream_lines(path)) == read_lines(path)


def stream(path: Path) -> str:
    return "".join(stream_text(path))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "position"),
    [
        (b"gr\xc3\xbcn\nblau\ncaf\xe9 noir\n", r"a\.txt:3: invalid UTF-8, byte 0xe9 at byte 4 of"),
        (b"\xef\xbb\xbfcaf\xe9 noir\n", r"a\.txt:1: invalid UTF-8, byte 0xe9 at byte 7 of"),
        (b"ab\nc\xe6\x9d", r"a\.txt:2: invalid UTF-8, byte 0xe6 at byte 2 of"),
        ("ün\n".encode("utf-16"), r"a\.txt:1: invalid UTF-8, byte 0xff at byte 1 of the line; it looks like UTF-16"),
    ],
)
def test_a_mistake_has_one_place_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, content: bytes, position: str
) -> None:
    monkeypatch.setattr(lines_module, "_BLOCK_BYTES", size)
    with pytest.raises(InputError, match=position):
        stream(write(tmp_path, content))


def test_a_stream_of_an_empty_file_has_nothing(tmp_path: Path) -> None:
    assert list(stream_lines(write(tmp_path, b""))) == list(stream_text(write(tmp_path, b"\xef\xbb\xbf"))) == []


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(
    "content",
    [
        b"a\n",
        b"a\nb",
        b"\n\n\n",
        b"\xef\xbb\xbfa\r\n\r\nb\r\n",
        "äöü\n€uro\n\n日本語 𝄞\nend".encode(),
        b"a\n" + b"long " * 50 + b"\nb\n",
        "\n".join("é" * (number % 5) for number in range(40)).encode(),
    ],
)
def test_shares_in_order_are_all_lines(content: bytes, count: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    spans = [find_share(path, number, count) for number in range(1, count + 1)]
    assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]] and spans[-1].stop == len(content)
    assert [line for span in spans for line in stream_lines(path, span)] == read_lines(path)
    for span in spans:
        assert count_lines_before(path, span.start) == content[: span.start].count(b"\n")


def test_a_fault_in_a_share_has_its_line_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"good\n" * 9 + b"b\xffd\n")
    span = find_share(path, 2, 2)
    assert span.start
    with pytest.raises(InputError, match="file:10: invalid UTF-8, byte 0xff at byte 2"):
        list(stream_lines(path, span))
