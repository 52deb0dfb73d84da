"""What `clearhead new` finds in the data of each kind of task, and which part of it is held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import InputError
from clearhead.recipes.survey import Survey, fitting_sizes, fitting_text_sizes, survey, survey_text
from clearhead.recipes.write import Plan, Value, labelled_file, text_file, translation_file

if TYPE_CHECKING:
    from clearhead.data.sources.tables import Table
    from clearhead.task import LabelKind

MOST_HELD_OUT = 1_000
LEAST_EXAMPLES = 20
LEAST_CHARACTERS = 1_000
PARTS = ("train", "valid")
PAIRED, RUNNING = ("translate", "embed"), ("generate", "fill", "denoise")
# For up to 3,000 labelled texts or pairs, up to 50,000, up to 500,000, and more.
LABELLED_EPOCHS = (40, 20, 8, 4)


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        task: the kind of task.
        source, target, text, labels, text_column, pair, document: the training data.
        valid_source, valid_target, valid_text, valid_labels: the validation data.
        run: the run directory; None: it is named after the data.
        folder: where held-out data goes.
    """

    task: str
    source: Path | None
    target: Path | None
    text: Path | None
    labels: str | None
    text_column: str | None
    pair: str | None
    document: str | None
    valid_source: Path | None
    valid_target: Path | None
    valid_text: Path | None
    valid_labels: str | None
    run: str | None
    folder: Path

    def check_options(self) -> None:
        """Refuse options that the task does not take, and ask for those that it needs.

        Raises:
            InputError: one sentence that names them.
        """
        needed, optional = {
            "classify": (("text", "labels"), ("text_column", "pair", "valid_text", "valid_labels")),
            "tag": (("text",), ("valid_text",)),
            **dict.fromkeys(PAIRED, (("source", "target"), ("valid_source", "valid_target"))),
            **dict.fromkeys(RUNNING, (("text",), ("document", "valid_text"))),
        }[self.task]
        given = [name for name, value in vars(self).items() if value is not None and name not in _OF_EVERY_TASK]
        unused = [name for name in given if name not in (*needed, *optional)]
        way = f"new {self.task} takes {' '.join(f'{_flag(name)} F' for name in needed)}"
        if unused:
            raise InputError(f"{', '.join(map(_flag, unused))} cannot be used here: {way}")
        missing = [_flag(name) for name in needed if name not in given]
        if missing:
            raise InputError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: {way}")
        if (self.valid_source is None) != (self.valid_target is None):
            raise InputError("--valid-source and --valid-target belong together: give both, or neither")
        if self.valid_labels is not None and self.valid_text is None:
            raise InputError("--valid-labels has no effect without --valid-text, the texts they belong to")

    @property
    def holds_out(self) -> bool:
        """Whether a part of the training data is copied into a folder for validation."""
        return self.task not in RUNNING and self.valid_source is None and self.valid_text is None


_OF_EVERY_TASK = ("task", "run", "folder")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Draft:
    """A run file that is not written yet.

    Attributes:
        text: of the run file.
        run: the run directory it names.
        counts: how much data there is, and how much of it is held out.
        messages: what was found.
        files: data to be written beside it.
    """

    text: str
    run: str
    counts: Mapping[str, int | float]
    messages: Sequence[str]
    files: Mapping[Path, Sequence[str]] = field(default_factory=dict)


def draft(wanted: Wanted) -> Draft:
    """Look at the data and write out a run file that fits it.

    Raises:
        InputError: the data is unusable, or there is too little of it.
    """
    if wanted.task in PAIRED:
        return _of_pairs(wanted)
    if wanted.task in RUNNING:
        return _of_running_text(wanted)
    return _of_classes(wanted) if wanted.task == "classify" else _of_tags(wanted)


@dataclass(frozen=True)
class _HeldOut:
    """Which examples go where; every k-th is held out, and no more than a score that can be trusted needs."""

    every: int
    rows: Mapping[str, list[int]]

    @classmethod
    def of(cls, count: int, holds_out: bool) -> _HeldOut:
        every = max(10, -(-count // MOST_HELD_OUT)) if holds_out else 0
        held = [bool(every) and row % every == every - 1 for row in range(count)]
        rows = {part: [row for row in range(count) if held[row] is (part == "valid")] for part in PARTS}
        return cls(every, rows)

    @property
    def count(self) -> int:
        return len(self.rows["valid"])

    def note(self, what: str) -> str:
        return f"{self.count} {what} held out of yours: every {self.every}th" if self.every else ""

    def messages(self, what: str, folder: Path) -> list[str]:
        if not self.every:
            return []
        return [
            f"held out {self.count} {what} for validation, every {self.every}th one; "
            f"training reads the copies in {folder}"
        ]


def _unit(data: Survey) -> str:
    return "characters" if data.kind == "character" else "words"


def _refuse_few(count: int, what: str, where: str) -> None:
    if count < LEAST_EXAMPLES:
        raise InputError(f"{where} {count} {what}; training needs at least {LEAST_EXAMPLES}")


# --- pairs ----------------------------------------------------------------------------------------------------


def _of_pairs(wanted: Wanted) -> Draft:
    from clearhead.data.sources.pairs import parallel_files, read_pairs

    assert wanted.source is not None and wanted.target is not None, "the options were checked"
    source, target = wanted.source, wanted.target
    if wanted.valid_source is not None and wanted.valid_target is not None:
        read_pairs(parallel_files(wanted.valid_source, wanted.valid_target))
    data = read_pairs(parallel_files(source, target))
    pairs = list(zip(data["source"], data["target"], strict=True))
    found = survey(pairs)
    _refuse_few(found.num_pairs, "pairs with text on both sides", f"{source} and {target} have")
    held = _HeldOut.of(len(pairs), wanted.holds_out)
    ends = _endings(source, target)
    names = [(source, target), (wanted.valid_source, wanted.valid_target)]
    files: dict[Path, Sequence[str]] = {}
    if wanted.holds_out:
        names = [(wanted.folder / f"{part}.{ends[0]}", wanted.folder / f"{part}.{ends[1]}") for part in PARTS]
        for part, paths in zip(PARTS, names, strict=True):
            files |= {path: [pairs[row][side] for row in held.rows[part]] for side, path in enumerate(paths) if path}
    train, valid = ({"source": str(paths[0]), "target": str(paths[1])} for paths in names)
    run = wanted.run or "runs/" + "-".join(ends)
    summary = f"{found.num_pairs} pairs ({found.num_units} {_unit(found)})"
    plan = Plan(train, valid, held.note("pairs"), summary, run)
    if wanted.task == "translate":
        text = translation_file(plan, found, fitting_sizes(found))
    else:
        text = labelled_file(plan, "embed", found, fitting_sizes(found, epochs=LABELLED_EPOCHS))
    side = f"the longest side has {found.longest} {_unit(found)}"
    messages = [f"{found.num_pairs} pairs, {found.num_units} {_unit(found)}, {found.num_words} distinct words; {side}"]
    if found.num_empty:
        messages.append(f"{found.num_empty} pairs have an empty side; training leaves them out")
    messages += held.messages("pairs", wanted.folder)
    return Draft(text, run, {"pairs": found.num_pairs, "held_out": held.count}, messages, files)


def _endings(source: Path, target: Path) -> tuple[str, str]:
    """Return the endings of two file names, which usually say the languages."""
    first, second = (path.name.removesuffix(".gz").rpartition(".")[2] for path in (source, target))
    return (first, second) if first != second else ("source", "target")


# --- running text ---------------------------------------------------------------------------------------------


def _of_running_text(wanted: Wanted) -> Draft:
    from clearhead.data.sources.texts import measure, parse_text_source

    assert wanted.text is not None, "the options were checked"
    source = parse_text_source({"text": str(wanted.text)})
    found = survey_text(stretch.text for stretch in source.chunks())
    if found.num_characters < LEAST_CHARACTERS:
        raise InputError(
            f"{wanted.text} has {found.num_characters} characters; training needs at least {LEAST_CHARACTERS}"
        )
    sizes = fitting_text_sizes(
        found, continues=wanted.task == "generate", num_signs=lambda length: _num_signs(wanted.task, length)
    )
    form = {"document": wanted.document or found.document}
    valid: dict[str, Value] | float = sizes.share
    note = "the share of the text, from its end, that is held out of training"
    if wanted.valid_text is not None:
        valid, note = {"text": str(wanted.valid_text), **form}, ""
        measure(parse_text_source(valid))
    run = wanted.run or _run_name(wanted.text, wanted.task)
    train: dict[str, Value] = {"text": str(wanted.text), **form}
    plan = Plan(train, valid, note, f"{found.num_characters} characters", run)
    document = f"every {form['document']} is a document"
    messages = [f"{found.num_characters} characters, {found.num_distinct} distinct ones; {document}"]
    if isinstance(valid, float):
        messages.append(f"the last {valid:.1%} are for validation")
    counts = {"characters": found.num_characters, "held_out": valid if isinstance(valid, float) else 0}
    return Draft(text_file(plan, wanted.task, found, sizes), run, counts, messages)


def _num_signs(task: str, length: int) -> int:
    """Return how many entries of a vocabulary stand for hidden text: the mask, or a sentinel for each stretch."""
    from clearhead.data.objectives.spans import num_sentinels

    return {"fill": 1, "denoise": num_sentinels(length)}.get(task, 0)


def _run_name(text: Path, task: str) -> str:
    return f"runs/{text.resolve().name.partition('.')[0] or 'text'}-{task}"


# --- labels ---------------------------------------------------------------------------------------------------


def _of_classes(wanted: Wanted) -> Draft:
    from clearhead.data.sources.labelled import labelled_table, parse_labelled_source, read_labelled, text_columns
    from clearhead.data.stores.label_set import learn_labels

    assert wanted.text is not None and wanted.labels is not None, "the options were checked"

    def table(text: Path, labels: str) -> dict[str, Any]:
        return labelled_table(text, labels, text_column=wanted.text_column, pair=wanted.pair)

    train = table(wanted.text, wanted.labels)
    data = read_labelled(parse_labelled_source(train))
    found = survey([(" ".join(texts),) for texts in zip(*text_columns(data), strict=True)])
    _refuse_few(found.num_pairs, "texts", f"{wanted.text} has")
    kind = _label_kind(data)
    labels = learn_labels(data, kind)
    held = _HeldOut.of(len(data), wanted.holds_out)
    files: dict[Path, Sequence[str]] = {}
    if wanted.valid_text is not None:
        valid = table(wanted.valid_text, wanted.valid_labels or wanted.labels)
        labels.encode(read_labelled(parse_labelled_source(valid)))
    else:
        pair = {"pair": "pair"} if "pair" in data else {}
        train, valid = _copies(wanted.folder, held, lambda row: _labelled_record(data, row), files)
        train, valid = {**train, "labels": "label", **pair}, {**valid, "labels": "label", **pair}
    run = wanted.run or _run_name(wanted.text, wanted.task)
    plan = Plan(train, valid, held.note("texts"), f"{found.num_pairs} texts ({found.num_units} {_unit(found)})", run)
    sizes = fitting_sizes(found, epochs=LABELLED_EPOCHS)
    messages = [f"{found.num_pairs} texts, {found.num_units} {_unit(found)}; {labels.describe(data)}"]
    if found.num_empty:
        messages.append(f"{found.num_empty} texts are empty; training leaves them out")
    messages += held.messages("texts", wanted.folder)
    text = labelled_file(plan, "classify", found, sizes, labels=kind)
    return Draft(text, run, {"texts": found.num_pairs, "held_out": held.count}, messages, files)


def _label_kind(data: Table) -> LabelKind:
    """Tell lists of labels, and numbers that are no classes, from names."""
    if any(isinstance(label, list | tuple) for label in data["labels"]):
        return "multi_label"
    try:
        numbers = [float(label) for label in data["labels"] if isinstance(label, str | int | float)]
    except ValueError:
        return "single_label"
    return "regression" if len(numbers) == len(data) and any(number % 1 for number in numbers) else "single_label"


def _labelled_record(data: Table, row: int) -> dict[str, object]:
    roles = {"text": "text", "pair": "pair", "labels": "label"}
    return {name: data[role][row] for role, name in roles.items() if role in data}


def _of_tags(wanted: Wanted) -> Draft:
    from clearhead.data.sources.tagged import parse_tagged_source, read_tagged
    from clearhead.data.stores.tag_set import TagSet, find_scheme

    assert wanted.text is not None, "the options were checked"
    train: dict[str, Value] = {"text": str(wanted.text)}
    data = read_tagged(parse_tagged_source(train))
    _refuse_few(len(data), "tagged sentences", f"{wanted.text} has")
    scheme = find_scheme(data)
    tags = TagSet.of(data.tags, scheme)
    found = survey([(" ".join(words),) for words in data.words])
    held = _HeldOut.of(len(data), wanted.holds_out)
    files: dict[Path, Sequence[str]] = {}
    if wanted.valid_text is not None:
        valid: dict[str, Value] = {"text": str(wanted.valid_text)}
        read_tagged(parse_tagged_source(valid))
    else:
        train, valid = _copies(
            wanted.folder,
            held,
            lambda row: {"tokens": list(data.words[row]), "tags": list(data.tags[row])},
            files,
        )
    run = wanted.run or _run_name(wanted.text, wanted.task)
    plan = Plan(train, valid, held.note("sentences"), f"{len(data)} sentences ({found.num_units} words)", run)
    text = labelled_file(plan, "tag", found, fitting_sizes(found, epochs=LABELLED_EPOCHS))
    messages = [f"{len(data)} sentences, {found.num_units} words; {len(tags.names)} tags, scheme {scheme}"]
    messages += held.messages("sentences", wanted.folder)
    return Draft(text, run, {"sentences": len(data), "held_out": held.count}, messages, files)


def _copies(
    folder: Path, held: _HeldOut, record: Callable[[int], dict[str, object]], files: dict[Path, Sequence[str]]
) -> list[dict[str, Value]]:
    """Put both parts into `files` as JSON lines, and return the tables that name them."""
    tables: list[dict[str, Value]] = []
    for part in PARTS:
        path = folder / f"{part}.jsonl"
        files[path] = [json.dumps(record(row), ensure_ascii=False) for row in held.rows[part]]
        tables.append({"text": str(path)})
    return tables
