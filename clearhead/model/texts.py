"""One text with one answer, or several texts with an answer for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from clearhead.errors import InputError

AnswerT_co = TypeVar("AnswerT_co", covariant=True)


class Answers(Protocol[AnswerT_co]):
    """The answers to a list of texts: a list or an array."""

    def __getitem__(self, index: int, /) -> AnswerT_co:
        """Return the answer to one of them."""


AnswersT = TypeVar("AnswersT", bound=Answers[Any])


def answer_each(
    given: object, answer: Callable[[list[Any]], AnswersT], *, parts: str = "", is_paired: bool = False
) -> AnswersT | Any:
    """Answer one text with one answer, and several texts with an answer for each.

    Args:
        given: what the caller gave: one text, or several.
        answer: answers a list of texts.
        parts: what a text may be beside a string, in words, such as "a list of words".
        is_paired: whether a tuple of strings is one text.

    Raises:
        InputError: neither a text nor several.
    """
    if isinstance(given, str) or (is_paired and isinstance(given, tuple) and _are_texts(given)):
        return answer([given])[0]
    expected = f"a text{f' or {parts}' if parts else ''}"
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise InputError(f"expected {expected}, or a list of them, got {type(given).__name__}")
    texts = list(given)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str) and not (parts and _are_texts(text)):
            raise InputError(f"text {number} is {text!r:.80}; expected {expected}")
    return answer(texts)


def _are_texts(parts: object) -> bool:
    return isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
