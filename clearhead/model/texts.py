"""One text with one answer, several texts with a list of answers, and an iterator of texts with one of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

from clearhead.base.errors import InputError, Reference, nth_text, renaming

Parts = Literal["a pair of texts", "a list of words"]
PAIR: Parts = "a pair of texts"
AnswerT_co = TypeVar("AnswerT_co", covariant=True)

# In texts. Batches are sorted by length inside a window: 128 translations at a time take no longer than 1,024.
FIRST_WINDOW, LARGEST_WINDOW = 16, 256


class Answers(Protocol[AnswerT_co]):
    """The answers to a list of texts: a list or an array."""

    def __getitem__(self, index: int, /) -> AnswerT_co:
        """Return the answer to one of them."""

    def __iter__(self) -> Iterator[AnswerT_co]:
        """Go through them."""


AnswersT = TypeVar("AnswersT", bound=Answers[Any])


def window_sizes(batch_size: int | None = None) -> Iterator[int]:
    """Yield how many texts to answer together, one window after the other: a few at first, so that answers come early.

    Args:
        batch_size: most texts of a batch; a window holds at least one batch.
    """
    size = FIRST_WINDOW
    while True:
        yield max(size, batch_size or 1)
        size = min(2 * size, LARGEST_WINDOW)


def answer_each(
    given: object,
    answer: Callable[[list[Any]], AnswersT],
    *,
    parts: Parts | None = None,
    is_paired: bool = False,
    batch_size: int | None = None,
) -> AnswersT | Any:
    """Answer one text with one answer, several with an answer for each, and an iterator with an iterator.

    Args:
        given: what the caller gave: one text, or several.
        answer: answers a list of texts.
        parts: what a text may be beside a string.
        is_paired: whether a tuple of strings is one text.
        batch_size: as for `window_sizes`.

    Raises:
        InputError: neither a text nor several.
    """
    if isinstance(given, str) or (is_paired and isinstance(given, tuple) and _are_texts(given, parts)):
        return answer([given])[0]
    expected = f"a text{f' or {parts}' if parts else ''}"
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise InputError(f"expected {expected}, or a list of them, got {type(given).__name__}")

    def checked(texts: list[Any], first: int = 1) -> list[Any]:
        for number, text in enumerate(texts, start=first):
            if not isinstance(text, str) and not _are_texts(text, parts):
                raise InputError(nth_text(number) + f" is {text!r:.80}; expected {expected}")
        return [tuple(text) if parts == PAIR and not isinstance(text, str) else text for text in texts]

    if not isinstance(given, Iterator):
        return answer(checked(list(given)))

    def answered(texts: Iterator[Any]) -> Iterator[Any]:
        from clearhead.base.hooks import naming_texts  # it imports torch, which commands need only once texts are read

        before = 0
        for size in window_sizes(batch_size):
            window = checked(list(islice(texts, size)), before + 1)
            if not window:
                return
            # Errors count the texts of the window, and the caller counts all.
            rows = range(before, before + len(window))
            with renaming(partial(_counted_from, before)), naming_texts(rows, are_rows=False):
                answers = answer(window)
            yield from answers
            before += len(window)

    return answered(given)


def _counted_from(before: int, reference: Reference) -> Reference:
    return replace(reference, number=reference.number + before) if reference.number else reference


def _are_texts(given: object, parts: Parts | None) -> bool:
    is_list = parts is not None and isinstance(given, list | tuple) and all(isinstance(part, str) for part in given)
    return is_list and (parts != PAIR or len(given) == 2)  # type: ignore[arg-type]
