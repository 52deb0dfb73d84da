"""The data of the task: its tables of a run file, and the rows that they name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import Field

from clearhead.base.errors import InputError, json_text
from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.run_file_tables import Filled, Form, RunFileSection, has_ending, user_path
from clearhead.data.sources.tables import WHOLE, DataTable, DelimitedFile, JsonLinesFile, Share, TableSource, read_table
from clearhead.data.task_tables import DataSection, LabelledExamples, PooledSection, TaskData


class Bounds(RunFileSection):
    """The least and the greatest number that a text can have; None: any."""

    least: float | None = None
    most: float | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """The same, with infinity for any."""
        return -math.inf if self.least is None else self.least, math.inf if self.most is None else self.most


ANY: Final = Bounds()


class RateTask(PooledSection):
    """The [task] table: kind, init and pool are in its base."""

    loss: Literal["absolute", "squared"] = "absolute"


class RateData(DataSection):
    """The [data] table: train, valid and max_length are in its base."""

    least: float | None = None
    most: float | None = None

    @property
    def bounds(self) -> Bounds:
        """The least and the greatest number that a text can have."""
        return Bounds(least=self.least, most=self.most)

    def faults(self) -> Iterator[tuple[str, str]]:
        """As of `DataSection`."""
        least, most = self.bounds.limits
        if least >= most:
            yield "most", f"= {most:g} must be above least = {least:g}"


class RatedText(Form):
    """How [data] names training and validation data: { text = "ratings.tsv", number = "stars" }."""

    text: Filled = Field(examples=["train.tsv"])
    number: Filled = "number"

    def as_source(self) -> TableSource:
        """Return the source of texts and numbers."""
        path, columns = user_path(self.text), {"text": "text", "number": self.number}
        if has_ending(path, ".tsv"):
            return DelimitedFile(path, columns, keys={"number": "number"})
        if has_ending(path, ".jsonl"):
            return JsonLinesFile(path, columns, raw=("number",), keys={"number": "number"})
        raise InputError(f"{path}: expected a name that ends in .tsv or .jsonl")


def read_rated(source: TableSource, share: Share = WHOLE, bounds: Bounds = ANY) -> DataTable:
    """Read texts, and their numbers as floats.

    Args:
        source: the source of the texts.
        share: the share of them to read, as for `read_table`.
        bounds: of the numbers.

    Raises:
        InputError: a number is none, or out of bounds.
    """
    rows = read_table(source, share, what="rated text", row_keys=lambda table: (_keys(table["text"]), None))
    numbers = [_number(value, rows.location(index), bounds) for index, value in enumerate(rows["number"])]
    return DataTable({"text": rows["text"], "number": numbers}, rows.numbers, rows.where)


def _keys(texts: Sequence[str]) -> list[list[str]]:
    """Return what keeps rows together when some are held out: equal texts; none of an empty one."""
    return [[text.strip()] if text.strip() else [] for text in texts]


def _number(value: object, location: str, bounds: Bounds) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{location}: the number is {json_text(value)}; expected a finite number")
    least, most = bounds.limits
    if not least <= number <= most:
        raise InputError(f"{location}: the number is {number:g}; expected {least:g} to {most:g}, as [data] says")
    return number


def _read_labelled_examples(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """Read what the options of `clearhead new` name."""
    table = {name: str(options[name]) for name in ("text", "number") if options[name] is not None}
    rows = read_rated(DATA.source(table))
    texts, numbers = rows["text"], rows["number"]
    return LabelledExamples(
        table=table,
        what="texts",
        texts=[(text,) for text in texts],
        keys=_keys(texts),
        record=lambda row: {"text": texts[row], "number": numbers[row]},
        facts=f"; numbers from {min(numbers):g} to {max(numbers):g}",
    )


DATA: Final = TaskData(
    task=RateTask,
    forms=(RatedText,),
    examples=ListedExamples(({"text": "text", "number": "number"},), raw=("number",)),
    data=RateData,
    labelled=_read_labelled_examples,
    read=lambda source, share, task: read_rated(source, share),
)
