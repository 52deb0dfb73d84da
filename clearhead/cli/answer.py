"""`clearhead answer`: where in a text a question is answered."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import (
    BatchSize,
    Device,
    Precision,
    Ref,
    Seed,
    Threads,
    prepare_machine,
    show,
    show_json,
)
from clearhead.cli.lines import one_line
from clearhead.errors import InputError

STANDARD_INPUT = "-"


def answer(
    ref: Ref,
    question: Annotated[str, typer.Option("--question", metavar="TEXT", help="What is asked.")],
    context: Annotated[
        str,
        typer.Option("--context", metavar="TEXT|FILE|-", help="The text that answers, a file, or standard input."),
    ] = STANDARD_INPUT,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers.")] = 1,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="The text may hold none; an empty answer says so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Make the last line of stdout one JSON object.")] = False,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
) -> None:
    """Find the answer to a question in a text.

    \b
    Example:
      clearhead answer deepset/tiny-roberta --question "Who built it?" --context "Ada built the engine."
      clearhead answer ./model --question "When was it built?" --context report.txt --top-k 3 --json

    A line of output is an answer and, after a tab, its probability, best first. A long text is read in windows that
    overlap. What --context names is read as a file where there is one of that name. --json writes {"question",
    "answers"}; an answer is {"text", "score", "start", "end"}, and start and end count the characters of the text.
    """
    import clearhead

    prepare_machine(threads, seed)
    text = _text(context)
    model = clearhead.load(ref, device=device, precision=precision)
    answers = model.answer(question, text, top_k=top_k, may_lack=no_answer, batch_size=batch_size)
    if as_json:
        show_json({"question": question, "answers": [asdict(one) for one in answers]})
        return
    for one in answers:
        show(f"{one_line(one.text)}\t{one.score:.4f}")


def _text(context: str) -> str:
    """Return the text that an option gives or names."""
    if context == STANDARD_INPUT:
        content, name = sys.stdin.buffer.read(), "standard input"
    elif _is_file(context):
        content, name = Path(context).read_bytes(), context
    else:
        return context
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not valid UTF-8 at byte {error.start}; convert the text to UTF-8") from None


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        # Longer than the name of a file can be, or with a zero in it: a text.
        return False
