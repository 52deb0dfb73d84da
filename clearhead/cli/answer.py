"""`clearhead answer`: where in a text a question is answered."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import is_standard_input, print_json, print_result
from clearhead.cli.lines import one_line
from clearhead.cli.options import ComputeOptions, Json, Ref, takes_compute_options
from clearhead.errors import InputError


@takes_compute_options
def answer(
    ref: Ref,
    question: Annotated[str, typer.Option("--question", metavar="TEXT", help="What is asked.")],
    context: Annotated[
        str | None, typer.Option("--context", metavar="TEXT", help="The text that answers; by default standard input.")
    ] = None,
    context_file: Annotated[
        Path | None, typer.Option("--context-file", metavar="FILE|-", help="A file with the text that answers.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers.")] = 1,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="The text may hold none; an empty answer says so.")
    ] = False,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Find the answer to a question in a text.

    \b
    Example:
      clearhead answer deepset/tiny-roberta --question "Who built it?" --context "Ada built the engine."
      clearhead answer ./model --question "When was it built?" --context-file report.txt --top-k 3 --json

    A line of output is an answer and, after a tab, its probability, best first. A long text is read in windows that
    overlap. --json writes {"question", "answers"}; an answer is {"text", "score", "start", "end"}, and start and end
    count the characters of the text.
    """
    text = _text(context, context_file)
    model = compute.load_model(ref)
    answers = model.answer(question, text, top_k=top_k, allow_no_answer=no_answer, batch_size=compute.batch_size)
    if as_json:
        print_json({"question": question, "answers": [asdict(one) for one in answers]})
        return
    for one in answers:
        print_result(f"{one_line(one.text)}\t{one.score:.4f}")


def _text(context: str | None, file: Path | None) -> str:
    """Return the text that is given, or that a file or standard input holds, as it stands there."""
    from clearhead.files import decoded, read_text_file

    if context is not None and file is not None:
        raise InputError("--context and --context-file are two ways to give the text: give one of them")
    if context is not None:
        return context
    if file is None or is_standard_input(file):
        return decoded(sys.stdin.buffer.read(), "standard input")
    return read_text_file(file, "file")
