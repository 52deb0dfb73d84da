"""First step of `clearhead new`: survey the data of a task, and choose the examples to hold out for validation."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clearhead.apps.recipes.run_file import DataPlan
from clearhead.apps.recipes.survey import MOST_COUNTED, Survey, TextSurvey, share_to_hold_out, survey, survey_text
from clearhead.base.errors import InputError
from clearhead.data.sources.held_out import HELD_OUT_SEED, Keys, Labels, draw_rows, group_rows
from clearhead.data.sources.named import pair_table, parse_dataset_name, text_table
from clearhead.data.task_tables import LabelledExamples, data_of
from clearhead.spec.tasks.base import Value
from clearhead.spec.tasks.registry import find_task

LEAST_EXAMPLES = 20
LEAST_CHARACTERS = 1_000
# File names that do not describe the data.
_GENERAL = ("train", "training", "data", "text", "texts", "input", "all")
_RUN = re.compile(r'^run = "([^"]*)"', re.MULTILINE)
_NOT_DATA = ("task", "folder", "run", "others")


@dataclass(frozen=True)
class NewOptions:
    """The options of `clearhead new`.

    Attributes:
        task: the kind of the task.
        folder: the folder for held-out data.
        run: the run directory. None means a directory named after the data.
        source, target, text, labels, text_column, pair, document, pattern: the training data.
        valid_source, valid_target, valid_text, valid_labels: the validation data.
        others: the data options that only this task has, by name. A value None means not given.
    """

    task: str
    folder: Path
    run: str | None = None
    source: Path | None = None
    target: Path | None = None
    text: Path | None = None
    labels: str | None = None
    text_column: str | None = None
    pair: str | None = None
    document: str | None = None
    pattern: str | None = None
    valid_source: Path | None = None
    valid_target: Path | None = None
    valid_text: Path | None = None
    valid_labels: str | None = None
    others: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """The options that name the data and how to read it; None means not given."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_DATA} | dict(self.others)

    def check_options(self) -> None:
        """Refuse options that need another option, and a run directory that training would refuse.

        Raises:
            InputError: an option lacks its partner, or the run directory exists.
        """
        if (self.valid_source is None) != (self.valid_target is None):
            raise InputError("--valid-source and --valid-target belong together: give both or neither")
        if self.valid_labels is not None and self.valid_text is None:
            raise InputError("--valid-labels has no effect without --valid-text: give the texts too")
        if self.run is not None:
            from clearhead.checkpoints.runs.directory import refuse_taken_folder

            refuse_taken_folder(Path(self.run))

    @property
    def command(self) -> str:
        """The command line with these options."""
        data_options = {name: value for name, value in self.data.items() if value is not None}
        words = [word for name, value in data_options.items() for word in ("--" + name.replace("_", "-"), str(value))]
        return shlex.join(["clearhead", "new", self.task, *words])


@dataclass(frozen=True)
class Draft:
    """The data of a run file to be written, before sizes and steps are fitted.

    Attributes:
        plan: the data of the run.
        counts: the amounts of data and of held-out data, by name.
        messages: sentences about the data, for the user.
        files: lines of the data files to write next to the run file, by path.
    """

    plan: DataPlan
    counts: Mapping[str, int | float]
    messages: Sequence[str]
    files: Mapping[Path, Sequence[str]] = field(default_factory=dict)


def draft(options: NewOptions) -> Draft:
    """Survey the data, and choose the held-out examples.

    Raises:
        InputError: the data is unusable or too small.
    """
    options = _with_validation(options)
    if find_task(options.task).is_paired:
        return _draft_pairs(options)
    read = data_of(options.task).labelled
    return _draft_text(options) if read is None else _draft_labelled(options, read)


def _with_validation(options: NewOptions) -> NewOptions:
    """Return the options with the validation split of a hub data set, if it has one and none is given."""
    if any((options.valid_text, options.valid_source, options.valid_labels)):
        return options
    text, source, target = map(_validation_split, (options.text, options.source, options.target))
    return replace(options, valid_text=text, valid_source=source, valid_target=target)


def _validation_split(text: Path | None) -> Path | None:
    named = None if text is None else parse_dataset_name(text)
    valid = None if named is None else named.validation()
    return None if valid is None else Path(valid)


@dataclass(frozen=True)
class _SurveyedExamples:
    """Surveyed examples, and their split into training and validation data.

    Attributes:
        what: the plural name of the examples in messages: pairs, texts or sentences.
        count: the number of examples.
        survey: the survey of the examples.
        held: the split into training and held-out examples.
        train, valid: the data tables of the run file.
        facts: the end of the message with the number of examples, such as the number of distinct words.
        files: the copies of both splits; empty if nothing is held out.
        num_overlapping: the number of given validation examples that share a text with the training data.
    """

    what: str
    count: int
    survey: Survey
    held: HeldOutSplit
    train: Mapping[str, Value]
    valid: Mapping[str, Value]
    facts: str
    files: Mapping[Path, Sequence[str]]
    num_overlapping: int = 0

    def draft(self, options: NewOptions, run: str, data: LabelledExamples | None = None) -> Draft:
        what, survey, held = self.what, self.survey, self.held
        summary = f"{self.count} {what} ({survey.num_units} {survey.unit})"
        plan = DataPlan(
            task=options.task,
            train=self.train,
            valid=self.valid,
            note=_overlap_note(self.num_overlapping, what) or held.note(what),
            summary=summary,
            run=options.run or find_unused_run(run, options.folder.parent),
            amount=len(held.train),
            survey=survey,
            settings={} if data is None else data.settings,
            unfit=() if data is None else data.unfit,
            command=options.command,
        )
        has_empty = "has an empty side|have an empty side" if what == "pairs" else "is empty|are empty"
        messages = [f"{self.count} {what}, {survey.num_units} {survey.unit}{self.facts}"]
        if survey.num_empty:
            messages.append(
                f"{_count_sentence(survey.num_empty, what, has_empty)}; training skips {_pronoun(survey.num_empty)}"
            )
        if held.valid:
            messages.append(
                f"held out {len(held.valid)} {what} for validation, drawn at random; training reads the copies in "
                f"{options.folder}"
            )
        if held.num_shared:
            messages.append(f"{held.num_shared} {what} share a text with another one; these stay in the same split")
        if self.num_overlapping:
            messages.append(_overlap(self.num_overlapping, what))
        return Draft(plan, {what: self.count, "held_out": len(held.valid)}, messages, self.files)


def _overlap_note(count: int, what: str) -> str:
    if not count:
        return ""
    return _count_sentence(count, what, "has a text that training reads too|have a text that training reads too")


def _overlap(count: int, what: str) -> str:
    has = "has" if count == 1 else "have"
    return (
        f"{count} of your validation {what} {has} a text of the training data; scores would be too good: leave "
        f"{_pronoun(count)} out, or let `new` hold out data"
    )


def _count_sentence(count: int, what: str, does: str) -> str:
    """Return a count with its noun and verb, such as "1 pair has a text" or "3 pairs have a text"."""
    singular, plural = does.split("|")
    return f"{count} {what.removesuffix('s')} {singular}" if count == 1 else f"{count} {what} {plural}"


def _pronoun(count: int) -> str:
    return "it" if count == 1 else "them"


def _refuse_few(count: int, what: str, where: str) -> None:
    if count < LEAST_EXAMPLES:
        raise InputError(f"{where} {count} {what}; training needs at least {LEAST_EXAMPLES}: add data")


def _draft_pairs(options: NewOptions) -> Draft:
    from clearhead.data.sources.pairs import PAIR_FORMS, equal_sides_warning, pair_keys, read_pairs
    from clearhead.data.sources.run_file_tables import parse_table

    source, target = options.source, options.target
    assert source is not None and target is not None, "call check_options first"
    train, valid = pair_table(source, target), dict[str, Value]()
    data = read_pairs(parse_table(train, PAIR_FORMS).as_source())
    surveyed = survey(list(zip(data["source"], data["target"], strict=True)))
    _refuse_few(surveyed.num_pairs, "pairs with text on both sides", f"{source} and {target} have")
    keys, endings = pair_keys(data), _endings(source, target)
    files: dict[Path, Sequence[str]] = {}
    if options.valid_source is not None and options.valid_target is not None:
        valid = pair_table(options.valid_source, options.valid_target)
        valid_data = read_pairs(parse_table(valid, PAIR_FORMS).as_source())
        held, overlapping = HeldOutSplit(range(len(data))), count_overlapping(keys, pair_keys(valid_data))
    elif "dataset" in train:
        held, overlapping = draw_split(keys), 0
        # Texts of a data set may have several lines, so write JSON lines.
        lines = []
        for source_text, target_text in zip(data["source"], data["target"], strict=True):
            lines.append(json.dumps({"source": source_text, "target": target_text}, ensure_ascii=False))
        files = held.copies(options.folder, "jsonl", lines)
        train, valid = (dict[str, Value](jsonl=str(path)) for path in files)
    else:
        held, overlapping = draw_split(keys), 0
        for side, ending in zip(("source", "target"), endings, strict=True):
            copies = held.copies(options.folder, ending, data[side])
            train[side], valid[side] = map(str, copies)
            files |= copies
    same = equal_sides_warning(data)
    facts = f", {surveyed.num_words} distinct words; the longest side has {surveyed.longest} {surveyed.unit}"
    facts += f"; {same}" if same else ""
    examples = _SurveyedExamples("pairs", surveyed.num_pairs, surveyed, held, train, valid, facts, files, overlapping)
    return examples.draft(options, "-".join(endings))


def _endings(source: Path, target: Path) -> tuple[str, str]:
    """Return the endings of two file names or the names of two fields, which are usually the languages."""
    first, second = (re.split("[.:]", path.name.removesuffix(".gz"))[-1] for path in (source, target))
    return (first, second) if first != second else ("source", "target")


def _draft_text(options: NewOptions) -> Draft:
    from clearhead.data.sources.run_file_tables import parse_table
    from clearhead.data.sources.texts import TEXT_FORMS, measure

    text = options.text
    assert text is not None, "call check_options first"
    train: dict[str, Value] = text_table(text, options.text_column)
    if options.pattern is not None:
        train["pattern"] = options.pattern
    surveyed = survey_text(chunk.text for chunk in parse_table(train, TEXT_FORMS).as_source().chunks())
    characters = surveyed.num_characters
    if characters < LEAST_CHARACTERS:
        raise InputError(f"{text} has {characters} characters; training needs at least {LEAST_CHARACTERS}: add text")
    document = options.document or surveyed.document
    train["document"] = document
    messages = [f"{characters} characters, {surveyed.num_distinct} distinct ones; every {document} is a document"]
    files: dict[Path, Sequence[str]] = {}
    valid: dict[str, Value] | float
    num_held: float = 0
    if options.valid_text is not None:
        valid = {**text_table(options.valid_text, options.text_column), "document": document}
        if options.pattern is not None and options.valid_text.is_dir():
            valid["pattern"] = options.pattern
        measure(parse_table(valid, TEXT_FORMS).as_source())
        overlapping = 0
        if document == "line" and characters <= MOST_COUNTED:
            overlapping = count_overlapping(_line_keys(_documents(train)), _line_keys(_documents(valid)))
        note = _overlap_note(overlapping, "lines")
        if overlapping:
            messages.append(_overlap(overlapping, "lines"))
    elif pieces := _split_documents(train, surveyed):
        held = draw_split(_line_keys(pieces))
        files = held.copies(options.folder, "txt", pieces)
        train, valid = (dict[str, Value](text=str(path), document=document) for path in files)
        what = "passages" if document == "file" else f"{document}s"
        num_held, note = len(held.valid), held.note(what)
        messages.append(f"held out {num_held} {what}, drawn at random; training reads the copies in {options.folder}")
    else:
        num_held = valid = share_to_hold_out(surveyed)
        note = "the share of the text, at its end, that is held out of training"
        messages.append(f"the last {valid:.1%} of the text are held out for validation")
    plan = DataPlan(
        task=options.task,
        train=train,
        valid=valid,
        note=note,
        summary=f"{characters} characters",
        run=options.run or find_unused_run(_data_name(options), options.folder.parent),
        amount=characters,
        survey=surveyed,
        command=options.command,
    )
    return Draft(plan, {"characters": characters, "held_out": num_held}, messages, files)


def _split_documents(table: Mapping[str, Value], surveyed: TextSurvey) -> list[str]:
    """Split a text into pieces that can be held out; return none if the text is too long or too short.

    The pieces are lines or paragraphs. A single file is cut into passages; several files are not split.
    """
    if surveyed.num_characters > MOST_COUNTED:
        return []
    pieces = _documents(table)
    if table["document"] == "paragraph":
        pieces = [f"{paragraph}\n" for paragraph in pieces]
    elif table["document"] == "file":
        pieces = split_passages(pieces[0].split("\n")) if len(pieces) == 1 else []
    return pieces if len(pieces) >= LEAST_EXAMPLES else []


def _documents(table: Mapping[str, Value]) -> list[str]:
    from clearhead.data.sources.run_file_tables import parse_table
    from clearhead.data.sources.texts import TEXT_FORMS

    return [chunk.text for chunk in parse_table(table, TEXT_FORMS).as_source().chunks()]


def _line_keys(lines: Iterable[str]) -> list[list[str]]:
    return [[line.strip()] for line in lines]


def _data_name(options: NewOptions) -> str:
    """Return a name for a run from the name of the text; the folder precedes a general name such as train.txt."""
    assert options.text is not None, "call check_options first"
    if (named := parse_dataset_name(options.text)) is not None:
        return f"{Path(named.table['dataset']).name.removesuffix('.parquet')}-{options.task}"
    path = options.text.resolve()
    name = path.name.partition(".")[0]
    if not name or (name in _GENERAL and path.is_file()):
        name = "-".join(filter(None, (path.parent.name, name)))
    return f"{name or 'text'}-{options.task}"


def find_unused_run(name: str, folder: Path) -> str:
    """Return a run directory for a name; a number is appended if it exists or another run file names it.

    Args:
        name: the name of the data.
        folder: the folder of the run file.
    """
    taken = {match for file in folder.glob("*.toml") for match in _RUN.findall(_text_of(file))}
    names = (f"runs/{name}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    return next(run for run in names if run not in taken and not Path(run).exists())


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _draft_labelled(
    options: NewOptions, read: Callable[[Mapping[str, Any], LabelledExamples | None], LabelledExamples]
) -> Draft:
    data_options = options.data
    data = read(data_options, None)
    count = sum(map(bool, data.keys))
    _refuse_few(count, data.few or data.what, f"{options.text} has")
    if options.valid_text is not None:
        valid_data = read(
            data_options | {"text": options.valid_text, "labels": options.valid_labels or options.labels}, data
        )
        held, overlapping = HeldOutSplit(range(len(data.keys))), count_overlapping(data.keys, valid_data.keys)
        train, valid, files = data.table, valid_data.table, dict[Path, Sequence[str]]()
    else:
        held, overlapping = draw_split(data.keys, data.groups), 0
        marker = next(iter(data.table)) if "dataset" not in data.table else "text"
        lines = [json.dumps(data.record(row), ensure_ascii=False) for row in range(len(data.keys))]
        files = held.copies(options.folder, "jsonl", lines)
        train, valid = ({marker: str(path), **data.columns} for path in files)
    examples = _SurveyedExamples(
        data.what, count, survey(data.texts), held, train, valid, data.facts, files, overlapping
    )
    return examples.draft(options, _data_name(options), data)


MOST_HELD_OUT = 1_000
_SHARE = 0.1
# Characters of a passage; it ends with a paragraph if one ends before twice this length.
_PASSAGE = 2_000


@dataclass(frozen=True)
class HeldOutSplit:
    """A split of examples into training and validation.

    Attributes:
        train, valid: the row numbers of the examples in order; `valid` is empty if nothing is held out.
        num_shared: the number of examples that share a text with another one, so that both are in the same split.
    """

    train: Sequence[int]
    valid: Sequence[int] = ()
    num_shared: int = 0

    def copies(self, folder: Path, ending: str, texts: Sequence[str]) -> dict[Path, Sequence[str]]:
        """Return the lines of the training and the validation file, by the path of each file to write.

        Args:
            folder, ending: the folder and the file ending of the copies.
            texts: the texts of all examples.
        """
        rows = {"train": self.train, "valid": self.valid}
        return {folder / f"{name}.{ending}": [texts[row] for row in rows[name]] for name in rows}

    def note(self, what: str) -> str:
        """Return the run-file comment on the validation data; empty if nothing is held out."""
        if not self.valid:
            return ""
        return (
            f"{len(self.valid)} of your {what}, drawn at random (seed {HELD_OUT_SEED}); training reads no text of them"
        )


def draw_split(keys: Keys, labels: Labels = None) -> HeldOutSplit:
    """Draw a tenth of the examples for validation, at most `MOST_HELD_OUT`.

    Args:
        keys: values that identify the texts of each example. Examples with a common key stay in one split; an example
            without keys is for training.
        labels: the label of each example, drawn in proportion. None means no labels.

    Raises:
        InputError: too many examples have keys in common, so that none can be held out.
    """
    wanted = min(MOST_HELD_OUT, max(1, round(_SHARE * len(keys))))
    held = draw_rows(keys, wanted / len(keys), labels)
    if not held:
        raise InputError(
            "no validation data can be held out, since every example shares a text with many others: give validation "
            "data, such as --valid-text"
        )
    rows = range(len(keys))
    drawn = set(held)
    shared = sum(len(group) for group in group_rows(keys) if len(group) > 1)
    return HeldOutSplit([row for row in rows if row not in drawn], held, shared)


def split_passages(lines: Sequence[str]) -> list[str]:
    """Join the lines of a text into passages of at least `_PASSAGE` characters."""
    texts: list[str] = []
    passage: list[str] = []
    length = 0
    for line in lines:
        passage.append(line)
        length += len(line) + 1
        if length >= 2 * _PASSAGE or (length >= _PASSAGE and not line.strip()):
            texts.append("\n".join(passage))
            passage, length = [], 0
    if passage:
        texts.append("\n".join(passage))
    return texts


def count_overlapping(train: Keys, valid: Keys) -> int:
    """Return the number of validation examples that share a key with a training example."""
    known = {key for example in train for key in example}
    return sum(not known.isdisjoint(example) for example in valid)
