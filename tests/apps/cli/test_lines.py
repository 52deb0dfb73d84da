"""One line in, one line out: whatever the chunks, every line keeps its answer, and a mistake is named by its line."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clearhead.apps.cli.lines import InputLine, TextInput, _split_blocks, answer_lines, line_namer, one_line
from clearhead.apps.cli.outputs import AnswerFile
from clearhead.apps.cli.stopping import Stopped
from clearhead.base.arguments import FIRST_WINDOW, LARGEST_WINDOW
from clearhead.base.errors import InputError, argument, at_text, nth_text, renaming

TEXT = "a m u\n\n   \nb n\u2028v\nc o w"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "input"
    path.write_text(TEXT, encoding="utf-8")
    return path


def collect_answers(
    file: Path, answer: Callable[[list[Any]], Sequence[Any]], size: int | None = None, *, paired: bool = False
) -> list[tuple[InputLine, Any]]:
    """Return the shown lines and answers."""
    answers: list[tuple[InputLine, Any]] = []
    answer_lines(TextInput.of(file), answer, lambda *shown: answers.append(shown), batch_size=size, paired=paired)
    return answers


def lengths(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7])
def test_every_line_has_its_answer_whatever_the_chunks(size: int | None, file: Path) -> None:
    answers = collect_answers(file, lengths, size)
    assert [line.text for line, _ in answers] == TEXT.split("\n")
    assert [line.number for line, _ in answers] == [1, 2, 3, 4, 5]
    assert [answer for _, answer in answers] == [5, None, None, 5, 5]


def test_the_first_answers_come_after_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_text("a\n" * 1000, encoding="utf-8")
    begun: list[tuple[int, int]] = []
    shown: list[int] = []

    def note(texts: Sequence[str]) -> Sequence[str]:
        begun.append((len(shown), len(texts)))
        return texts

    answer_lines(TextInput.of(path), note, lambda line, _: shown.append(line.number), batch_size=None)
    assert shown == list(range(1, 1001))
    # A window begins when every line before it is shown, and is no larger than they are, but for the first ones.
    assert begun[0] == (0, FIRST_WINDOW) and all(size <= max(before, FIRST_WINDOW) + 16 for before, size in begun)
    assert max(size for _, size in begun) == LARGEST_WINDOW
    begun.clear(), shown.clear()
    answer_lines(TextInput.of(path), note, lambda line, _: shown.append(line.number), batch_size=600)
    assert [size for _, size in begun] == [600, 400]


def test_a_line_that_has_arrived_waits_for_no_other() -> None:
    blocks = iter([b"a m", b" u\nb\nc", b" o w\r\n", b"\nd"])
    events: list[object] = []

    def read(size: int) -> bytes:
        events.append("read")
        return next(blocks, b"")

    lines = TextInput("standard input", _split_blocks(read), None)
    answer_lines(lines, list, lambda line, answer: events.append((line.number, answer)), batch_size=None)
    first, second = (1, "a m u"), (2, "b")
    assert events == ["read", "read", first, second, "read", (3, "c o w"), "read", (4, None), "read", (5, "d")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_how_much_is_done(number: signal.Signals, file: Path) -> None:
    output, partial = file.with_name("output"), file.with_name("partial")

    def show(line: InputLine, answer: object) -> None:
        if line.number == 3:
            raise Stopped(number)
        print(answer)

    word = "interrupted" if number == signal.SIGINT else "terminated"
    for can_resume, rest in ((True, "--resume goes on from there"), (False, f"{output} is not written")):
        answers = AnswerFile(output, partial, None, can_resume=can_resume)
        with pytest.raises(Stopped) as stopped:
            answer_lines(replace(TextInput.of(file), output=answers), lengths, show, batch_size=None)
        assert str(stopped.value) == f"clearhead: {word}; 2 of 5 lines are done; {rest}"
        assert partial.exists() == can_resume and not output.exists()


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    answers = collect_answers(Path("-"), lengths)
    assert [answer for _, answer in answers] == [5, None, None, 5, 5]


def test_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("a m\tu\n\nb\tn v\n", encoding="utf-8")

    def swap(pairs: list[tuple[str, str]]) -> list[str]:
        return [f"{second}|{first}" for first, second in pairs]

    answers = collect_answers(path, swap, paired=True)
    assert [answer for _, answer in answers] == ["u|a m", None, "n v|b"]
    assert answers[2][0].record() == {"index": 2, "text": "b", "pair": "n v"}


@pytest.mark.parametrize(("line", "received"), [("one text", "one text"), ("a\tb\tc", "3 columns")])
def test_a_line_that_is_no_pair(line: str, received: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(f"a\tb\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=rf"pairs.tsv:2: expected two texts with one tab .* got {received}"):
        collect_answers(path, lambda pairs: pairs, paired=True)


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_mistake_is_named_by_its_line(size: int | None, file: Path) -> None:
    def refuse(texts: Sequence[str]) -> Sequence[str]:
        for number, text in enumerate(texts, start=1):
            if text.startswith("c"):
                raise InputError(nth_text(number) + " has no blank")
        return texts

    with pytest.raises(InputError, match=r"input:5: the text has no blank"):
        collect_answers(file, refuse, size)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([nth_text(2) + " is empty"], "f:5: the text is empty"),
        ([at_text(2) + ": the blank at 3"], "f:5: the blank at 3"),
        ([nth_text(1) + " is long", nth_text(2) + " is long"], "f:3: the text is long\nf:5: the text is long"),
        ([nth_text(4) + " of a pair"], "f:5: the text of a pair"),
        ([nth_text(2, "source") + " has no tokens"], "f:5: the source has no tokens"),
        ([nth_text(1) + " is 'see text 2:'"], "f:3: the text is 'see text 2:'"),
        ([argument("top_k") + " is 0"], "top_k is 0"),
    ],
)
def test_names(lines: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught, renaming(line_namer([InputLine(3, ""), InputLine(5, "")], "f")):
        raise InputError(*lines)
    assert str(caught.value) == expected


def test_a_single_text_has_no_line() -> None:
    with pytest.raises(InputError) as caught, renaming(line_namer([InputLine(1, "")], None)):
        raise InputError(nth_text(1) + " has no blank", at_text(1) + ": it has none")
    assert str(caught.value) == "the text has no blank\nthe text: it has none"


def test_what_would_break_a_line_is_a_space() -> None:
    assert one_line("a\tb\r\nc") == "a b  c"
