"""The drafts of `clearhead new`: a survey of the data of each kind of task, and which part of it is held out."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import InputError
from clearhead.recipes.held_out import HeldOut, draw, num_overlapping, passages
from clearhead.recipes.run_file import DataPlan
from clearhead.recipes.survey import MOST_COUNTED, Survey, TextSurvey, held_out_share, survey, survey_text
from clearhead.tasks.base import Value
from clearhead.tasks.data import LabelledExamples, data_of
from clearhead.tasks.registry import find

if TYPE_CHECKING:
    from clearhead.data.sources.tables import Table

LEAST_EXAMPLES = 20
LEAST_CHARACTERS = 1_000
PARTS = ("train", "valid")
# Names of files that say nothing of the data in them.
_GENERAL = ("train", "training", "data", "text", "texts", "input", "all")
_RUN = re.compile(r'^run = "([^"]*)"', re.MULTILINE)
_NOT_DATA = ("task", "folder", "run")


@dataclass(frozen=True)
class NewOptions:
    """The options of `clearhead new`.

    Attributes:
        task: the kind of task.
        folder: where held-out data goes.
        run: the run directory; None: it is named after the data.
        source, target, text, labels, text_column, pair, document, pattern: the training data.
        valid_source, valid_target, valid_text, valid_labels: the validation data.
        label_kind: what a label is; None: it follows from the labels.
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
    label_kind: str | None = None

    def check_options(self) -> None:
        """Refuse options that have no effect alone, and a run directory that training would refuse.

        Raises:
            InputError: one sentence that names them.
        """
        if (self.valid_source is None) != (self.valid_target is None):
            raise InputError("--valid-source and --valid-target belong together: give both, or neither")
        if self.valid_labels is not None and self.valid_text is None:
            raise InputError("--valid-labels has no effect without --valid-text, the texts they belong to")
        if self.run is not None:
            from clearhead.runs.directory import refuse_taken

            refuse_taken(Path(self.run))

    @property
    def command(self) -> str:
        """The command with these options."""
        given = {name: value for name, value in vars(self).items() if value is not None and name not in _NOT_DATA}
        words = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
        return shlex.join(["clearhead", "new", self.task, *words])

    @property
    def holds_out(self) -> bool:
        """Whether there is no validation data, so that a part of the training data is held out."""
        return self.valid_source is None and self.valid_text is None


@dataclass(frozen=True)
class Draft:
    """What a run file will be about.

    Attributes:
        plan: the data.
        counts: how much data there is, and how much of it is held out.
        messages: what was found.
        files: data to be written beside it.
    """

    plan: DataPlan
    counts: Mapping[str, int | float]
    messages: Sequence[str]
    files: Mapping[Path, Sequence[str]] = field(default_factory=dict)


def draft(options: NewOptions) -> Draft:
    """Survey the data and decide which part of it is held out.

    Raises:
        InputError: the data is unusable, or there is too little of it.
    """
    if find(options.task).is_paired:
        return _pair_draft(options)
    read = data_of(options.task).labelled
    return _text_draft(options) if read is None else _labelled_draft(options, read)


@dataclass(frozen=True)
class _Examples:
    """Examples that were surveyed, and where their two parts go.

    Attributes:
        what: what one message calls them: pairs, texts or sentences.
        count: how many there are.
        found: their survey.
        held: which of them are held out.
        train, valid: the tables of the run file.
        facts: what was found, for the first message.
        files: the copies of both parts; empty if nothing is held out.
        num_overlapping: given validation examples that have a text of the training data.
    """

    what: str
    count: int
    found: Survey
    held: HeldOut
    train: Mapping[str, Value]
    valid: Mapping[str, Value]
    facts: str
    files: Mapping[Path, Sequence[str]]
    num_overlapping: int = 0

    def draft(self, options: NewOptions, run: str, data: LabelledExamples | None = None) -> Draft:
        what, found, held = self.what, self.found, self.held
        summary = f"{self.count} {what} ({found.num_units} {found.unit})"
        plan = DataPlan(
            task=options.task,
            train=self.train,
            valid=self.valid,
            note=_overlap_note(self.num_overlapping, what) or held.note(what),
            summary=summary,
            run=options.run or unused_run(run, options.folder.parent),
            amount=len(held.train),
            survey=found,
            settings={} if data is None else data.settings,
            unfit=() if data is None else data.unfit,
            command=options.command,
        )
        has_empty = "has an empty side|have an empty side" if what == "pairs" else "is empty|are empty"
        messages = [f"{self.count} {what}, {found.num_units} {found.unit}{self.facts}"]
        if found.num_empty:
            messages.append(
                f"{_counted(found.num_empty, what, has_empty)}; training leaves {_them(found.num_empty)} out"
            )
        if held.valid:
            messages.append(
                f"held out {len(held.valid)} {what} for validation, drawn at random; training reads the copies in "
                f"{options.folder}"
            )
        if held.num_shared:
            messages.append(f"{held.num_shared} {what} share a text with another one; such are never in both parts")
        if self.num_overlapping:
            messages.append(_overlap(self.num_overlapping, what))
        return Draft(plan, {what: self.count, "held_out": len(held.valid)}, messages, self.files)


def _overlap_note(count: int, what: str) -> str:
    return (
        _counted(count, what, "has a text that training reads too|have a text that training reads too") if count else ""
    )


def _overlap(count: int, what: str) -> str:
    has = "has" if count == 1 else "have"
    return (
        f"{count} of your validation {what} {has} a text that training reads too, which makes scores too good: leave "
        f"{_them(count)} out, or let `new` hold out a part"
    )


def _counted(count: int, what: str, does: str) -> str:
    """Return "1 pair has a text" or "3 pairs have a text"."""
    one, several = does.split("|")
    return f"{count} {what.removesuffix('s')} {one}" if count == 1 else f"{count} {what} {several}"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"


def _refuse_few(count: int, what: str, where: str) -> None:
    if count < LEAST_EXAMPLES:
        raise InputError(f"{where} {count} {what}; training needs at least {LEAST_EXAMPLES}")


def _pair_draft(options: NewOptions) -> Draft:
    from clearhead.data.sources.pairs import parallel_files, read_pairs, same_sides
    from clearhead.data.sources.run_file_tables import user_path

    source, target = options.source, options.target
    assert source is not None and target is not None, "the options were checked"
    data = read_pairs(parallel_files(user_path(source), user_path(target)))
    found = survey(list(zip(data["source"], data["target"], strict=True)))
    _refuse_few(found.num_pairs, "pairs with text on both sides", f"{source} and {target} have")
    keys, overlapping = _pair_keys(data), 0
    if options.valid_source is not None and options.valid_target is not None:
        valid_data = read_pairs(parallel_files(user_path(options.valid_source), user_path(options.valid_target)))
        overlapping = num_overlapping(keys, _pair_keys(valid_data))
    held = draw(keys) if options.holds_out else HeldOut(range(len(data)))
    ends = _endings(source, target)
    names = [(source, target), (options.valid_source, options.valid_target)]
    files: dict[Path, Sequence[str]] = {}
    if options.holds_out:
        names = [(options.folder / f"{part}.{ends[0]}", options.folder / f"{part}.{ends[1]}") for part in PARTS]
        for part, paths in zip(PARTS, names, strict=True):
            for path, side in zip(paths, ("source", "target"), strict=True):
                files |= {path: [data[side][row] for row in getattr(held, part)]} if path else {}
    train, valid = ({"source": str(paths[0]), "target": str(paths[1])} for paths in names)
    same = same_sides(data)
    facts = f", {found.num_words} distinct words; the longest side has {found.longest} {found.unit}"
    facts += f"; {same}" if same else ""
    examples = _Examples("pairs", found.num_pairs, found, held, train, valid, facts, files, overlapping)
    return examples.draft(options, "-".join(ends))


def _pair_keys(data: Table) -> list[list[tuple[str, str]]]:
    """Return both sides of each pair, so that pairs with one side in common belong together; none of an empty pair."""
    pairs = zip(data["source"], data["target"], strict=True)
    return [
        [("source", source.strip()), ("target", target.strip())] if source.strip() and target.strip() else []
        for source, target in pairs
    ]


def _endings(source: Path, target: Path) -> tuple[str, str]:
    """Return the endings of two file names, which usually say the languages."""
    first, second = (path.name.removesuffix(".gz").rpartition(".")[2] for path in (source, target))
    return (first, second) if first != second else ("source", "target")


def _text_draft(options: NewOptions) -> Draft:
    from clearhead.data.sources.run_file_tables import parse_table
    from clearhead.data.sources.texts import TEXT_FORMS, measure

    task, text = options.task, options.text
    assert text is not None, "the options were checked"
    form = {} if options.text_column is None else {"field": options.text_column}
    train = form | ({} if options.pattern is None else {"pattern": options.pattern})
    found = survey_text(
        chunk.text for chunk in parse_table({"text": str(text), **train}, TEXT_FORMS).as_source().chunks()
    )
    if found.num_characters < LEAST_CHARACTERS:
        raise InputError(f"{text} has {found.num_characters} characters; training needs at least {LEAST_CHARACTERS}")
    document = {"document": options.document or found.document}
    train, form = train | document, form | document
    table: dict[str, Value] = {"text": str(text), **train}
    share = held_out_share(found)
    valid: dict[str, Value] | float = share
    note = "the share of the text, from its end, that is held out of training"
    are_lines = document["document"] == "line" and found.num_characters <= MOST_COUNTED
    split = f"every {document['document']} is a document"
    messages = [f"{found.num_characters} characters, {found.num_distinct} distinct ones; {split}"]
    files: dict[Path, Sequence[str]] = {}
    num_held: float = 0
    if options.valid_text is not None:
        valid, note = {"text": str(options.valid_text), **(train if options.valid_text.is_dir() else form)}, ""
        measure(parse_table(valid, TEXT_FORMS).as_source())
        overlapping = num_overlapping(_line_keys(_lines(table)), _line_keys(_lines(valid))) if are_lines else 0
        if overlapping:
            note = _overlap_note(overlapping, "lines")
            messages.append(_overlap(overlapping, "lines"))
    elif pieces := _pieces(table, found):
        held = draw(_line_keys("\n".join(piece) for piece in pieces))
        paths = {part: options.folder / f"{part}.txt" for part in PARTS}
        files = {path: [line for row in getattr(held, part) for line in pieces[row]] for part, path in paths.items()}
        table, valid = {"text": str(paths["train"]), **document}, {"text": str(paths["valid"]), **document}
        num_held, what = len(held.valid), "passages" if document["document"] == "file" else f"{document['document']}s"
        note = held.note(what)
        messages.append(f"held out {num_held} {what}, drawn at random; training reads the copies in {options.folder}")
    else:
        num_held = share
        messages.append(f"the last {share:.1%} are for validation")
    plan = DataPlan(
        task=task,
        train=table,
        valid=valid,
        note=note,
        summary=f"{found.num_characters} characters",
        run=options.run or unused_run(_data_name(options), options.folder.parent),
        amount=found.num_characters,
        survey=found,
        command=options.command,
    )
    return Draft(plan, {"characters": found.num_characters, "held_out": num_held}, messages, files)


def _pieces(table: Mapping[str, Value], found: TextSurvey) -> list[list[str]]:
    """Return the parts of a text that can be held out, each its lines; none of too much or too little text.

    Lines and paragraphs are documents; the one document of a file is cut into passages, and several files into none.
    """
    if found.num_characters > MOST_COUNTED:
        return []
    texts = _lines(table)
    if table["document"] == "line":
        pieces = [[text] for text in texts]
    elif table["document"] == "paragraph":
        pieces = [[*text.split("\n"), ""] for text in texts]
    else:
        pieces = passages(texts[0].split("\n")) if len(texts) == 1 else []
    return pieces if len(pieces) >= LEAST_EXAMPLES else []


def _lines(table: Mapping[str, Value]) -> list[str]:
    from clearhead.data.sources.run_file_tables import parse_table
    from clearhead.data.sources.texts import TEXT_FORMS

    return [chunk.text for chunk in parse_table(table, TEXT_FORMS).as_source().chunks()]


def _line_keys(lines: Iterable[str]) -> list[list[str]]:
    return [[line.strip()] for line in lines]


def _data_name(options: NewOptions) -> str:
    """Return a name for a run, after the text; a file with a general name has that of its folder in front."""
    assert options.text is not None, "the options were checked"
    path = options.text.resolve()
    name = path.name.partition(".")[0]
    if not name or (name in _GENERAL and path.is_file()):
        name = "-".join(part for part in (path.parent.name, name) if part)
    return f"{name or 'text'}-{options.task}"


def unused_run(name: str, folder: Path) -> str:
    """Return the run directory of a name, with a number behind it if it exists or another run file names it.

    Args:
        name: of the data.
        folder: of the run file.
    """
    taken = {match for file in folder.glob("*.toml") for match in _RUN.findall(_text_of(file))}
    names = (f"runs/{name}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    return next(run for run in names if run not in taken and not Path(run).exists())


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _labelled_draft(
    options: NewOptions, read: Callable[[Mapping[str, Any], LabelledExamples | None], LabelledExamples]
) -> Draft:
    given = vars(options)
    data = read(given, None)
    found, count = survey(data.texts), sum(map(bool, data.keys))
    _refuse_few(count, data.few or data.what, f"{options.text} has")
    held, overlapping, files = HeldOut(range(len(data.keys))), 0, dict[Path, Sequence[str]]()
    if options.valid_text is not None:
        valid_data = read(given | {"text": options.valid_text, "labels": options.valid_labels or options.labels}, data)
        overlapping = num_overlapping(data.keys, valid_data.keys)
        train, valid = data.table, valid_data.table
    else:
        held = draw(data.keys, data.groups)
        train, valid = ({**table, **data.columns} for table in _copies(options.folder, held, data.record, files))
    examples = _Examples(data.what, count, found, held, train, valid, data.facts, files, overlapping)
    return examples.draft(options, _data_name(options), data)


def _copies(
    folder: Path, held: HeldOut, record: Callable[[int], dict[str, object]], files: dict[Path, Sequence[str]]
) -> list[dict[str, Value]]:
    """Put both parts into `files` as JSON lines, and return the tables that name them."""
    tables: list[dict[str, Value]] = []
    for part in PARTS:
        path = folder / f"{part}.jsonl"
        files[path] = [json.dumps(record(row), ensure_ascii=False) for row in getattr(held, part)]
        tables.append({"text": str(path)})
    return tables
