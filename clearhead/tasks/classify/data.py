"""Data of text classification: texts, or pairs of texts, with labels."""

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
    """The [task] table of classification, with the kind of labels."""

    #: Kind of labels: one label per text, any number of labels, or a number.
    labels: LabelKind = "single_label"


class LabelledTable(Form):
    """The [data] keys for a table, JSON lines, or line-aligned files of texts, labels and, for pairs, second texts."""

    #: A .tsv, .csv or .jsonl file; or a file with one text per line.
    text: Filled = Field(examples=["train.tsv"])
    #: The column or field of the labels; for a file with one text per line, the file of the labels.
    labels: Column = Field(examples=["label"])
    #: The column or field of the texts.
    text_column: OptionalColumn = None
    #: The column, field or file of second texts.
    pair: OptionalColumn = None

    def as_source(self) -> TableSource:
        """Return the source that reads the columns, fields or files."""
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
                key("text_column") + f" needs a table, but the text is '{self.text}'; "
                "expected a name that ends in .tsv, .csv or .jsonl"
            )
        return AlignedFiles({"text": path, **{role: user_path(name) for role, name in names.items()}}, "labels")


class LabelledDataset(Form):
    """The [data] keys for a Hugging Face data set, or a Parquet file."""

    #: The name of the data set on the hub, a folder, or a Parquet file.
    dataset: Filled = Field(examples=["name"])
    #: The field of the labels.
    labels: Filled = Field(examples=["label"])
    #: The split of the data set.
    split: Filled = "train"
    #: The configuration, if the data set has several.
    config: Filled | None = None
    #: A branch, a tag or a commit on the hub; by default the newest.
    revision: Filled | None = None
    #: The field of the texts; by default text.
    field: Filled | None = None
    #: The field of second texts.
    pair: Filled | None = None

    def as_source(self) -> TableSource:
        """Return the source that reads the fields of the data set."""
        pair = {} if self.pair is None else {"pair": self.pair}
        fields = {"text": self.field or "text", "labels": self.labels, **pair}
        keys = _KEYS | {"text": "field"}
        return Dataset(self.dataset, self.split, fields, self.config, _RAW, keys, self.revision)


def _name(role: str, column: int | str) -> str:
    """Return a [data] value that names a field or a file; raise an error if it is a column number."""
    if isinstance(column, int):
        raise InputError(key(_KEYS[role]) + f" is {column}; expected the name of a field or a file")
    return column


def _is_delimited(path: Path | str) -> bool:
    """Return whether a file name ends in .tsv or .csv, so that columns can be given by number."""
    return has_ending(path, ".tsv", ".csv")


def read_labelled(source: TableSource, share: Share = WHOLE, *, kind: LabelKind = "single_label") -> DataTable:
    """Read examples into a table with the columns "text", "labels" and, for pairs of texts, "pair".

    Args:
        source: the source of the examples.
        share: the share of the rows to read, see `read_table`.
        kind: the kind of labels.

    Raises:
        InputError: a file, column or field is missing or unusable, or files have unequal line counts.
    """
    if isinstance(source, AlignedFiles) and not (labels := source.columns["labels"]).exists():
        raise InputError(
            f"{labels}: {explain_absent(labels)}; expected a file with a label for each line of "
            f"{source.columns['text']}; if that file is a table, its name must end in .tsv, .csv or .jsonl"
        )
    return read_table(source, share, what="labelled text", row_keys=lambda data: _group_keys(data, kind))


def _group_keys(data: DataTable, kind: LabelKind) -> tuple[list[list[str]], list[Hashable] | None]:
    """Return the text (or joined pair) and label of each example; a split keeps equal texts together.

    The labels are None for a regression.
    """
    texts = ["\n".join(texts).strip() for texts in zip(*text_columns(data), strict=True)]
    keys = [[text] if text else [] for text in texts]
    if kind == "regression":
        return keys, None
    # Unusable labels are refused later; they may not be hashable.
    return keys, [
        tuple(map(repr, label)) if isinstance(label, list | tuple) else repr(label) for label in data["labels"]
    ]


def text_columns(data: DataTable) -> list[list[str]]:
    """Return the columns of texts: one list for single texts; for pairs, the list of first and of second texts."""
    return [list(data[role]) for role in ("text", "pair") if role in data]


def labelled_texts(source: TableSource, share: Share = WHOLE, *, kind: LabelKind = "single_label") -> list[str]:
    """Return all texts of a source, without labels, to train a tokenizer."""
    return [text for column in text_columns(read_labelled(source, share, kind=kind)) for text in column]


def labelled_table(
    text: Path, labels: str | None, *, text_column: str | None, pair: str | None, split: str | None = "train"
) -> dict[str, Any]:
    """Return the [data] table for labelled texts that the command line names.

    Args:
        text: the file of the texts, or the name of a data set, see `named_dataset`.
        labels: the column or the file of the labels; None means the column of the training data.
        text_column: the column of the texts.
        pair: the column or the file of the second texts.
        split: the split of the data set, see `named_dataset`.
    """
    named = parse_dataset_name(text, split=split)
    if named is not None:
        fields = {"labels": labels, "field": named.field or text_column, "pair": pair}
        return {**named.table, **{key: value for key, value in fields.items() if value is not None}}
    values = {"labels": labels, "text_column": text_column, "pair": pair}
    named_columns = {key: value for key, value in values.items() if value is not None}
    # A column of a table is a name, or a number counted from 1, as in a run file.
    columns = {
        key: int(value) if _is_delimited(text) and value.isdecimal() else value for key, value in named_columns.items()
    }
    return {"text": str(text), **columns}


_FORMS: Final[tuple[type[Form], ...]] = (LabelledTable, LabelledDataset)
_EXAMPLES: Final = ListedExamples(
    ({"text": "text", "labels": "label"}, {"text": "text", "pair": "pair", "labels": "label"}), _RAW
)


def _read_labelled_examples(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """Read the training examples that the options of `clearhead new` name; splits keep the shares of the classes."""
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
        # Label smoothing and the baseline apply to classes only.
        return replace(described, unfit=("label_smoothing", "below"))
    return described


def _labels(data: DataTable, options: Mapping[str, Any], train: LabelledExamples | None) -> LabelSet:
    """Return the label set of the training data, after checking that it contains the labels of validation data."""
    # Imported late: it loads NumPy, which would delay the messages about faulty run files.
    from clearhead.tasks.classify.label_set import learn_labels

    if train is None:
        return learn_labels(data, _label_kind(data, options.get("label_kind")))
    labels: LabelSet = train.labels
    labels.encode(data)
    return labels


def _label_kind(data: DataTable, wanted: str | None) -> LabelKind:
    """Return the kind of labels that the user set, or derive it: lists, numbers with decimals, or names."""
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
    """Read labelled texts of the kind in [task]; a faulty kind is ignored, since the run file's check reports it."""
    kinds: tuple[LabelKind, ...] = get_args(LabelKind)
    kind = next((kind for kind in kinds if kind == task.get("labels")), kinds[0])
    return read_labelled(source, share, kind=kind)


DATA: Final = TaskData(ClassifyTask, _FORMS, _EXAMPLES, labelled=_read_labelled_examples, read=_read)
