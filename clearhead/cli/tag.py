"""`clearhead tag`: the entities of each text, with the characters they stand at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.console import (
    BatchSize,
    Device,
    JsonLines,
    LineFile,
    Precision,
    Ref,
    Seed,
    Threads,
    prepare_machine,
    print_json,
    print_result,
)
from clearhead.cli.lines import Line, answered_lines, one_line

if TYPE_CHECKING:
    from clearhead.predict.tag import Entity


def tag(
    ref: Ref,
    file: LineFile = Path("-"),
    as_json: JsonLines = False,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
) -> None:
    """Tag texts, one line in, one line out.

    \b
    Example:
      clearhead tag runs/names news.txt
      echo "Anna flew from Oslo to Rome." | clearhead tag runs/names --json

    A line of output holds the entities of the text with tabs between them, each as "label start-end text"; start and
    end count characters from 0, and the end is behind the last one. A text without entities, and an empty line, are
    answered by an empty line. --json writes {"index", "text", "entities"}; an entity is {"label", "text", "start",
    "end", "probability"}.
    """
    import clearhead

    prepare_machine(threads, seed)
    model = clearhead.load(ref, device=device, precision=precision)
    for line, entities in answered_lines(file, model.tag, batch_size=batch_size):
        _show(line, entities or [], as_json)


def _show(line: Line[str], entities: Sequence[Entity], as_json: bool) -> None:
    if as_json:
        print_json({**line.record(), "entities": [asdict(one) for one in entities]})
    else:
        print_result("\t".join(f"{one.label} {one.start}-{one.end} {one_line(one.text)}" for one in entities))
