"""`clearhead new`: write a run file with sizes that fit the data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import print_either, print_message, write_lines
from clearhead.cli.options import DATA_OPTIONS, Json, Pattern
from clearhead.errors import InputError, keys_as_options, nearest
from clearhead.recipes.draft import Draft, NewOptions, draft

Source = Annotated[
    Path | None, typer.Option("--source", help="translate, embed: training text, one sentence in a line.")
]
Target = Annotated[Path | None, typer.Option("--target", help="What belongs to it, line by line.")]
Text = Annotated[
    Path | None,
    typer.Option("--text", metavar="F", help="The other tasks: a file, a folder, a table, JSON lines."),
]
Labels = Annotated[
    str | None, typer.Option("--labels", metavar="COLUMN|F", help="classify: the column of labels, or a file of them.")
]
LabelKindOption = Annotated[
    str | None,
    typer.Option("--label-kind", help="classify: single_label, multi_label or regression; by default what fits."),
]
TextColumn = Annotated[
    str | None, typer.Option("--text-column", metavar="COLUMN", help="The column, or field, of the text.")
]
Pair = Annotated[
    str | None, typer.Option("--pair", metavar="COLUMN|F", help="classify: the column, or the file, of second texts.")
]
Document = Annotated[
    str | None, typer.Option("--document", help="generate, fill, denoise: what a document is: file, line, paragraph.")
]
ValidSource = Annotated[Path | None, typer.Option("--valid-source", help="Validation text, source side.")]
ValidTarget = Annotated[Path | None, typer.Option("--valid-target", help="Validation text, target side.")]
ValidText = Annotated[Path | None, typer.Option("--valid-text", metavar="F", help="Validation text, as --text.")]
ValidLabels = Annotated[
    str | None, typer.Option("--valid-labels", metavar="F", help="Its labels, where --labels is a file.")
]


def new(
    task: Annotated[
        str,
        typer.Argument(metavar="TASK", help="translate, generate, fill, denoise, classify, tag or embed."),
    ],
    source: Source = None,
    target: Target = None,
    text: Text = None,
    labels: Labels = None,
    label_kind: LabelKindOption = None,
    text_column: TextColumn = None,
    pair: Pair = None,
    document: Document = None,
    pattern: Pattern = None,
    valid_source: ValidSource = None,
    valid_target: ValidTarget = None,
    valid_text: ValidText = None,
    valid_labels: ValidLabels = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The run file to write.")] = Path("run.toml"),
    run: Annotated[str | None, typer.Option("--run", help="The run directory it will name.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run file with sizes that fit your text.

    \b
    Example:
      clearhead new translate --source train.de --target train.en
      clearhead new generate --text corpus/
      clearhead new classify --text reviews.tsv --labels label --valid-text valid.tsv
      clearhead new tag --text train.conll
      clearhead train run.toml

    It looks at the data and comments every choice. Without validation data, running text is validated on its end; of
    pairs and labelled texts every k-th is held out of training: both parts are written into a folder beside the run
    file, and your files stay as they are. Nothing that exists is overwritten. Training stops early once 10 validations
    in a row have not improved. --json ends with {"file", "run", "held_out"} and how much data there is.
    """
    wanted = NewOptions(
        task, source, target, text, labels, text_column, pair, document, pattern, valid_source, valid_target,
        valid_text, valid_labels, label_kind, run, output.with_name(f"{output.stem}-data"),
    )  # fmt: skip
    _check_task(task)
    wanted.check_options()
    _refuse_existing(output, wanted)
    with keys_as_options(DATA_OPTIONS):
        found = draft(wanted)
    _check(found.text, output)
    _write_all(output, found, wanted.folder)
    for message in found.messages:
        print_message(message)
    print_either(as_json, {"file": str(output), "run": found.run, **found.counts}, str(output))
    if not as_json:
        print_message(f"next: clearhead train {output}")


def _check_task(task: str) -> None:
    from clearhead.training.runfile.sections import TASK_KINDS

    if task not in TASK_KINDS:
        raise InputError(f"there is no task '{task}'{nearest(task, TASK_KINDS)}; the tasks are {', '.join(TASK_KINDS)}")


def _refuse_existing(output: Path, wanted: NewOptions) -> None:
    for path in (output, wanted.folder) if wanted.holds_out else (output,):
        if path.exists():
            raise InputError(f"{path} exists already and is not overwritten: move it, or name another with --output")


def _write_all(output: Path, found: Draft, folder: Path) -> None:
    """Write the run file last; if anything fails, nothing is left."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if found.files:
            folder.mkdir()
        for path, lines in found.files.items():
            write_lines(path, lines)
        with output.open("x", encoding="utf-8") as file:
            file.write(found.text)
    except (OSError, InputError) as error:
        if found.files:
            shutil.rmtree(folder, ignore_errors=True)
        reason = f"{output} cannot be written: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise InputError(reason) from None


def _check(text: str, output: Path) -> None:
    """Refuse to write a run file that `clearhead train` would refuse."""
    from clearhead.training.runfile.read import parse_run_file

    parse_run_file(text, str(output))
