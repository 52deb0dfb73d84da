"""The drafts of `clearhead new`: a survey of the data of each kind of task, and which part of it is held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from clearhead.errors import InputError, nearest
from clearhead.recipes.run_file import DataPlan, Value, run_file_text
from clearhead.recipes.survey import Survey, fitting_sizes, fitting_text_sizes, held_out_share, survey, survey_text

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
        """Refuse options that have no effect alone.

        Raises:
            InputError: one sentence that names them.
        """
        if (self.valid_source is None) != (self.valid_target is None):
            raise InputError("--valid-source and --valid-target belong together: give both, or neither")
        if self.valid_labels is not None and self.valid_text is None:
            raise InputError("--valid-labels has no effect without --valid-text, the texts they belong to")

    @property
    def holds_out(self) -> bool:
        """Whether a part of the training data is copied into a folder for validation."""
        return self.task not in RUNNING and self.valid_source is None and self.valid_text is None


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


def draft(options: NewOptions) -> Draft:
    """Survey the data and write a run file that fits it.

    Raises:
        InputError: the data is unusable, or there is too little of it.
    """
    if options.task in PAIRED:
        return _pair_draft(options)
    if options.task in RUNNING:
        return _text_draft(options)
    return _label_draft(options) if options.task == "classify" else _tag_draft(options)


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
    """

    what: str
    count: int
    found: Survey
    held: _HeldOut
    train: Mapping[str, Value]
    valid: Mapping[str, Value]
    facts: str
    files: Mapping[Path, Sequence[str]]

    def draft(self, options: NewOptions, run: str, *, labels: str | None = None) -> Draft:
        what, found, held = self.what, self.found, self.held
        summary = f"{self.count} {what} ({found.num_units} {found.unit})"
        sizes = fitting_sizes(found) if options.task == "translate" else fitting_sizes(found, epochs=LABELLED_EPOCHS)
        plan = DataPlan(self.train, self.valid, held.note(what), summary, options.run or run)
        text = run_file_text(plan, options.task, found, sizes, labels=labels)
        empty = "have an empty side" if what == "pairs" else "are empty"
        messages = [f"{self.count} {what}, {found.num_units} {found.unit}{self.facts}"]
        messages += [f"{found.num_empty} {what} {empty}; training leaves them out"] if found.num_empty else []
        messages += held.messages(what, options.folder)
        return Draft(text, plan.run, {what: self.count, "held_out": held.count}, messages, self.files)


def _refuse_few(count: int, what: str, where: str) -> None:
    if count < LEAST_EXAMPLES:
        raise InputError(f"{where} {count} {what}; training needs at least {LEAST_EXAMPLES}")


def _pair_draft(options: NewOptions) -> Draft:
    from clearhead.data.sources.pairs import parallel_files, read_pairs

    source, target = options.source, options.target
    assert source is not None and target is not None, "the options were checked"
    if options.valid_source is not None and options.valid_target is not None:
        read_pairs(parallel_files(options.valid_source, options.valid_target))
    data = read_pairs(parallel_files(source, target))
    found = survey(list(zip(data["source"], data["target"], strict=True)))
    _refuse_few(found.num_pairs, "pairs with text on both sides", f"{source} and {target} have")
    held = _HeldOut.of(len(data), options.holds_out)
    ends = _endings(source, target)
    names = [(source, target), (options.valid_source, options.valid_target)]
    files: dict[Path, Sequence[str]] = {}
    if options.holds_out:
        names = [(options.folder / f"{part}.{ends[0]}", options.folder / f"{part}.{ends[1]}") for part in PARTS]
        for part, paths in zip(PARTS, names, strict=True):
            for path, side in zip(paths, ("source", "target"), strict=True):
                files |= {path: [data[side][row] for row in held.rows[part]]} if path else {}
    train, valid = ({"source": str(paths[0]), "target": str(paths[1])} for paths in names)
    facts = f", {found.num_words} distinct words; the longest side has {found.longest} {found.unit}"
    return _Examples("pairs", found.num_pairs, found, held, train, valid, facts, files).draft(
        options, "runs/" + "-".join(ends)
    )


def _endings(source: Path, target: Path) -> tuple[str, str]:
    """Return the endings of two file names, which usually say the languages."""
    first, second = (path.name.removesuffix(".gz").rpartition(".")[2] for path in (source, target))
    return (first, second) if first != second else ("source", "target")


def _text_draft(options: NewOptions) -> Draft:
    from clearhead.data.objectives.spans import num_sentinels
    from clearhead.data.sources.texts import measure, parse_text_source

    task, text = options.task, options.text
    assert text is not None, "the options were checked"
    form = {} if options.text_column is None else {"field": options.text_column}
    train = form | ({} if options.pattern is None else {"pattern": options.pattern})
    found = survey_text(chunk.text for chunk in parse_text_source({"text": str(text), **train}).chunks())
    if found.num_characters < LEAST_CHARACTERS:
        raise InputError(f"{text} has {found.num_characters} characters; training needs at least {LEAST_CHARACTERS}")
    sizes = fitting_text_sizes(
        found,
        continues=task == "generate",
        # The mask, or a sentinel for each span.
        num_special=lambda length: {"fill": 1, "denoise": num_sentinels(length)}.get(task, 0),
    )
    document = {"document": options.document or found.document}
    train, form = train | document, form | document
    valid: dict[str, Value] | float = held_out_share(found)
    note = "the share of the text, from its end, that is held out of training"
    if options.valid_text is not None:
        valid, note = {"text": str(options.valid_text), **(train if options.valid_text.is_dir() else form)}, ""
        measure(parse_text_source(valid))
    run = options.run or _run_name(text, task)
    plan = DataPlan({"text": str(text), **train}, valid, note, f"{found.num_characters} characters", run)
    split = f"every {document['document']} is a document"
    messages = [f"{found.num_characters} characters, {found.num_distinct} distinct ones; {split}"]
    if isinstance(valid, float):
        messages.append(f"the last {valid:.1%} are for validation")
    counts = {"characters": found.num_characters, "held_out": valid if isinstance(valid, float) else 0}
    return Draft(run_file_text(plan, task, found, sizes), run, counts, messages)


def _run_name(text: Path, task: str) -> str:
    return f"runs/{text.resolve().name.partition('.')[0] or 'text'}-{task}"


def _label_draft(options: NewOptions) -> Draft:
    from clearhead.data.sources.labelled import labelled_table, parse_labelled_source, read_labelled, text_columns
    from clearhead.data.stores.label_set import learn_labels

    assert options.text is not None and options.labels is not None, "the options were checked"

    def table(text: Path, labels: str) -> dict[str, Any]:
        return labelled_table(text, labels, text_column=options.text_column, pair=options.pair)

    train = table(options.text, options.labels)
    data = read_labelled(parse_labelled_source(train))
    found = survey([(" ".join(texts),) for texts in zip(*text_columns(data), strict=True)])
    _refuse_few(found.num_pairs, "texts", f"{options.text} has")
    kind = _label_kind(data, options.label_kind)
    labels = learn_labels(data, kind)
    held = _HeldOut.of(len(data), options.holds_out)
    files: dict[Path, Sequence[str]] = {}
    if options.valid_text is not None:
        valid = table(options.valid_text, options.valid_labels or options.labels)
        labels.encode(read_labelled(parse_labelled_source(valid)))
    else:
        names = {role: "label" if role == "labels" else role for role in ("text", "pair", "labels") if role in data}
        train, valid = _copies(
            options.folder, held, lambda row: {name: data[role][row] for role, name in names.items()}, files
        )
        columns = {role: names[role] for role in ("labels", "pair") if role in names}
        train, valid = train | columns, valid | columns
    examples = _Examples("texts", found.num_pairs, found, held, train, valid, f"; {labels.describe(data)}", files)
    return examples.draft(options, _run_name(options.text, options.task), labels=kind)


def _label_kind(data: Table, wanted: str | None) -> LabelKind:
    """Return the kind that is wanted; else tell lists of labels, and numbers that are not classes, from names."""
    from clearhead.task import LabelKind

    kinds: tuple[LabelKind, ...] = get_args(LabelKind)
    for kind in kinds:
        if kind == wanted:
            return kind
    if wanted is not None:
        raise InputError(f"--label-kind is '{wanted}'; expected one of {', '.join(kinds)}{nearest(wanted, kinds)}")
    labels = data["labels"]
    if any(isinstance(label, list | tuple) for label in labels):
        return "multi_label"
    try:
        numbers = [float(label) for label in labels if isinstance(label, str | int | float)]
    except ValueError:
        return "single_label"
    return "regression" if len(numbers) == len(data) and any(number % 1 for number in numbers) else "single_label"


def _tag_draft(options: NewOptions) -> Draft:
    from clearhead.data.sources.tagged import parse_tagged_source, read_tagged
    from clearhead.data.stores.tag_set import TagSet, find_scheme

    assert options.text is not None, "the options were checked"
    train: dict[str, Value] = {"text": str(options.text)}
    data = read_tagged(parse_tagged_source(train))
    _refuse_few(len(data), "tagged sentences", f"{options.text} has")
    scheme = find_scheme(data)
    found = survey([(" ".join(words),) for words in data.words])
    held = _HeldOut.of(len(data), options.holds_out)
    files: dict[Path, Sequence[str]] = {}
    if options.valid_text is not None:
        valid: dict[str, Value] = {"text": str(options.valid_text)}
        read_tagged(parse_tagged_source(valid))
    else:
        train, valid = _copies(
            options.folder, held, lambda row: {"tokens": list(data.words[row]), "tags": list(data.tags[row])}, files
        )
    facts = f"; {len(TagSet.of(data.tags, scheme).names)} tags, scheme {scheme}"
    examples = _Examples("sentences", len(data), found, held, train, valid, facts, files)
    return examples.draft(options, _run_name(options.text, options.task))


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
