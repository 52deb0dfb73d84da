"""Registry of tasks by name: the built-in ones, and those of installed packages."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib import metadata
from typing import Final

from clearhead.base.errors import InputError, did_you_mean
from clearhead.spec.tasks.base import Family, Outputs, Task

BUILT_IN: Final = ("translate", "generate", "fill", "classify", "tag", "embed", "denoise", "answer")
"""The names of the built-in tasks."""
ENTRY_POINTS: Final = "clearhead.tasks"
"""The group of entry points by which a package provides tasks: KIND = "MODULE:TASK"."""


@cache
def task_kinds() -> tuple[str, ...]:
    """Return the names of all tasks; those of installed packages come last."""
    return (*BUILT_IN, *sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - {*BUILT_IN}))


@cache
def find_task(kind: str) -> Task:
    """Return the task of a name.

    Raises:
        InputError: there is no such task, or the package that provides it cannot be imported.
    """
    if kind in BUILT_IN:
        built_in: Task = importlib.import_module(f"clearhead.tasks.{kind}.task").TASK
        return built_in
    point = next((point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name == kind), None)
    if point is None:
        raise InputError(unknown_task_message(kind))
    try:
        loaded: object = point.load()
    except Exception as error:  # noqa: BLE001 - the code of another package
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"the task '{kind}' of {point.value} cannot be loaded ({reason}); update its package"
        ) from None
    if not isinstance(loaded, Task) or loaded.kind != kind:
        raise InputError(
            f"{point.value} is not the task '{kind}': expected a clearhead.spec.tasks.base.Task of this kind; update "
            "its package"
        )
    return loaded


def unknown_task_message(kind: str) -> str:
    """Return the error message for the name of an unknown task."""
    return (
        f"there is no task '{kind}'{did_you_mean(kind, task_kinds())}; available: {', '.join(task_kinds())}; a task of "
        "another package needs that package installed"
    )


@cache
def list_tasks() -> tuple[Task, ...]:
    """Return all tasks; a task that cannot be imported is left out, with a warning."""
    tasks = []
    for kind in task_kinds():
        try:
            tasks.append(find_task(kind))
        except InputError as error:
            warnings.warn(f"{error}", stacklevel=2)
    return tuple(tasks)


def tasks_with_outputs(outputs: Outputs, family: Family | None = None) -> tuple[Task, ...]:
    """Return the tasks with a kind of output that suit a family of models; the default task comes first."""
    return tuple(
        task for task in list_tasks() if task.outputs == outputs and (family is None or family in task.families)
    )
