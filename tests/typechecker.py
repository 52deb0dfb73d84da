"""The import hook of the tests: each call of the package is checked against its annotations, types and shapes.

The hook of jaxtyping puts `jaxtyping.jaxtyped` on every function. That decorator checks the arguments before the
call and again with the result, and binds them to the signature. This takes a fifth of the time of all tests. Here a
function and its checks are one, and arguments are checked once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

TWICE = jaxtyping.jaxtyped
SCOPE = jaxtyping.jaxtyped("context")
"""The context in which an axis name has one size."""
CHECKED = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install(package: str) -> None:
    """Check the calls of a package that is not imported yet."""
    jaxtyping.jaxtyped = lambda typechecker: add_checks  # type: ignore[assignment]
    jaxtyping.install_import_hook(package, None)


def add_checks(subject: Any) -> Any:
    """Check the calls of a function, or of the `__init__` of a dataclass."""
    if inspect.isclass(subject):
        if dataclasses.is_dataclass(subject) and "__init__" in vars(subject):
            subject.__init__ = add_checks(subject.__init__)
        return subject
    if "<locals>" in subject.__qualname__:
        return subject  # a new function in every call, which would cost more to prepare than to run
    # The body of a generator runs after its call. An axis "{rows}" is an argument, which jaxtyping looks up.
    if inspect.isgeneratorfunction(subject) or any(
        "{" in str(annotation) for annotation in subject.__annotations__.values()
    ):
        return TWICE(subject, typechecker=lambda function: first_use(function, lambda: CHECKED(function)))
    return first_use(subject, lambda: with_checks(subject))


def first_use(function: Callable[..., Any], prepare: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Prepare the checks at the first call: each worker imports most of the package, but calls little of it."""
    prepared = functools.cache(prepare)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return prepared()(*arguments, **named)

    return call


def with_checks(function: FunctionType) -> Callable[..., Any]:
    """Return a copy of a function that checks its arguments and its result."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__qualname__, copy.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    copy.__annotations__ = resolve_annotations(function)
    checked = CHECKED(copy)
    if not any(map(has_axes, copy.__annotations__.values())):
        return checked

    def call(*arguments: Any, **named: Any) -> Any:
        with SCOPE:
            return checked(*arguments, **named)

    return call


def resolve_annotations(function: FunctionType) -> dict[str, Any]:
    """Return the annotations of a function as types; names imported only for type checkers become Any."""
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():

        def holder() -> None: ...

        holder.__annotations__ = {"value": annotation}
        try:
            hints[name] = get_type_hints(holder, function.__globals__, include_extras=True)["value"]
        except (NameError, AttributeError, TypeError):
            hints[name] = Any
    return hints


def has_axes(hint: Any) -> bool:
    """Return whether a type is, or contains, an array with a shape."""
    return (inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)) or any(map(has_axes, get_args(hint)))
