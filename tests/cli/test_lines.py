"""One line in, one line out: whatever the chunks, every line keeps its answer, and a mistake is named by its line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clearhead.cli.lines import answered_lines, named_by_line, one_line
from clearhead.errors import InputError

TEXT = "a m u\n\n   \nb n\u2028v\nc o w"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "input"
    path.write_text(TEXT, encoding="utf-8")
    return path


def lengths(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
def test_every_line_has_its_answer_whatever_the_chunks(size: int | None, file: Path) -> None:
    found = list(answered_lines(file, lengths, batch_size=size))
    assert [line.text for line, _ in found] == TEXT.split("\n")
    assert [line.number for line, _ in found] == [1, 2, 3, 4, 5]
    assert [answer for _, answer in found] == [5, None, None, 5, 5]


def test_no_more_than_the_batch_size_is_answered_together(file: Path) -> None:
    sizes: list[int] = []

    def count(texts: Sequence[str]) -> Sequence[str]:
        sizes.append(len(texts))
        return texts

    list(answered_lines(file, count, batch_size=2))
    assert sizes == [1, 1, 1]
    sizes.clear()
    list(answered_lines(file, count, batch_size=None))
    assert sizes == [3]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    found = list(answered_lines(Path("-"), lengths, batch_size=2))
    assert [answer for _, answer in found] == [5, None, None, 5, 5]


def test_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("a m\tu\n\nb\tn v\n", encoding="utf-8")

    def swap(pairs: list[tuple[str, str]]) -> list[str]:
        return [f"{second}|{first}" for first, second in pairs]

    found = list(answered_lines(path, swap, paired=True, batch_size=None))
    assert [answer for _, answer in found] == ["u|a m", None, "n v|b"]
    assert found[2][0].record() == {"index": 2, "text": "b", "pair": "n v"}


@pytest.mark.parametrize(("line", "received"), [("one text", "one text"), ("a\tb\tc", "3 columns")])
def test_a_line_that_is_no_pair(line: str, received: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(f"a\tb\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"pairs.tsv:2: expected two texts with one tab .* received {received}"):
        list(answered_lines(path, lambda pairs: pairs, paired=True, batch_size=None))


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_mistake_is_named_by_its_line(size: int | None, file: Path) -> None:
    def refuse(texts: Sequence[str]) -> Sequence[str]:
        for number, text in enumerate(texts, start=1):
            if text.startswith("c"):
                raise InputError(f"text {number} has no blank")
        return texts

    with pytest.raises(InputError, match=r"input:5: the text has no blank"):
        list(answered_lines(file, refuse, batch_size=size))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("text 2 is empty", "f:5: the text is empty"),
        ("text 2: the blank at 3", "f:5: the blank at 3"),
        ("  - text 1 is long\n  - text 2 is long", "  - f:3: the text is long\n  - f:5: the text is long"),
        ("text 4 of a pair", "f:5: the text of a pair"),
        ("context 2 is long", "context 2 is long"),
    ],
)
def test_names(message: str, expected: str) -> None:
    assert named_by_line(message, [3, 5], "f") == expected


def test_a_single_text_has_no_line() -> None:
    assert named_by_line("text 1 has no blank", [1], None) == "the text has no blank"


def test_what_would_break_a_line_is_a_space() -> None:
    assert one_line("a\tb\r\nc") == "a b  c"
