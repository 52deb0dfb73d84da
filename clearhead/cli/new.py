"""`clearhead new`: write a run file with sizes that fit the data; each task is a subcommand with its own options."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import print_either, print_message
from clearhead.cli.options import Force, Json, Pattern
from clearhead.errors import InputError
from clearhead.files import names_in, refuse_unwritable, write_output
from clearhead.leftovers import TEMPORARY, is_running

if TYPE_CHECKING:
    from clearhead.recipes.draft import Draft
    from clearhead.recipes.fit import Fitted

# A year.
MOST_MINUTES = 525_600
# The name of a file in a folder of held-out data that is not complete; the number of the process follows.
UNFINISHED = ".unfinished-"

# What names data, under the name of its parameter; each task takes some of them.
DATA_PARAMETERS: Mapping[str, Any] = {
    "source": Annotated[Path, typer.Option("--source", metavar="F", help="Training text: one text in a line.")],
    "target": Annotated[Path, typer.Option("--target", metavar="F", help="What belongs to it, line by line.")],
    "text": Annotated[Path, typer.Option("--text", metavar="F", help="Training data, in one of the forms above.")],
    "labels": Annotated[
        str, typer.Option("--labels", metavar="COLUMN|F", help="The column of the labels, or a file of them.")
    ],
    "label_kind": Annotated[
        str,
        typer.Option("--label-kind", help="single_label, multi_label or regression; by default what fits the labels."),
    ],
    "text_column": Annotated[
        str,
        typer.Option("--text-column", metavar="COLUMN", help="The column, or field, of the texts; by default text."),
    ],
    "pair": Annotated[
        str, typer.Option("--pair", metavar="COLUMN|F", help="The column of second texts, or a file of them.")
    ],
    "document": Annotated[
        str, typer.Option("--document", help="One document: file, line or paragraph; by default what fits the text.")
    ],
    "pattern": Pattern,
    "valid_source": Annotated[Path, typer.Option("--valid-source", metavar="F", help="Validation data, as --source.")],
    "valid_target": Annotated[Path, typer.Option("--valid-target", metavar="F", help="Validation data, as --target.")],
    "valid_text": Annotated[Path, typer.Option("--valid-text", metavar="F", help="Validation data, as --text.")],
    "valid_labels": Annotated[
        str, typer.Option("--valid-labels", metavar="F", help="Labels of --valid-text, where --labels is a file.")
    ],
}
Init = Annotated[
    str | None, typer.Option("--init", metavar="REF", help="A checkpoint or a run to start from; else from scratch.")
]
Minutes = Annotated[
    float,
    typer.Option(
        "--minutes", min=0.01, max=MOST_MINUTES, metavar="M", help="How long training may take on this machine."
    ),
]
RunFile = Annotated[Path, typer.Option("--output", "-o", metavar="F", help="The run file to write.")]
RunDirectory = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run directory it will name.")]


@dataclass(frozen=True)
class NewTask:
    """One subcommand of `clearhead new`.

    Attributes:
        does: its help in one sentence.
        examples: what follows `clearhead new TASK`.
        data: the forms of data, line by line, and what is done with it.
        needed, optional: the names of its data options.
    """

    does: str
    examples: tuple[str, ...]
    data: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]

    def help(self, kind: str) -> str:
        """Return the text of --help; a paragraph behind a backspace keeps its lines."""
        examples = "\n".join(f"  clearhead new {kind} {options}" for options in self.examples)
        return f"{self.does}\n\n\b\nExample:\n{examples}\n\n\b\nData, plain or .gz:\n{self.data}\n\n{_ALWAYS}"


_ALWAYS = """Training steps are measured on this machine, so that model and steps fit --minutes. Every choice in the run
file has a comment. What exists is replaced with --force only, and your data stays as it is. Without validation data, a
part of the training data is held out: a tenth of lines, pairs and labelled texts, drawn at random and copied into a
folder beside the run file; of other text the end. --json ends with {"file", "run", "steps", "held_out"} and how much
data there is."""

_TWO_FILES = """  Two text files: line 7 of one belongs to line 7 of the other."""
_TEXTS = """  corpus.txt          a text file
  corpus/             a folder: the files in it and in its folders
  corpus.jsonl        {"text": "..."} in each line, which is a document"""
_LABELLED = """  reviews.tsv, .csv   a table; its columns are given by the names in its first
                      line, or by number, the first one being 1
  reviews.jsonl       {"text": "A fine film.", "label": "good"} in each line
  reviews.txt         a text in each line, with --labels F line by line
  Labels are names; numbers with decimals are predicted as numbers, and lists,
  in JSON lines, are several labels of one text."""
_TAGGED = """  train.conll         a word and its tag in each line, the tag in the last
                      column; an empty line ends a sentence
  train.jsonl         {"tokens": ["Ada", "sleeps"], "tags": ["B-PER", "O"]}
                      in each line"""

_QUESTIONS = """  train.json    the SQuAD layout, version 1.1 or 2.0
  train.jsonl   {"context": "Ada built it.", "question": "Who built it?",
                "answer": "Ada", "start": 0} in each line; the start counts
                characters; both are lists where several answers are right,
                and null where the context holds none"""

_OF_PAIRS = ("source", "target"), ("valid_source", "valid_target")
_OF_TEXTS = ("text",), ("text_column", "document", "pattern", "valid_text")
TASKS: Mapping[str, NewTask] = {
    "translate": NewTask(
        "Write a run file that trains a translator.",
        ("--source train.de --target train.en",),
        _TWO_FILES,
        *_OF_PAIRS,
    ),
    "generate": NewTask(
        "Write a run file that trains a decoder, which continues text.",
        ("--text corpus/", "--text stories.txt --document paragraph"),
        _TEXTS,
        *_OF_TEXTS,
    ),
    "fill": NewTask(
        "Write a run file that trains an encoder to fill blanks.",
        ("--text captions.txt",),
        _TEXTS,
        *_OF_TEXTS,
    ),
    "denoise": NewTask(
        "Write a run file that trains an encoder-decoder to restore text, before it is trained for another task.",
        ("--text corpus/",),
        _TEXTS,
        *_OF_TEXTS,
    ),
    "classify": NewTask(
        "Write a run file that trains a classifier of texts or of pairs of texts.",
        ("--text reviews.tsv --labels label", "--text reviews.txt --labels labels.txt"),
        _LABELLED,
        ("text", "labels"),
        ("label_kind", "text_column", "pair", "valid_text", "valid_labels"),
    ),
    "tag": NewTask(
        "Write a run file that trains a tagger of words, such as of names.",
        ("--text train.conll --valid-text valid.conll",),
        _TAGGED,
        ("text",),
        ("valid_text",),
    ),
    "answer": NewTask(
        "Write a run file that trains a model to find the answers to questions in a text.",
        ("--text train.json --valid-text dev.json",),
        _QUESTIONS,
        ("text",),
        ("valid_text",),
    ),
    "embed": NewTask(
        "Write a run file that trains an encoder to give two texts of one meaning nearby vectors.",
        ("--source train.de --target train.en",),
        _TWO_FILES,
        *_OF_PAIRS,
    ),
}


def new() -> None:
    """Write a run file with sizes that fit your text.

    \b
    Example:
      clearhead new translate --source train.de --target train.en
      clearhead new classify --help
      clearhead train run.toml

    The help of each task shows its data and its options.
    """


def new_group() -> typer.Typer:
    """Return the command `new` with a subcommand for each task."""
    group = typer.Typer(rich_markup_mode=None)
    group.callback()(new)
    for kind, task in TASKS.items():
        group.command(kind, help=task.help(kind), short_help=task.does)(_command(kind, task))
    return group


def _command(kind: str, task: NewTask) -> Callable[..., None]:
    """Give a task its data options in front of the options of every task, which are those of `_write_run_file`."""
    _, _, *shared = inspect.signature(_write_run_file, eval_str=True).parameters.values()
    data = [_parameter(name, is_needed=name in task.needed) for name in (*task.needed, *task.optional)]

    def run(**values: Any) -> None:
        given = {option.name: values[option.name] for option in data}
        _write_run_file(kind, given, **{option.name: values[option.name] for option in shared})

    run.__signature__ = inspect.Signature([*data, *shared])  # type: ignore[attr-defined]
    return run


def _parameter(name: str, *, is_needed: bool) -> inspect.Parameter:
    default = inspect.Parameter.empty if is_needed else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=DATA_PARAMETERS[name])


def _write_run_file(
    kind: str,
    data: Mapping[str, Any],
    *,
    minutes: Minutes = 5.0,
    init: Init = None,
    output: RunFile = Path("run.toml"),
    run: RunDirectory = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    from clearhead.recipes.draft import NewOptions, draft

    refuse_unwritable(output, force=force)
    if init == "":
        raise InputError("--init is empty: name a checkpoint or a run, or leave it out to train from scratch")
    wanted = NewOptions(kind, output.with_name(f"{output.stem}-data"), None if run is None else str(run), **data)
    wanted.check_options()
    if is_unfinished(wanted.folder):
        shutil.rmtree(wanted.folder)
    found = draft(wanted)
    for path in found.files:
        refuse_unwritable(path, force=force)
    for message in found.messages:
        print_message(message)
    written = _write_all(output, found, wanted.folder, minutes, init, force=force)
    record = {"file": str(output), "run": found.plan.run, "steps": written.steps, **found.counts}
    print_either(as_json, record, str(output))
    if not as_json:
        print_message(f"next: clearhead train {output}")


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder of held-out data is what a command left that was killed."""
    marks = [name.removeprefix(UNFINISHED) for name in names_in(folder) if name.startswith(UNFINISHED)]
    return bool(marks) and not any(mark.isdigit() and is_running(int(mark)) for mark in marks)


def _write_all(output: Path, found: Draft, folder: Path, minutes: float, init: str | None, *, force: bool) -> Fitted:
    """Write held-out data, fit the recipe to data and machine, write the run file last; a failure leaves nothing."""
    # Only now: the libraries for training take seconds to load, and a fault in the data should not wait for them.
    from clearhead.recipes.fit import fitted
    from clearhead.recipes.start import started

    # A command that was killed while it wrote its mark leaves nothing else.
    is_there = not all(TEMPORARY.fullmatch(name) for name in names_in(folder))
    mark = folder / f"{UNFINISHED}{os.getpid()}"
    try:
        if found.files and not is_there:
            write_output(mark, "`clearhead new` removes this file when it is done.\n", force=False)
        for path, lines in found.files.items():
            write_output(path, "".join(f"{line}\n" for line in lines), force=force)
        if init is not None:
            written = started(found.plan, init, minutes, print_message)
        else:
            written = fitted(found.plan, minutes, print_message)
        write_output(output, written.text, force=force)
        mark.unlink(missing_ok=True)
    except BaseException:
        if found.files and not is_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return written
