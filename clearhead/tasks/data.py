"""What the data of a task is: its tables of a run file, and its examples in a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from clearhead.data.sources.pairs import PAIR_FORMS
from clearhead.data.sources.run_file_tables import Form, Section
from clearhead.data.sources.tables import Examples
from clearhead.data.sources.texts import TEXT_FORMS
from clearhead.errors import InputError
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

    @property
    def shows_prefix(self) -> bool:
        """Whether a decoder attends to the whole prefix of a text."""
        return False

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

    Attributes:
        forms: in which the data can be named; the types of `train` and `valid` follow from them.
        holds_out: whether `valid` may be a number, which takes that share from the end of `train`.
        streams: whether the training text can be read and tokenized while the run goes on.
    """

    forms: ClassVar[tuple[type[Form], ...]]
    holds_out: ClassVar[bool] = True
    streams: ClassVar[bool] = False

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


class TextSection(DataSection):
    """The [data] table of tasks on plain text."""

    forms: ClassVar[tuple[type[Form], ...]] = TEXT_FORMS


class PairSection(DataSection):
    """The [data] table of tasks on pairs of texts."""

    forms: ClassVar[tuple[type[Form], ...]] = PAIR_FORMS
    holds_out: ClassVar[bool] = False

    max_ratio: Annotated[float, Field(ge=1.0)] | None = None


@dataclass(frozen=True)
class TaskData:
    """The data of a task.

    Attributes:
        task, data: its tables of a run file.
        examples: the forms of an example in a list: for each role the field that a message and a file name, in order;
            a text alone has no tuple around it.
        raw: the roles whose values are not texts.
    """

    task: type[TaskSection]
    data: type[DataSection]
    examples: tuple[Mapping[str, str], ...]
    raw: tuple[str, ...] = ()

    def parse_examples(self, examples: Any, *, name: str = "data") -> Examples:
        """Turn a list of examples into a source.

        Args:
            examples: tuples of the values of each role; texts, where there is one role.
            name: what a message calls the list.

        Raises:
            InputError: not a list, or an example of another form.
        """
        if isinstance(examples, str) or not isinstance(examples, Sequence):
            raise InputError(f"{name}: expected a list of examples, got {type(examples).__name__}")
        size = _size(examples[0]) if examples else None
        columns = next((form for form in self.examples if len(form) == size), self.examples[0])
        fields = [*columns.values()]
        records = []
        for number, example in enumerate(examples, start=1):
            values = (example,) if len(fields) == 1 else example
            if _size(values) != len(fields):
                raise InputError(f"{name}, example {number}: expected ({', '.join(fields)}), got {example!r:.80}")
            try:
                records.append(json.loads(json.dumps(dict(zip(fields, values, strict=True)))))
            except TypeError:
                raise InputError(f"{name}, example {number}: expected texts, got {example!r:.80}") from None
        return Examples(records, columns, self.raw, name)


PAIR_EXAMPLES: Final[tuple[Mapping[str, str], ...]] = ({"source": "source", "target": "target"},)
TEXT_EXAMPLES: Final[tuple[Mapping[str, str], ...]] = ({"text": "text"},)


def data_of(kind: str) -> TaskData:
    """Return the data of a task by its name.

    Raises:
        InputError: there is none, or the package that has it cannot be imported.
    """
    data: TaskData = find(kind).part("data").DATA
    return data


def _size(values: object) -> int | None:
    """Return the number of values of an example; None: it is not a sequence of values."""
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else None
