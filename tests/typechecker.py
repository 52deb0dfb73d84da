"""The type checker of the tests' import hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from beartype import beartype


def outer_functions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the types of a function; one that is made anew in every call costs more to prepare than to run.

    The check is prepared when the function is first called: most of the package is imported by every worker, and much
    of it is called by one.
    """
    if "<locals>" in function.__qualname__:
        return function
    prepared = functools.cache(lambda: beartype(function))

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        return prepared()(*arguments, **named)

    return checked
