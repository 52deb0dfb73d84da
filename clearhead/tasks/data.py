"""What the data of a task is: its tables of a run file, and its examples in a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.run_file_tables import Form, Section
from clearhead.task import TaskKind
from clearhead.tasks.base import Family
from clearhead.tasks.registry import find


class TaskSection(Section):
    """The [task] table: the kind of the task, the initial model, and the keys of one kind.

    A key whose default depends on other keys is None, and `defaults` decides it.
    """

    kind: TaskKind
    init: str = ""

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The codes of the source and target language of a multilingual initial model."""
        return None, None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the defaults that depend on other keys.

        Args:
            family: of the model; the usual one of the task where an initial model has its own.
        """
        return {}

    def faults(self, family: Family) -> Iterator[tuple[str, str]]:
        """Go through what is wrong between the keys: the name of a key, and the sentence about it."""
        yield from ()


class PooledSection(TaskSection):
    """The [task] table of tasks whose head reads one vector of a text."""

    pool: Literal["first", "mean", "last"] | None = None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the usual pooling of the stacks, which are not known here for an initial model."""
        return {} if self.init else {"pool": "mean" if family == "encoder" else "last"}


class DataSection(Section):
    """The [data] table: training and validation data, and the keys of one kind of task.

    A number for `valid` takes that share from the end of `train`. The types of both follow from the forms of a task.
    """

    train: Form
    valid: Form | float
    max_length: Annotated[int, Field(ge=2)] = 128
    # Every run directory has it in its run file, whatever the task.
    stream: bool = False

    def defaults(self) -> dict[str, object]:
        """Return the defaults that depend on other keys."""
        return {}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Go through what is wrong between the keys: the name of a key, and the sentence about it."""
        yield from ()


class PairSection(DataSection):
    """The [data] table of tasks on pairs of texts."""

    max_ratio: Annotated[float, Field(ge=1.0)] | None = None


@dataclass(frozen=True)
class TaskData:
    """The data of a task.

    Attributes:
        task: its [task] table.
        forms: in which its data can be named.
        examples: its examples in a list.
        data: its [data] table.
        streams: whether the training text can be read and tokenized while the run goes on.
    """

    task: type[TaskSection]
    forms: tuple[type[Form], ...]
    examples: ListedExamples
    data: type[DataSection] = DataSection
    streams: bool = False


PAIR_EXAMPLES: Final = ListedExamples(({"source": "source", "target": "target"},))
TEXT_EXAMPLES: Final = ListedExamples(({"text": "text"},))


def data_of(kind: str) -> TaskData:
    """Return the data of a task by its name.

    Raises:
        InputError: there is none, or the package that has it cannot be imported.
    """
    data: TaskData = find(kind).part("data").DATA
    return data
