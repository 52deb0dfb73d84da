"""`clearhead new`: write a run file with sizes that fit the data; each task is a subcommand."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.options import Force, Json, Pattern
from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError
from clearhead.base.files import names_in, refuse_unwritable, write_output
from clearhead.base.temporary_files import TEMPORARY, is_running
from clearhead.spec.tasks.base import Task
from clearhead.spec.tasks.registry import list_tasks

if TYPE_CHECKING:
    from clearhead.apps.recipes.draft import Draft
    from clearhead.apps.recipes.fit import FittedRunFile

# One year.
MOST_MINUTES = 525_600
# Prefix of a file that marks a folder of held-out data as incomplete; the process id follows.
UNFINISHED = ".unfinished-"

# The data options by parameter name; each task uses some of them.
DATA_PARAMETERS: Mapping[str, Any] = {
    "source": Annotated[Path, typer.Option("--source", metavar="F", help="Training text: one text per line.")],
    "target": Annotated[Path, typer.Option("--target", metavar="F", help="The target of each source line.")],
    "text": Annotated[Path, typer.Option("--text", metavar="F", help="Training data, in one of the forms above.")],
    "labels": Annotated[
        str, typer.Option("--labels", metavar="COLUMN|F", help="The column of the labels, or a file of them.")
    ],
    "text_column": Annotated[
        str,
        typer.Option("--text-column", metavar="COLUMN", help="The column or field of the texts; by default text."),
    ],
    "pair": Annotated[
        str, typer.Option("--pair", metavar="COLUMN|F", help="The column of the second texts, or a file of them.")
    ],
    "document": Annotated[
        str, typer.Option("--document", help="One document: file, line or paragraph; by default chosen from the text.")
    ],
    "pattern": Pattern,
    "valid_source": Annotated[Path, typer.Option("--valid-source", metavar="F", help="Validation data, as --source.")],
    "valid_target": Annotated[Path, typer.Option("--valid-target", metavar="F", help="Validation data, as --target.")],
    "valid_text": Annotated[Path, typer.Option("--valid-text", metavar="F", help="Validation data, as --text.")],
    "valid_labels": Annotated[
        str, typer.Option("--valid-labels", metavar="F", help="Labels of --valid-text, if --labels is a file.")
    ],
}
Init = Annotated[
    str | None, typer.Option("--init", metavar="REF", help="A checkpoint or run to start from; default: from scratch.")
]
Minutes = Annotated[
    float,
    typer.Option(
        "--minutes", min=0.01, max=MOST_MINUTES, metavar="M", help="The minutes that training may take on this machine."
    ),
]
RunFile = Annotated[Path, typer.Option("--output", "-o", metavar="F", help="The run file to write.")]
RunDirectory = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run directory of the training.")]


_ALWAYS = """Training steps are measured on this machine, so that model and steps fit into --minutes. Every choice in
the run file has a comment. Existing files are replaced only with --force, and your data is never changed. Without
validation data, some training data is held out: a tenth of the lines, pairs or labelled texts, drawn at random and
copied into a folder next to the run file; from other text, the end. With --json, the last line is {"file", "run",
"steps", "held_out"} and the amount of data."""


def new() -> None:
    """Write a run file with sizes that fit your data.

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
    for task in list_tasks():
        group.command(task.kind, help=_help(task), short_help=task.new.does)(_command(task))
    return group


def _help(task: Task) -> str:
    """Return the --help text of the command for a task; a paragraph after a backspace keeps its line breaks."""
    words = task.new
    examples = "\n".join(f"  clearhead new {task.kind} {options}" for options in words.examples)
    return f"{words.does}\n\n\b\nExample:\n{examples}\n\n\b\nData, plain or .gz:\n{words.data}\n\n{_ALWAYS}"


def _command(task: Task) -> Callable[..., None]:
    """Return the command of a task: its data options, then the options of `_write_run_file`."""
    _, _, *shared = inspect.signature(_write_run_file, eval_str=True).parameters.values()
    needed = task.new.needed
    data = [_parameter(name, task, is_needed=name in needed) for name in (*needed, *task.new.optional)]

    def run(**values: Any) -> None:
        data_values = {option.name: values[option.name] for option in data}
        _write_run_file(task.kind, data_values, **{option.name: values[option.name] for option in shared})

    run.__signature__ = inspect.Signature([*data, *shared])  # type: ignore[attr-defined]
    return run


def _parameter(name: str, task: Task, *, is_needed: bool) -> inspect.Parameter:
    default = inspect.Parameter.empty if is_needed else None
    option = "--" + name.replace("_", "-")
    task_option = Annotated[str, typer.Option(option, metavar="VALUE", help=task.options.get(name))]
    annotation = DATA_PARAMETERS.get(name, task_option)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
    from clearhead.apps.recipes.draft import NewOptions, draft

    refuse_unwritable(output, force=force)
    if init == "":
        raise InputError("--init is empty: give a checkpoint or run, or leave it out to train from scratch")
    folder = output.with_name(f"{output.stem}-data")
    shared = {name: value for name, value in data.items() if name in DATA_PARAMETERS}
    others = {name: value for name, value in data.items() if name not in shared}
    wanted = NewOptions(kind, folder, None if run is None else str(run), **shared, others=others)
    wanted.check_options()
    if is_unfinished(wanted.folder):
        shutil.rmtree(wanted.folder)
    drafted = draft(wanted)
    for path in drafted.files:
        refuse_unwritable(path, force=force)
    for message in drafted.messages:
        print_message(message)
    written = _write_files(output, drafted, wanted.folder, minutes, init, force=force)
    record = {"file": str(output), "run": drafted.plan.run, "steps": written.steps, **drafted.counts}
    print_either(as_json, record, str(output))
    if not as_json:
        print_message(f"next: {make_command(f'train {quote(str(output))}')}")


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder of held-out data was left unfinished by a killed command."""
    marks = [name.removeprefix(UNFINISHED) for name in names_in(folder) if name.startswith(UNFINISHED)]
    return bool(marks) and not any(mark.isdigit() and is_running(int(mark)) for mark in marks)


def _write_files(
    output: Path, drafted: Draft, folder: Path, minutes: float, init: str | None, *, force: bool
) -> FittedRunFile:
    """Write the held-out data, fit the recipe, and write the run file last; a failure leaves no files."""
    # Import late: the libraries for training take seconds to load; faults in the data are reported before.
    from clearhead.apps.recipes.fit import fit_run_file
    from clearhead.apps.recipes.from_checkpoint import fit_to_checkpoint

    # A command that was killed while writing its mark leaves only temporary files.
    is_there = not all(TEMPORARY.fullmatch(name) for name in names_in(folder))
    mark = folder / f"{UNFINISHED}{os.getpid()}"
    try:
        if drafted.files and not is_there:
            write_output(mark, "`clearhead new` removes this file when it is done.\n", force=False)
        for path, lines in drafted.files.items():
            write_output(path, "".join(f"{line}\n" for line in lines), force=force)
        if init is not None:
            written = fit_to_checkpoint(drafted.plan, init, minutes)
        else:
            written = fit_run_file(drafted.plan, minutes)
        write_output(output, written.text, force=force)
        mark.unlink(missing_ok=True)
    except BaseException:
        if drafted.files and not is_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return written
