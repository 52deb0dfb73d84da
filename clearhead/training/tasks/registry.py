"""The kinds of task, one file each: its data, its loss and its validation."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from clearhead.data.sources.reading import reading_of
from clearhead.training.tasks.base import TaskParts, TaskSetup


def parts_of(setup: TaskSetup) -> TaskParts[Any]:
    """Prepare the data, tokenizers and model of a run by the file of its kind of task.

    Raises:
        InputError: the data, the tokenizers or the sizes cannot be used.
    """
    task = importlib.import_module(f"clearhead.training.tasks.{setup.run_file.task.kind}")
    parts: TaskParts[Any] = task.parts(setup)
    table = setup.run_file.data.train.model_dump(exclude_none=True)
    return replace(parts, record=parts.record.model_copy(update={"reading": reading_of(table)}))
