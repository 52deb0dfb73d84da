"""Argument checks of public functions: a value of a wrong type raises an error of one sentence.

`answer_each` returns one answer for one text, a list for several texts, and an iterator for an iterator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from clearhead.base.errors import InputError, MessageReference, argument, did_you_mean, nth_text, renaming

CheckedT = TypeVar("CheckedT", bound=Callable[..., Any])

PRECISIONS = ("auto", "fp32", "bf16", "int8", "int4")
_DEVICE = re.compile("auto|cpu|mps|cuda(:[0-9]+)?")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}
_WORDS: Mapping[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
    Path: "a path",
    Mapping: "a dictionary",
    Sequence: "a list",
    list: "a list",
    tuple: "a tuple",
    Callable: "a function",
}
_TENSORS = {"numbers": "a tensor of floating-point numbers", "mask": "boolean, True = may attend"}


def check_device(name: str) -> None:
    """Refuse a name that is no device on any machine, without importing torch.

    Raises:
        InputError: the name is not a device.
    """
    if _DEVICE.fullmatch(name) is None:
        raise unknown_device_error(name)


def unknown_device_error(name: str) -> InputError:
    """Return the error for a name that is not a device."""
    return InputError(f"'{name}' is not a device: use auto, cpu, cuda, cuda:N or mps")


def check_precision(name: str) -> None:
    """Refuse a name that is not a precision.

    Raises:
        InputError: the name is not a precision.
    """
    if name not in PRECISIONS:
        raise InputError(argument("precision") + f" must be one of {', '.join(PRECISIONS)}; got '{name}'")


def check_types(target: CheckedT) -> CheckedT:
    """Decorate a function, or the public methods of a class, to check the types of arguments by their annotations.

    A wrong type raises an `InputError` that names the argument. The function itself must check shapes and ranges.

    Args:
        target: the function or the class.
    """
    return _decorate(_check_function, target)


def explain_types(target: CheckedT) -> CheckedT:
    """Decorate a function, or the public methods of a class, to check argument types only if a call raises an error.

    Use it for calls in decoding steps and for compiled calls: a call that works costs nothing more. Constructors are
    checked before they run.

    Args:
        target: the function or the class.
    """
    return _decorate(_explain_function, target)


def _decorate(decorate: Callable[[Any], Any], target: CheckedT) -> CheckedT:
    if not isinstance(target, type):
        function: CheckedT = decorate(target)
        return function
    for name, member in list(vars(target).items()):
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(target, name, (_check_function if name == "__init__" else decorate)(member))
    return target


def _check_function(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_types(function, args, kwargs)
        return function(*args, **kwargs)

    return call


def _explain_function(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InputError:
            raise
        except Exception:
            _refuse_types(function, args, kwargs)
            raise

    return call


def _refuse_types(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        arguments = _signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # a missing or unknown argument: the call raises an error that names it
        return
    hints = _hints(function)
    for name, value in arguments.items():
        if name in hints and not _fits(value, hints[name]):
            expected = " or ".join(dict.fromkeys(_words(hints[name])))
            texts = [word.strip("'") for word in _words(hints[name]) if word.startswith("'")]
            hint = did_you_mean(value, texts) if isinstance(value, str) else ""
            raise InputError(argument(name) + f": expected {expected}, got {value!r:.80}{hint}") from None


_signature = functools.cache(inspect.signature)


def check_tensor(
    name: str,
    value: Any,
    kind: Literal["numbers", "mask"],
    shapes: Sequence[str],
    sizes: Mapping[str, int],
    hint: str = "",
) -> dict[str, int]:
    """Refuse a tensor of a wrong kind or shape, and return the sizes of its axes by name.

    Args:
        name: the name of the argument.
        value: the argument; None is a missing mask.
        kind: "numbers" for floating-point numbers, "mask" for booleans. A mask of numbers is refused: its polarity is
            ambiguous, and a kernel would add it to the scores.
        shapes: the allowed shapes as names of axes, such as "batch tokens"; the size of "#batch" may also be 1.
        sizes: the known sizes of axes, by name.
        hint: a text for the end of the message.

    Raises:
        InputError: the argument is not such a tensor.
    """

    def fits(axis: str, size: int) -> bool:
        return size == sizes.get(axis.lstrip("#"), size) or (size == 1 and axis[0] == "#")

    if value is None and kind == "mask":
        return {}
    dtype, shape = str(getattr(value, "dtype", "")), list(getattr(value, "shape", ()))
    if not (dtype == "torch.bool" if kind == "mask" else dtype.startswith(("torch.float", "torch.bfloat"))):
        got = f"{dtype} {shape}" if dtype else f"{value!r:.80}"
        raise InputError(f"{name} must be {_TENSORS[kind]}; got {got}{hint}")
    for axes in map(str.split, shapes):
        if len(axes) == len(shape) and all(map(fits, axes, shape)):
            return {axis.lstrip("#"): size for axis, size in zip(axes, shape, strict=True)}
    expected = " or ".join(f"[{_format_axes(axes, sizes)}]" for axes in shapes)
    raise InputError(f"{name} must be {expected}; got {shape}{hint}")


def _format_axes(axes: str, sizes: Mapping[str, int]) -> str:
    """Return a shape as a text of its axes, with their known sizes."""
    names = axes.replace("#", "").split()
    return ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in names)


@functools.cache
def _hints(function: Any) -> dict[str, Any]:
    """Return the types of parameters by name, without types that only a type checker imports."""
    names = inspect.unwrap(function).__globals__
    hints: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if isinstance(parameter.annotation, str) and parameter.kind not in _VARIABLE:
            holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            with contextlib.suppress(NameError):
                hints |= get_type_hints(holder, names, include_extras=True)
    return hints


def _fits(value: object, hint: Any) -> bool:
    parts = _alternatives(hint)
    if parts is not None:
        return any(_fits(value, alternative) for alternative in parts)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, os.PathLike)
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if not isinstance(origin, type) or origin in (object, Any):
        return True
    if origin.__module__.startswith("jaxtyping"):
        return isinstance(value, getattr(origin, "array_type", object))
    if issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else [(value, value)]
        return isinstance(value, Mapping) and (not args or all(_items_fit(pair, args, tuple) for pair in pairs))
    if issubclass(origin, Collection) and not issubclass(origin, str | bytes):
        is_such = isinstance(value, Sequence if origin is list else origin) and not isinstance(value, str | bytes)
        return is_such and _items_fit(value, args, origin)
    return isinstance(value, origin)


def _items_fit(items: Any, args: tuple[Any, ...], origin: type) -> bool:
    if origin is tuple and args and args[-1] is not Ellipsis:
        return len(items) == len(args) and all(map(_fits, items, args))
    return all(_fits(item, args[0]) for item in items if args)


def _alternatives(hint: Any) -> tuple[Any, ...] | None:
    """Return the alternative types of a union, a type variable or an annotation; None for a single type."""
    if isinstance(hint, TypeVar):
        return hint.__constraints__ or ((hint.__bound__,) if hint.__bound__ is not None else (object,))
    if get_origin(hint) is Annotated:
        return (get_args(hint)[0],)
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (NoneType,) if hint is None else None


def _words(hint: Any) -> list[str]:
    parts = _alternatives(hint)
    if parts is not None:
        return [word for alternative in parts for word in _words(alternative)]
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return [repr(choice) for choice in args]
    if origin is tuple and args and args[-1] is not Ellipsis:
        return [f"a tuple of {len(args)}"]
    if origin is Mapping and args and args[1] is not Any:
        return [f"a dictionary in which each value is {' or '.join(dict.fromkeys(_words(args[1])))}"]
    origin = getattr(origin, "array_type", origin)
    return [_WORDS.get(origin) or f"a {getattr(origin, '__name__', origin)}"]


TextForm = Literal["a pair of texts", "a list of words"]
PAIR: TextForm = "a pair of texts"
AnswerT_co = TypeVar("AnswerT_co", covariant=True)

# Numbers of texts. Each window is sorted by length; windows of 128 translations are as fast as those of 1,024.
FIRST_WINDOW, LARGEST_WINDOW = 16, 256


class Answers(Protocol[AnswerT_co]):
    """The answers to a list of texts: a list or an array."""

    def __getitem__(self, index: int, /) -> AnswerT_co:
        """Return the answer to one text."""

    def __iter__(self) -> Iterator[AnswerT_co]:
        """Iterate over the answers."""


AnswersT = TypeVar("AnswersT", bound=Answers[Any])


def window_sizes(batch_size: int | None = None, largest: int = LARGEST_WINDOW) -> Iterator[int]:
    """Yield the sizes of the groups in which texts of an iterator are answered: small at first, for early answers.

    Args:
        batch_size: the maximum batch size; a group has at least this size. None means 1.
        largest: the number of texts to which groups grow.
    """
    size = FIRST_WINDOW
    while True:
        yield max(size, batch_size or 1)
        size = min(2 * size, largest)


def answer_each(
    texts: object,
    answer: Callable[[list[Any]], AnswersT],
    *,
    form: TextForm | None = None,
    is_paired: bool = False,
    batch_size: int | None = None,
    largest: int = LARGEST_WINDOW,
) -> AnswersT | Any:
    """Return one answer for one text, several answers for several texts, or an iterator of answers for an iterator.

    Args:
        texts: the argument of the caller: one text, several texts, or an iterator of texts.
        answer: function that returns the answers to a list of texts.
        form: another allowed form of a text besides a string, such as "a pair of texts". None means strings only.
        is_paired: True if a tuple of strings is one text (a pair), not several texts.
        batch_size: the maximum batch size, for iterators. None means the default.
        largest: the argument `largest` of `window_sizes`, for iterators.

    Raises:
        InputError: the argument is neither a text nor several texts.
    """
    if isinstance(texts, str) or (is_paired and isinstance(texts, tuple) and _are_texts(texts, form)):
        return answer([texts])[0]
    expected = f"a text{f' or {form}' if form else ''}"
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | Mapping):
        raise InputError(f"expected {expected}, or a list of them, got {type(texts).__name__}")

    def check_each(window: list[Any], first: int = 1) -> list[Any]:
        for number, text in enumerate(window, start=first):
            if not isinstance(text, str) and not _are_texts(text, form):
                raise InputError(nth_text(number) + f" is {text!r:.80}; expected {expected}")
        return [tuple(text) if form == PAIR and not isinstance(text, str) else text for text in window]

    if not isinstance(texts, Iterator):
        return answer(check_each(list(texts)))

    def answer_windows(rest: Iterator[Any]) -> Iterator[Any]:
        from clearhead.base.hooks import naming_texts  # imports torch, which a command needs only when it reads texts

        before = 0
        for size in window_sizes(batch_size, largest):
            window = check_each(list(islice(rest, size)), before + 1)
            if not window:
                return
            # Convert numbers of texts in the window to numbers among all texts.
            rows = range(before, before + len(window))
            with renaming(partial(count_from, before)), naming_texts(rows, are_rows=False):
                answers = answer(window)
            yield from answers
            before += len(window)

    return answer_windows(texts)


def count_from(before: int, reference: MessageReference) -> MessageReference:
    """Return a reference of a message with the number of a text among all texts: `before` texts come before these."""
    return replace(reference, number=reference.number + before) if reference.number else reference


def _are_texts(value: object, form: TextForm | None) -> bool:
    is_list = form is not None and isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    return is_list and (form != PAIR or len(value) == 2)  # type: ignore[arg-type]
