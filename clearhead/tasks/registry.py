"""The tasks by their names: those of this package, and those of installed ones."""

from __future__ import annotations

import importlib
from functools import cache
from importlib import metadata
from typing import Final

from clearhead.errors import InputError, nearest
from clearhead.tasks.base import Family, Outputs, Task

BUILT_IN: Final = ("translate", "generate", "fill", "classify", "tag", "embed", "denoise", "answer")
"""One line here registers a task of this package."""
ENTRY_POINTS: Final = "clearhead.tasks"
"""The group of entry points by which a package has tasks of its own: KIND = "MODULE:TASK"."""


@cache
def kinds() -> tuple[str, ...]:
    """Return the names of all tasks, those of installed packages last."""
    return (*BUILT_IN, *sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - {*BUILT_IN}))


@cache
def find(kind: str) -> Task:
    """Return a task by its name.

    Raises:
        InputError: there is none, or the package that has it cannot be imported.
    """
    if kind in BUILT_IN:
        found: Task = importlib.import_module(f"clearhead.tasks.{kind}.task").TASK
        return found
    point = next((point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name == kind), None)
    if point is None:
        raise InputError(
            f"there is no task '{kind}'{nearest(kind, kinds())}; the tasks are {', '.join(kinds())}, and those of "
            "installed packages"
        )
    try:
        loaded: object = point.load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"the task '{kind}' of {point.value} cannot be loaded: {error}") from None
    if not isinstance(loaded, Task) or loaded.kind != kind:
        raise InputError(f"{point.value} is not the task '{kind}': expected an instance of clearhead.tasks.base.Task")
    return loaded


def every() -> tuple[Task, ...]:
    """Return all tasks."""
    return tuple(map(find, kinds()))


def with_outputs(outputs: Outputs, family: Family | None = None) -> tuple[Task, ...]:
    """Return the tasks whose head returns something, and that are for a family; the usual one is the first."""
    return tuple(task for task in every() if task.outputs == outputs and (family is None or family in task.families))
