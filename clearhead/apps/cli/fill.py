"""`clearhead fill`: the most probable words for the blanks of a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.lines import STANDARD_INPUT, Input, Line, answer_lines, one_line
from clearhead.apps.cli.options import ComputeOptions, JsonLines, Ref, takes_compute_options
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead.tasks.fill.use import Filled


@takes_compute_options
def fill(
    ref: Ref,
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT|-", help="Text with blanks: ___ or the mask token; - is standard input."),
    ] = "-",
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE|-", help="A file of texts, one in a line, instead of TEXT.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Candidates for each blank.")] = 5,
    as_json: JsonLines = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Fill the blanks of a text with the most probable words, one line in, one line out.

    \b
    Example:
      clearhead fill runs/captions "A dog ___ through the snow."
      clearhead fill runs/captions --file captions.txt --top-k 1 | cut -f 1

    A blank is one entry of the model's vocabulary. A line of output holds the text with the best candidates and then,
    for each blank and after a tab, its candidates with their probabilities. An empty line is answered by an empty line.
    --json writes {"index", "text", "filled", "blanks"}; a blank is a list of {"text", "token", "probability", "start",
    "end", "filled"}, best first, and start and end count the characters of the given text.
    """
    _check_source(text, file, compute.batch_size)
    lines = Input.of(file or STANDARD_INPUT) if text == "-" else Input(None, [[text]], 1)
    model = compute.load_model(ref)

    def show(line: Line, answer: list[list[Filled]] | None) -> None:
        blanks = answer or []
        filled = blanks[0][0].filled if blanks else ""
        candidates = [[asdict(candidate) for candidate in blank] for blank in blanks]
        columns = ["  ".join(f"{one_line(word.text)} {word.probability:.4f}" for word in blank) for blank in blanks]
        record = {**line.record(), "filled": filled, "blanks": candidates}
        print_either(as_json, record, "\t".join([one_line(filled), *columns]))

    size = compute.batch_size
    answer_lines(lines, lambda texts: model.fill(texts, top_k=top_k, batch_size=size), show, batch_size=size)


def _check_source(text: str, file: Path | None, batch_size: int | None) -> None:
    if text == "-":
        return
    if file is not None:
        raise InputError("TEXT and --file are two ways to give the text: give one of them")
    if batch_size is not None:
        raise InputError("--batch-size has no effect on a single TEXT; remove it, or give a file of texts with --file")
    if "\n" in text:
        raise InputError("TEXT is a single line; give several in a file with --file")
