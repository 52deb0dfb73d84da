"""What the data of a task is: its tables of a run file, and its examples in a list."""

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
    """The [task] table: the kind of the task, the initial model, and the keys of one kind.

    A key whose default depends on other keys is None, and `defaults` decides it.
    """

    #: What the model learns to do; it decides which keys [task] and [data] have.
    kind: TaskKind
    #: The checkpoint or run to start from, with its own model and tokenizer; empty: from scratch.
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

    #: Which vector stands for a text: that of the first or last token, or the mean of all.
    pool: Literal["first", "mean", "last"] | None = None

    def defaults(self, family: Family) -> dict[str, object]:
        """Return the usual pooling of the stacks, which are not known here for an initial model."""
        if self.init:
            return {}
        return {"pool": "mean" if family == "encoder" else "last"}


class DataSection(RunFileSection):
    """The [data] table: training and validation data, and the keys of one kind of task.

    A number for `valid` holds out that share of `train`: rows of a table are drawn at random and by label, equal texts
    stay together, and running text is cut at its end. The types of both follow from the forms of a task.
    """

    #: The training data, in one of the forms below.
    train: Form
    #: The validation data, in one of the forms below, or the share of the training data to hold out: rows of a table
    #: at random, or the end of running text.
    valid: Form | float
    #: Longest text in tokens, special ones included.
    max_length: Annotated[int, Field(ge=2)] = 128
    # Every run directory has it in its run file, whatever the task.
    #: Whether the training text is read and tokenized while the run goes on, as a text larger than the disk must be.
    stream: bool = False

    def defaults(self) -> dict[str, object]:
        """Return the defaults that depend on other keys."""
        return {}

    def faults(self) -> Iterator[tuple[str, str]]:
        """Go through what is wrong between the keys: the name of a key, and the sentence about it."""
        yield from ()


class PairSection(DataSection):
    """The [data] table of tasks on pairs of texts."""

    #: How many times as long as the other a side of a training pair may be, in tokens; longer pairs are left out.
    max_ratio: Annotated[float, Field(ge=1.0)] | None = None


@dataclass(frozen=True)
class LabelledExamples:
    """Examples with labels of their own, as `clearhead new` looks at them and divides them.

    Attributes:
        table: of [data], which names them.
        what: what messages call several of them.
        texts: what is counted of them.
        keys: of each example: examples that share one stay in one part; none where the example is empty.
        record: returns an example, by its number, as the JSON line of a copy.
        facts: what else there is to say of them.
        columns: keys of [data] that name the fields of a copy, beside its text.
        groups: the label of each example, or a tuple of several, of which both parts have their share; None: all are
            alike.
        labels: what validation examples must have, for `TaskData.labelled`.
        settings: keys of [task] that follow from them.
        unfit: keys of [train] that do not suit them.
        few: what a message about too few of them calls them, where it says more than `what`.
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
    """The data of a task.

    Attributes:
        task: its [task] table.
        forms: in which its data can be named.
        examples: its examples in a list.
        data: its [data] table.
        streams: whether the training text can be read and tokenized while the run goes on.
        labelled: reads the examples that the data options of `clearhead new` name, by the names of the options; for
            validation data with the training data, else None. None: the data are pairs or running text.
        read: reads a share of a source, with the [task] table, as `read_table` does. None: running text.
        num_signs: how many signs for what is missing from a text, masks or sentinels, the vocabulary of a model has
            whose texts have a length in tokens.
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
        """Return which examples to hold out for validation, counted from 0; none of a single text.

        Args:
            examples: the training examples.
            share: the share to hold out, above 0 and below 1.
            task: the [task] table.

        Raises:
            InputError: an example is unusable, or none can be held out.
        """
        count = len(examples.records)
        if self.read is None:
            return set(range(count - max(1, round(share * count)), count)) if count > 1 else set()
        table = self.read(self.examples.as_source(examples), (1.0 - share, 1.0), task)
        return {number - 1 for number in table.numbers}

    def source(self, data: object) -> Any:
        """Return the source of some data.

        Args:
            data: names it, as under [data] in a run file; or a list of examples.

        Raises:
            InputError: the table or an example is not of the form of the task.
        """
        if isinstance(data, Mapping):
            return parse_table(data, self.forms).as_source()
        return self.examples.as_source(self.examples.parse(data))


PAIR_EXAMPLES: Final = ListedExamples(({"source": "source", "target": "target"},))
TEXT_EXAMPLES: Final = ListedExamples(({"text": "text"},), as_source=TextRows)


def data_of(kind: str) -> TaskData:
    """Return the data of a task by its name.

    Raises:
        InputError: there is none, or the package that has it cannot be imported.
    """
    data: TaskData = find_task(kind).module("data").DATA
    return data
