"""`clearhead tag`: the entities of each text, with the characters they stand at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.cli.console import print_json, print_result
from clearhead.cli.lines import Line, answered_lines, one_line
from clearhead.cli.options import ComputeOptions, JsonLines, LineFile, Ref, takes_compute_options

if TYPE_CHECKING:
    from clearhead.predict.tag import Entity


@takes_compute_options
def tag(
    ref: Ref,
    file: LineFile = Path("-"),
    as_json: JsonLines = False,
    *,
    compute: ComputeOptions,
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
    model = compute.load_model(ref)
    for line, entities in answered_lines(file, model.tag, batch_size=compute.batch_size):
        _show(line, entities or [], as_json)


def _show(line: Line[str], entities: Sequence[Entity], as_json: bool) -> None:
    if as_json:
        print_json({**line.record(), "entities": [asdict(one) for one in entities]})
    else:
        print_result("\t".join(f"{one.label} {one.start}-{one.end} {one_line(one.text)}" for one in entities))
