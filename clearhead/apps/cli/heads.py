"""`clearhead heads`: statistics of every attention head over the lines of a file."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_json, print_message
from clearhead.apps.cli.lines import InputLine, TextInput, line_namer, name_of, parse_line, read_lines
from clearhead.apps.cli.options import (
    ComputeOptions,
    FromLanguage,
    Json,
    LineFile,
    Paired,
    Ref,
    ToLanguage,
    locate_model,
    takes_compute_options,
)
from clearhead.apps.cli.progress import show_counts
from clearhead.base.errors import InputError, did_you_mean, renaming

if TYPE_CHECKING:
    from clearhead.interpret.maps.head_statistics import HeadStatistics

WIDTH = 160  # width in characters of a table that is written to a file


@takes_compute_options
def heads(
    ref: Ref,
    file: LineFile,
    target: Annotated[
        Path | None, typer.Option("--target", metavar="FILE", help="The target of each line; by default generated.")
    ] = None,
    pair: Paired = False,
    from_language: FromLanguage = None,
    to_language: ToLanguage = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="COLUMN", help="Sort by layer or by a statistic, largest first.")
    ] = "layer",
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Show statistics of every attention head over the lines of a file.

    \b
    Example:
      clearhead heads runs/dates dates.txt --sort induction
      clearhead heads runs/de-en test.de --target test.en --json

    Each line is a text; empty lines are left out. Each number is the mean over the lines, followed by ± and its
    standard deviation. The entropy is in nats, the distance in tokens. The others are shares of the attention weight on
    the first token, the previous token, the same token elsewhere (duplicate), or the same position (diagonal). The
    column induction is the share on tokens that follow another copy of the current token. The column alignment is the
    share on links that are the largest of both their tokens.

    The columns duplicate and induction are measured on repeated random tokens, drawn with --seed. A pattern is named if
    more than half of the weight follows it. The model computes in fp32 unless --precision is given. With --json, the
    last line is {"texts", "heads"}; a head has the numbers, their "spread" and its "patterns".
    """
    if compute.batch_size is not None:
        raise InputError("--batch-size has no effect here, since texts are read one by one; leave it out")
    if sort != "layer":
        _check_column(sort)
    resolved_ref = locate_model(ref)
    lines, targets = _texts(file, target, pair)
    texts: list[Any] = [line.text for line in lines]
    # fp32 by default, for equal numbers on every machine.
    exact = replace(compute, precision="fp32") if compute.precision == "auto" else compute
    model = exact.load_exact(resolved_ref)
    with show_counts("texts", counts="texts"), renaming(line_namer(lines, name_of(file))):
        rows = model.heads(
            texts,
            targets,
            precision="auto",
            seed=compute.seed or 0,
            from_language=from_language,
            to_language=to_language,
        )
    if sort != "layer":
        rows.sort(key=lambda row: -1.0 if getattr(row, sort) is None else float(getattr(row, sort)), reverse=True)
    if as_json:
        print_json({"texts": len(texts), "heads": [asdict(row) for row in rows]})
    else:
        _print_table(rows)
        print_message(f"{len(texts)} texts")


def _check_column(sort: str) -> None:
    from clearhead.interpret.maps.head_statistics import STATISTICS

    columns = ("layer", *STATISTICS)
    if sort not in columns:
        raise InputError(
            f"--sort expects a column, got '{sort}'{did_you_mean(sort, columns)}: one of {', '.join(columns)}"
        )


def _texts(file: Path, target: Path | None, pair: bool) -> tuple[list[InputLine], list[str] | None]:
    """Return the non-empty lines of the input file, and their target texts or None without targets."""
    name, source = name_of(file), TextInput.of(file)
    numbered = enumerate(chain.from_iterable(source.blocks), start=1)
    lines = [parse_line(position, text, source, paired=pair) for position, text in numbered]
    text_lines = [line for line in lines if not line.is_empty]
    if not text_lines:
        raise InputError(f"{name}: the file has no text; expected at least one line")
    targets = None
    if target is not None:
        written = list(read_lines(target))
        if len(written) != len(lines):
            raise InputError(
                f"{name} has {len(lines)} lines, but {name_of(target)} has {len(written)}: give one target "
                "for each text"
            )
        targets = [written[line.number - 1] for line in text_lines]
    return text_lines, targets


def _print_table(rows: list[HeadStatistics]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from clearhead.interpret.maps.head_statistics import STATISTICS

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    # In a narrow terminal, wrap words and leave out the spread, so that no number is broken.
    is_narrow = console.width < WIDTH
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0 if is_narrow else (0, 1))
    table.add_column("stack", min_width=len("decoder.memory"))
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("head", justify="right", no_wrap=True)
    for name in STATISTICS:
        table.add_column(name.removesuffix("_token"), justify="right", overflow="fold", min_width=5 * is_narrow)
    table.add_column("patterns", overflow="fold", min_width=6)
    for row in rows:
        spread = {} if is_narrow else row.spread
        numbers = [_number(getattr(row, name), spread.get(name)) for name in STATISTICS]
        table.add_row(row.stack, str(row.layer), str(row.head), *numbers, ", ".join(row.patterns))
    console.print(table)


def _number(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return "-"
    return f"{mean:.2f}" if spread is None else f"{mean:.2f}±{spread:.2f}"
