"""The data of text classification: texts, or pairs of texts, with labels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import Field

from clearhead.base.errors import InputError, did_you_mean, key
from clearhead.base.files import explain_absent
from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.named import parse_dataset_name
from clearhead.data.sources.run_file_tables import (
    Column,
    Filled,
    Form,
    OptionalColumn,
    has_ending,
    parse_table,
    user_path,
)
from clearhead.data.sources.tables import (
    WHOLE,
    AlignedFiles,
    Dataset,
    DataTable,
    DelimitedFile,
    JsonLinesFile,
    Share,
    TableSource,
    read_table,
)
from clearhead.data.task_tables import LabelledExamples, PooledSection, TaskData
from clearhead.spec.tasks.record import LabelKind

if TYPE_CHECKING:
    from clearhead.tasks.classify.label_set import LabelSet

_RAW: Final = ("labels",)
_KEYS: Final = {"text": "text_column", "labels": "labels", "pair": "pair"}


class ClassifyTask(PooledSection):
    """The [task] table: what the labels are."""

    #: Whether a text has one label, any number of them, or a number.
    labels: LabelKind = "single_label"


class LabelledTable(Form):
    """A table or JSON lines, whose columns are chosen; or a text in each line, with files of labels and of pairs."""

    #: A .tsv, .csv or .jsonl file; or a file with a text in each line.
    text: Filled = Field(examples=["train.tsv"])
    #: The column or field of the labels; for a text in each line the file of the labels.
    labels: Column = Field(examples=["label"])
    #: The column or field of the texts.
    text_column: OptionalColumn = None
    #: The column, field or file of second texts.
    pair: OptionalColumn = None

    def as_source(self) -> TableSource:
        """Return the source of the columns, fields or files."""
        path = user_path(self.text)
        pair = {} if self.pair is None else {"pair": self.pair}
        if _is_delimited(path):
            default = "text" if isinstance(self.labels, str) else None
            columns = {"labels": self.labels, **pair, "text": self.text_column or default}
            separator = "\t" if has_ending(path, ".tsv") else ","
            return DelimitedFile(path, columns, separator, _KEYS, is_distinct=True)
        names = {role: _name(role, column) for role, column in {"labels": self.labels, **pair}.items()}
        if has_ending(path, ".jsonl"):
            return JsonLinesFile(path, {"text": _name("text", self.text_column or "text"), **names}, _RAW, _KEYS)
        if self.text_column is not None:
            raise InputError(
                key("text_column") + f" is for a table, but the text is '{self.text}'; "
                "expected a name that ends in .tsv, .csv or .jsonl"
            )
        return AlignedFiles({"text": path, **{role: user_path(name) for role, name in names.items()}}, "labels")


class LabelledDataset(Form):
    """A Hugging Face dataset by name, or a Parquet file."""

    #: Its name on the hub, a folder, or a Parquet file.
    dataset: Filled = Field(examples=["name"])
    #: The field of the labels.
    labels: Filled = Field(examples=["label"])
    #: The part of it.
    split: Filled = "train"
    #: Its configuration, where it has several.
    config: Filled | None = None
    #: A branch, a tag or a commit of the hub; without it the newest.
    revision: Filled | None = None
    #: The field of the texts; without it text.
    field: Filled | None = None
    #: The field of second texts.
    pair: Filled | None = None

    def as_source(self) -> TableSource:
        """Return the source of the fields of the dataset."""
        pair = {} if self.pair is None else {"pair": self.pair}
        fields = {"text": self.field or "text", "labels": self.labels, **pair}
        keys = _KEYS | {"text": "field"}
        return Dataset(self.dataset, self.split, fields, self.config, _RAW, keys, self.revision)


def _name(role: str, column: int | str) -> str:
    """Return a field or a file, which has no number."""
    if isinstance(column, int):
        raise InputError(key(_KEYS[role]) + f" is {column}; expected a text that is not empty")
    return column


def _is_delimited(path: Path | str) -> bool:
    """Tell whether a file has columns, which may be given by their numbers."""
    return has_ending(path, ".tsv", ".csv")


def read_labelled(source: TableSource, share: Share = WHOLE, *, kind: LabelKind = "single_label") -> DataTable:
    """Read the examples of a source, as columns "text", "labels" and, for pairs of texts, "pair".

    Args:
        source: the source of the examples.
        share: the share of them to read, as for `read_table`.
        kind: the kind of their labels.

    Raises:
        InputError: a file, column or field is missing or unusable, or files have unequal line counts.
    """
    if isinstance(source, AlignedFiles) and not (labels := source.columns["labels"]).exists():
        raise InputError(
            f"{labels}: {explain_absent(labels)}; expected a file with a label for each line of {source.columns['text']}, or a "
            "column where the name of that file ends in .tsv, .csv or .jsonl"
        )
    return read_table(source, share, what="labelled text", row_keys=lambda data: _group_keys(data, kind))


def _group_keys(data: DataTable, kind: LabelKind) -> tuple[list[list[str]], list[Hashable] | None]:
    """Return the text of each example, or its two texts as one, and its labels unless they are numbers."""
    texts = ["\n".join(texts).strip() for texts in zip(*text_columns(data), strict=True)]
    keys = [[text] if text else [] for text in texts]
    if kind == "regression":
        return keys, None
    # What is no label is refused later, and may not be hashable.
    return keys, [
        tuple(map(repr, label)) if isinstance(label, list | tuple) else repr(label) for label in data["labels"]
    ]


def text_columns(data: DataTable) -> list[list[str]]:
    """Return the texts of labelled data, or the first and the second texts of pairs."""
    return [list(data[role]) for role in ("text", "pair") if role in data]


def labelled_texts(source: TableSource, share: Share = WHOLE, *, kind: LabelKind = "single_label") -> list[str]:
    """Return the texts of a source without their labels, those of pairs one by one, to train a tokenizer on."""
    return [text for column in text_columns(read_labelled(source, share, kind=kind)) for text in column]


def labelled_table(
    text: Path, labels: str | None, *, text_column: str | None, pair: str | None, split: str | None = "train"
) -> dict[str, Any]:
    """Return the [data] table of labelled texts that are named on the command line.

    Args:
        text: the file of the texts, or a data set as `named_dataset` reads it.
        labels: the column of their labels, or a file of them; None: that of the training data.
        text_column: the column of the texts.
        pair: the column of the second texts, or a file of them.
        split: as for `named_dataset`.
    """
    named = parse_dataset_name(text, split=split)
    if named is not None:
        fields = {"labels": labels, "field": named.field or text_column, "pair": pair}
        return {**named.table, **{key: value for key, value in fields.items() if value is not None}}
    values = {"labels": labels, "text_column": text_column, "pair": pair}
    named_columns = {key: value for key, value in values.items() if value is not None}
    # As in a run file, a column of a table is a name or a number counted from 1.
    columns = {
        key: int(value) if _is_delimited(text) and value.isdecimal() else value for key, value in named_columns.items()
    }
    return {"text": str(text), **columns}


_FORMS: Final[tuple[type[Form], ...]] = (LabelledTable, LabelledDataset)
_EXAMPLES: Final = ListedExamples(
    ({"text": "text", "labels": "label"}, {"text": "text", "pair": "pair", "labels": "label"}), _RAW
)


def _read_labelled_examples(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """As of `TaskData.labelled`; both parts have shares of each class."""
    text_column, pair = options.get("text_column"), options.get("pair")
    table = labelled_table(options["text"], options["labels"], text_column=text_column, pair=pair)
    data = read_labelled(parse_table(table, _FORMS).as_source())
    labels = _labels(data, options, train)
    fields = {role: role for role in ("text", "pair") if role in data} | {"labels": "label"}
    examples = list(zip(*text_columns(data), strict=True))
    keys, groups = _group_keys(data, labels.kind)
    described = LabelledExamples(
        table=table,
        what="texts",
        texts=[(" ".join(texts),) for texts in examples],
        keys=keys,
        record=lambda row: {name: data[role][row] for role, name in fields.items()},
        facts=f"; {labels.describe(data)}",
        columns={role: name for role, name in fields.items() if role != "text"},
        groups=groups,
        labels=labels,
        settings={"labels": labels.kind},
    )
    if labels.kind == "regression":
        # A baseline that counts labels has no use for numbers either.
        return replace(described, unfit=("label_smoothing", "below"))
    return described


def _labels(data: DataTable, options: Mapping[str, Any], train: LabelledExamples | None) -> LabelSet:
    """Return the labels of training examples; those of validation examples must be among them."""
    # It loads NumPy, for which a fault in a run file should not wait.
    from clearhead.tasks.classify.label_set import learn_labels

    if train is None:
        return learn_labels(data, _label_kind(data, options.get("label_kind")))
    labels: LabelSet = train.labels
    labels.encode(data)
    return labels


def _label_kind(data: DataTable, wanted: str | None) -> LabelKind:
    """Return the kind that is wanted; else tell lists of labels, and numbers that are not classes, from names."""
    kinds: tuple[LabelKind, ...] = get_args(LabelKind)
    for kind in kinds:
        if kind == wanted:
            return kind
    if wanted is not None:
        raise InputError(f"--label-kind is '{wanted}'; expected one of {', '.join(kinds)}{did_you_mean(wanted, kinds)}")
    labels = data["labels"]
    if any(isinstance(label, list | tuple) for label in labels):
        return "multi_label"
    try:
        numbers = [float(label) for label in labels if isinstance(label, str | int | float)]
    except ValueError:
        return "single_label"
    return "regression" if len(numbers) == len(data) and any(number % 1 for number in numbers) else "single_label"


def _read(source: TableSource, share: Share, task: Mapping[str, Any]) -> DataTable:
    """As `TaskData.read`; a faulty kind of labels is left to the check of the run file."""
    kinds: tuple[LabelKind, ...] = get_args(LabelKind)
    kind = next((kind for kind in kinds if kind == task.get("labels")), kinds[0])
    return read_labelled(source, share, kind=kind)


DATA: Final = TaskData(ClassifyTask, _FORMS, _EXAMPLES, labelled=_read_labelled_examples, read=_read)
