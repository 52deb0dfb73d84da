"""The tasks by their names: those of this package, and those of installed ones."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib import metadata
from typing import Final

from clearhead.base.errors import InputError, did_you_mean
from clearhead.spec.tasks.base import Family, Outputs, Task

BUILT_IN: Final = ("translate", "generate", "fill", "classify", "tag", "embed", "denoise", "answer")
"""One line here registers a task of this package."""
ENTRY_POINTS: Final = "clearhead.tasks"
"""The group of entry points by which a package has tasks of its own: KIND = "MODULE:TASK"."""


@cache
def task_kinds() -> tuple[str, ...]:
    """Return the names of all tasks, those of installed packages last."""
    return (*BUILT_IN, *sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - {*BUILT_IN}))


@cache
def find_task(kind: str) -> Task:
    """Return a task by its name.

    Raises:
        InputError: there is none, or the package that has it cannot be imported.
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
    """Return what is wrong with the name of a task that there is not."""
    return (
        f"there is no task '{kind}'{did_you_mean(kind, task_kinds())}; the tasks are {', '.join(task_kinds())}: another one needs the "
        "package that has it"
    )


@cache
def list_tasks() -> tuple[Task, ...]:
    """Return all tasks; one whose package cannot be imported is left out with a warning."""
    tasks = []
    for kind in task_kinds():
        try:
            tasks.append(find_task(kind))
        except InputError as error:
            warnings.warn(f"{error}", stacklevel=2)
    return tuple(tasks)


def tasks_with_outputs(outputs: Outputs, family: Family | None = None) -> tuple[Task, ...]:
    """Return the tasks whose head returns something, and that are for a family; the usual one is the first."""
    return tuple(
        task for task in list_tasks() if task.outputs == outputs and (family is None or family in task.families)
    )
