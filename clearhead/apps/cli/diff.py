"""`clearhead diff`: compare two models by their weights, heads and predictions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.apps.cli.console import print_json, print_result
from clearhead.apps.cli.lines import InputLine, line_namer, name_of, read_lines
from clearhead.apps.cli.options import Device, Force, Json, Precision, Threads, locate_model, set_threads_and_seed
from clearhead.apps.cli.progress import show_counts
from clearhead.base.errors import InputError, RunFailure, escape_unsafe, renaming
from clearhead.base.progress import Counted

if TYPE_CHECKING:
    from clearhead.interpret.difference.report import Difference
    from clearhead.interpret.difference.weights import Change

NUM_SHOWN, NUM_ROWS, NUM_TOKENS = 20, 3, 5
"""The most tensors, heads and rows shown; the most rows of one embedding table; the most tokens below the table."""
WIDTH = 160
"""Width in characters of a table that is written to a file."""

A = Annotated[str, typer.Argument(metavar="A", help="The first model: a run (RUN@step-N), a folder or a hub id.")]
B = Annotated[str, typer.Argument(metavar="B", help="The second model.")]
Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT ...]", help="Texts that both models read.")]
TextFile = Annotated[
    Path | None, typer.Option("--file", metavar="F", help="Read the texts from this file, one per line.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write an HTML page.")]
FailAbove = Annotated[
    float | None,
    typer.Option("--fail-above", metavar="X", min=0.0, help="Exit with 1 if the difference is larger than X."),
]


def diff(
    a: A,
    b: B,
    texts: Texts = None,
    file: TextFile = None,
    output: Output = None,
    fail_above: FailAbove = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show what changed from model A to model B.

    \b
    Example:
      clearhead diff runs/de-en@step-0 runs/de-en
      clearhead diff base/ tuned/ "Zwei Hunde." -o diff.html
      clearhead diff released/ rebuilt/ --file texts.txt --fail-above 0.01

    Weights of equal address and shape are compared, and the common rows of an embedding table that grew. All other
    weights are listed as only in A, only in B, or of another shape.

    The table shows tensors, heads and rows with their relative change ||B - A|| / ||A|| (Frobenius). If ||A|| is
    below the typical norm of such a tensor, head or row, that norm replaces it. The rank is the number of singular
    values of B - A above 1 % of the largest. It is exact for matrices of at most 4 million numbers with a smaller side
    of at most 1,024. For larger matrices, at most 256 singular values count.

    With texts, both models read them. The table then shows the mean Jensen-Shannon divergence of the attention rows of
    each head. Tokens are listed with the KL divergence of their predictions. Without texts no model is loaded.

    --fail-above bounds the largest change, as a fraction (0.01 is 1 %). With texts it bounds the mean KL divergence per
    token instead.
    With --json, the last line is {"a", "b", "largest", "only_in_a", "only_in_b", "other_shape", "changes", "texts",
    "path"}.
    """
    _check_options(output, force, bool(texts or file), (device, precision))
    lines = _read_texts(texts, file)
    before, after = locate_model(a), locate_model(b)
    set_threads_and_seed(threads, None)
    from clearhead.model.difference import diff as compare

    counts: Counted = "texts" if lines else "tensors"
    with show_counts(counts, counts=counts), _name_by_line(lines, file):
        difference = compare(before, after, list(lines.values()), device=device, precision=precision)
    if output is not None:
        difference.save_html(output, force=force)
    path = None if output is None else str(output)
    if as_json:
        print_json(difference.to_json() | {"path": path})
    else:
        _print_table(difference)
        if path is not None:
            print_result(path)
    _fail_above(difference, fail_above)


def _check_options(output: Path | None, force: bool, has_texts: bool, compute: tuple[str, str]) -> None:
    """Refuse options without effect and an unwritable page, before any model is read."""
    from clearhead.base.files import refuse_unwritable

    if output is None and force:
        raise InputError("--force has no effect without -o: leave it out")
    if output is not None:
        if output.suffix != ".html":
            raise InputError(f"-o {output} is not an HTML page: give a name that ends in .html")
        refuse_unwritable(output, force=force)
    if not has_texts and compute != ("auto", "fp32"):
        raise InputError("--device and --precision have no effect without texts: give a TEXT or --file as well")


def _name_by_line(lines: Mapping[int, str], file: Path | None) -> AbstractContextManager[None]:
    """Return a context manager in which messages name texts of a file by their line numbers."""
    return (
        nullcontext()
        if file is None
        else renaming(line_namer([InputLine(*numbered) for numbered in lines.items()], name_of(file)))
    )


def _read_texts(texts: list[str] | None, file: Path | None) -> dict[int, str]:
    """Return the texts by number, from 1: those of the command line, or the non-empty lines of a file."""
    if texts and file is not None:
        raise InputError("give texts on the command line or with --file, not both")
    if file is None:
        return dict(enumerate(texts or (), start=1))
    lines = {number: text for number, text in enumerate(read_lines(file), start=1) if text.strip()}
    if not lines:
        raise InputError(f"{name_of(file)}: the file has no text; expected at least one line")
    return lines


def _print_table(difference: Difference) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from clearhead.interpret.difference.page import (
        describe_texts,
        describe_weights,
        write_address,
        write_percent,
        write_rank,
    )

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", overflow="fold")
    for name in ("shape", "change", "||B-A|| / ||A||", "rank of B-A"):
        table.add_column(name, justify="right")
    texts = difference.texts
    if texts is not None:
        table.add_column("attention JS, nats", justify="right")
    for change in _choose_shown(difference):
        measures = write_percent(change.score), write_percent(change.relative), write_rank(change)
        cells = [write_address(change), " x ".join(map(str, change.shape)), *measures]
        if texts is not None:
            cells.append("" if change.divergence is None else f"{change.divergence:.3g}")
        table.add_row(*map(escape_unsafe, cells))
    if table.row_count:
        console.print(table, markup=False)
    print_result(f"{describe_weights(difference.weights)}; --json and -o list all")
    if texts is not None:
        print_result(describe_texts(texts))
        for token in sorted(texts.tokens, key=lambda token: -token.divergence)[:NUM_TOKENS]:
            where = f"text {token.text + 1}" + (f", token {token.position} '{token.token}'" if token.token else "")
            print_result(f"  KL {token.divergence:.4g} at {where}: '{token.a}' in A, '{token.b}' in B")


def _choose_shown(difference: Difference) -> list[Change]:
    """Return the changes for the table: the largest ones, with few rows of each embedding table."""
    shown: list[Change] = []
    num_rows = Counter[str]()
    for change in difference.weights.changes:
        num_rows[change.address] += change.kind == "row"
        if change.score and (change.kind != "row" or num_rows[change.address] <= NUM_ROWS):
            shown.append(change)
    return shown[:NUM_SHOWN]


def _fail_above(difference: Difference, bound: float | None) -> None:
    """Raise `RunFailure` if the difference between two models exceeds the bound of --fail-above.

    Raises:
        RunFailure: the difference is larger than the bound.
        InputError: texts were given, but the predictions of the two models cannot be compared.
    """
    if bound is None:
        return
    texts = difference.texts
    if texts is not None and texts.divergence is None:
        raise InputError(f"--fail-above needs the KL divergence of predictions: {texts.reason}; leave the texts out")
    value = difference.largest if texts is None or texts.divergence is None else texts.divergence
    if value > bound:
        what = "the largest change of weights" if texts is None else "the KL divergence per token"
        raise RunFailure(f"{what} is {value:.4g}, above --fail-above {bound:g}")
