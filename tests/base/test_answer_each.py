"""One text, a list, or an iterator: every text gets its own answer, for any window size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clearhead.base.arguments import FIRST_WINDOW, LARGEST_WINDOW, answer_each
from clearhead.base.errors import InputError, nth_text


def lengths(texts: list[str]) -> list[int]:
    for number, text in enumerate(texts, start=1):
        if not text:
            raise InputError(nth_text(number) + " is empty")
    return [len(text) for text in texts]


@pytest.mark.parametrize("count", [0, 1, FIRST_WINDOW, 1009])
@pytest.mark.parametrize("batch_size", [None, 3, 311])
def test_an_iterator_is_answered_as_a_list_is(count: int, batch_size: int | None) -> None:
    texts = ["a" * (1 + index % 7) for index in range(count)]
    assert list(answer_each(iter(texts), lengths, batch_size=batch_size)) == answer_each(texts, lengths)


def test_an_iterator_is_read_as_its_answers_are_asked_for() -> None:
    read: list[int] = []

    def texts() -> Iterator[str]:
        for index in range(10_000):
            read.append(index)
            yield "a"

    answers = answer_each(texts(), lengths)
    assert not read and next(answers) == 1 and len(read) == FIRST_WINDOW
    for _ in range(3000):
        next(answers)
    assert len(read) <= 3001 + LARGEST_WINDOW


@pytest.mark.parametrize(("wrong", "message"), [("", "text 702 is empty"), (7, "text 702 is 7; expected a text")])
def test_a_mistake_is_named_by_its_number_among_all(wrong: object, message: str) -> None:
    texts = [*["a"] * 701, wrong, "a"]
    with pytest.raises(InputError, match=message):
        list(answer_each(iter(texts), lengths))
