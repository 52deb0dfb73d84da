"""`clearhead answer`: extractive question answering."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.lines import is_standard_input, one_line
from clearhead.apps.cli.options import ComputeOptions, Json, Ref, takes_compute_options
from clearhead.apps.cli.progress import counting
from clearhead.apps.cli.waiting import at_rest
from clearhead.base.errors import InputError


@takes_compute_options
def answer(
    ref: Ref,
    question: Annotated[str, typer.Option("--question", metavar="TEXT", help="The question.")],
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TEXT", help="The text with the answer; by default standard input."),
    ] = None,
    context_file: Annotated[
        Path | None, typer.Option("--context-file", metavar="FILE|-", help="A file with that text.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers.")] = 1,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="The text may hold no answer; then the answer is empty.")
    ] = False,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Find the answer to a question in a text.

    \b
    Example:
      clearhead answer ./model --question "Who slept?" --context "Ada slept."
      clearhead answer ./model --question "Who?" --context-file a.txt --top-k 3

    A line of output is an answer and, after a tab, its probability, best first. A long text is read in windows that
    overlap. --json writes {"question", "answers"}; an answer is {"text", "score", "start", "end"}, and start and end
    count the characters of the text.
    """
    text = _text(context, context_file)
    model = compute.load_model(ref)
    with counting("windows"):
        answers = model.answer(question, text, top_k=top_k, allow_no_answer=no_answer, batch_size=compute.batch_size)
    record = {"question": question, "answers": [asdict(answer) for answer in answers]}
    print_either(as_json, record, *(f"{one_line(answer.text)}\t{answer.score:.4f}" for answer in answers))


def _text(context: str | None, file: Path | None) -> str:
    """Return the given text, or the unchanged text of a file or of standard input."""
    from clearhead.base.files import decoded, read_text_file

    if context is not None and file is not None:
        raise InputError("--context and --context-file are two ways to give the text: give one of them")
    if context is not None:
        return context
    if file is None or is_standard_input(file):
        with at_rest():
            return decoded(sys.stdin.buffer.read(), "standard input")
    return read_text_file(file, "file")
