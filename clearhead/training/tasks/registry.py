"""The kinds of task: one file for each, with what it reads, what it learns and how it is measured."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import Any

from clearhead.training.tasks.base import TaskParts, TaskSetup

_HOMES = MappingProxyType(
    {
        "translate": "translate",
        "generate": "generate",
        "fill": "fill",
        "denoise": "denoise",
        "classify": "classify",
        "tag": "tag",
        "embed": "embed",
    }
)


def parts_of(setup: TaskSetup) -> TaskParts[Any]:
    """Prepare the data, tokenizers and model of a run, as its kind of task wants them.

    Raises:
        InputError: the data, the tokenizers or the sizes cannot be used.
    """
    home = importlib.import_module(f"clearhead.training.tasks.{_HOMES[setup.run_file.task.kind]}")
    parts: TaskParts[Any] = home.parts(setup)
    return parts
