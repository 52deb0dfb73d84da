"""The type checker of the tests' import hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype


def outer_functions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the types of a function; one that is made anew in every call costs more to prepare than to run."""
    return function if "<locals>" in function.__qualname__ else beartype(function)
