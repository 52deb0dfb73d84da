"""`clearhead compare`: compare runs in one table and one picture, and name unfair differences."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.options import Force, Json, refuse_absent_runs
from clearhead.base.errors import InputError

PICTURE = Path("compare.png")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories, finished or not.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG file for the learning curves.")] = PICTURE,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare runs in one fair table and one picture.

    \b
    Example:
      clearhead compare runs/encoder runs/decoder -o families.png
    with a second seed of the first run, shown in the same row:
      clearhead train encoder.toml train.seed=2 train.run=runs/encoder-2
      clearhead compare runs/encoder runs/encoder-2 runs/decoder

    Runs that differ in train.seed alone are one row: the mean over the seeds, with the sample standard deviation. FLOPs
    count the matrix products for the tokens seen, forward and backward; one multiplication and one addition are 2
    FLOPs. Padding, norms and softmax are not counted. Non-embedding parameters exclude the tables of tokens, segments
    and positions. Seconds include validations, tokens/s do not. "best" is the best of all validations, separately for
    loss and score.

    Unfair differences from the first row are listed below the table. Rows of several seeds also show their difference
    with its 95 % interval (Student's t, paired by seed where both rows have the seeds). The picture shows the
    validation score over tokens and over time, or the loss if a run has no score.
    With --json, the last line is {"rows", "differences", "differs_in", "same", "unfair", "notes", "picture"}.
    """
    _check_picture(output, force)
    refuse_absent_runs(runs)
    from clearhead.apps.compare.report import compare_runs

    compared = compare_runs(runs)
    picture = compared.draw(output)
    record = compared.record() | {"picture": None if picture is None else str(picture)}
    print_either(as_json, record, *compared.lines(table_columns()))


def table_columns() -> int | None:
    """Return the width of the terminal in columns, or None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _check_picture(output: Path, force: bool) -> None:
    """Refuse a picture file that cannot be written, before the runs are read."""
    from clearhead.base.files import refuse_unwritable

    if output.suffix.lower() != ".png":
        raise InputError(f"-o {output} is not a PNG: give a name that ends in .png")
    refuse_unwritable(output, force=force)
