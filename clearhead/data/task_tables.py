"""Data of a task: its tables in a run file, and the format of its examples in a list."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.run_file_tables import Form, RunFileSection, parse_table
from clearhead.data.sources.tables import DataTable, Examples, Share
from clearhead.data.sources.texts import TextRows
from clearhead.spec.tasks.base import Family, Value
from clearhead.spec.tasks.record import TaskKind
from clearhead.spec.tasks.registry import find_task


class TaskSection(RunFileSection):
    """The [task] table: the kind of the task, the initial model, and the keys of this kind.

    If the default of a key depends on other keys, the key is None until `defaults` sets it.
    """

    #: The kind of task that the model learns; it decides the other keys of [task] and [data].
    kind: TaskKind
    #: The checkpoint or run to start from, with its model and tokenizer; empty: from scratch.
    init: str = ""

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The language codes of source and target, for a multilingual initial model."""
        return None, None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the defaults that depend on other keys.

        Args:
            family: the family of the model; with an initial model, the default family of the task.
        """
        return {}

    def faults(self, family: Family) -> Iterator[tuple[str, str]]:
        """Yield the conflicts between keys: the name of a key, and the message about it."""
        yield from ()


class PooledSection(TaskSection):
    """The [task] table of a task whose head reads one vector per text."""

    #: The vector that represents a text: the first token, the last token, or the mean of all.
    pool: Literal["first", "mean", "last"] | None = None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the default pooling of the family; none with an initial model, whose stacks are not known."""
        if self.init:
            return {}
        return {"pool": "mean" if family == "encoder" else "last"}


class DataSection(RunFileSection):
    """The [data] table: training and validation data, and the keys of one kind of task.

    A number for `valid` holds out that share of `train`. Rows of a table are drawn at random and by label, and equal
    texts stay together; running text is cut at its end. The forms of a task decide the types of `train` and `valid`.
    """

    #: The training data, in one of the forms below.
    train: Form
    #: The validation data, in one of the forms below, or the share of the training data to hold out. Rows of a table
    #: are drawn at random; running text is cut at its end.
    valid: Form | float
    #: The longest text in tokens, special tokens included.
    max_length: Annotated[int, Field(ge=2)] = 128
    # Every task has this key, so that every resolved run file contains it.

    #: Whether the training text is read and tokenized during the run, for a text larger than the disk.
    stream: bool = False

    def defaults(self) -> dict[str, object]:
        """Return the defaults that depend on other keys."""
        return {}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield the conflicts between keys: the name of a key, and the message about it."""
        yield from ()


class PairSection(DataSection):
    """The [data] table of a task on pairs of texts."""

    #: The maximum ratio of the longer side of a training pair to the shorter, in tokens; other pairs are left out.
    max_ratio: Annotated[float, Field(ge=1.0)] | None = None


@dataclass(frozen=True)
class LabelledExamples:
    """Labelled examples that `clearhead new` inspects, and divides into training and validation data.

    Attributes:
        table: the [data] table that names the examples.
        what: the plural noun for the examples in messages.
        texts: the texts of each example, for counts of words and characters.
        keys: the keys of each example; examples with a common key go to the same split. An empty example has no keys.
        record: a function from the number of an example to its JSON object, for a copied file.
        facts: a sentence with further facts about the examples.
        columns: the keys of [data] that name the fields of a copied file, besides the text.
        groups: the label of each example, or a tuple of labels. Training and validation data get their share of each
            label. None means that the examples have no labels.
        labels: the labels that validation examples may have, for `TaskData.labelled`.
        settings: the keys of [task] with values that follow from the examples.
        unfit: the keys of [train] that do not suit the examples.
        few: the noun for the examples in a message that there are too few; empty means `what`.
    """

    table: Mapping[str, Value]
    what: str
    texts: Sequence[tuple[str, ...]]
    keys: Sequence[Sequence[Hashable]]
    record: Callable[[int], dict[str, object]]
    facts: str
    columns: Mapping[str, Value] = field(default_factory=dict)
    groups: Sequence[Hashable] | None = None
    labels: Any = None
    settings: Mapping[str, Value] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()
    few: str = ""


@dataclass(frozen=True)
class TaskData:
    """The data of a task: its tables, forms and functions that read examples.

    Attributes:
        task: the type of the [task] table.
        forms: the forms of table that can name the data.
        examples: the format of the examples in a list.
        data: the type of the [data] table.
        streams: True if the training text can be read and tokenized during the run.
        labelled: a function that reads the labelled examples that options of `clearhead new` name. For validation
            data, its second argument is the training data, else None. The field is None if the data are pairs or
            running text.
        read: a function that reads a share of a source with the [task] table, like `read_table`. None means that the
            data are running text.
        num_signs: a function from the length of a text in tokens to the number of mask or sentinel tokens that the
            vocabulary needs.
    """

    task: type[TaskSection]
    forms: tuple[type[Form], ...]
    examples: ListedExamples
    data: type[DataSection] = DataSection
    streams: bool = False
    labelled: Callable[[Mapping[str, Any], LabelledExamples | None], LabelledExamples] | None = None
    read: Callable[[Any, Share, Mapping[str, Any]], DataTable] | None = None
    num_signs: Callable[[int], int] = lambda length: 0

    def hold_out(self, examples: Examples, share: float, task: Mapping[str, Any]) -> set[int]:
        """Return the indices of examples to hold out for validation, from 0; empty if the data is one running text.

        Args:
            examples: the training examples.
            share: the share to hold out, above 0 and below 1.
            task: the [task] table.

        Raises:
            InputError: an example is wrong, or no example can be held out.
        """
        count = len(examples.records)
        if self.read is None:
            return set(range(count - max(1, round(share * count)), count)) if count > 1 else set()
        table = self.read(self.examples.as_source(examples), (1.0 - share, 1.0), task)
        return {number - 1 for number in table.numbers}

    def source(self, data: object) -> Any:
        """Return the source that reads the data that a table names, or examples in a list.

        Args:
            data: a table that names the data, as in [data] of a run file; or a list of examples.

        Raises:
            InputError: the table or an example does not have a form of the task.
        """
        if isinstance(data, Mapping):
            return parse_table(data, self.forms).as_source()
        return self.examples.as_source(self.examples.parse(data))


PAIR_EXAMPLES: Final = ListedExamples(({"source": "source", "target": "target"},))
TEXT_EXAMPLES: Final = ListedExamples(({"text": "text"},), as_source=TextRows)


def data_of(kind: str) -> TaskData:
    """Return the data of a task by the name of its kind.

    Raises:
        InputError: there is no such task, or its package cannot be imported.
    """
    data: TaskData = find_task(kind).module("data").DATA
    return data
