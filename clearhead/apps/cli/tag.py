"""`clearhead tag`: the entities of each text, with their character offsets."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.lines import STANDARD_INPUT, Input, Line, answer_lines, one_line
from clearhead.apps.cli.options import ComputeOptions, JsonLines, LineFile, Ref, takes_compute_options

if TYPE_CHECKING:
    from clearhead.tasks.tag.use import Entity


@takes_compute_options
def tag(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
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
    lines, size = Input.of(file), compute.batch_size
    model = compute.load_model(ref)

    def show(line: Line, entities: list[Entity] | None) -> None:
        found = entities or []
        texts = (one_line(f"{entity.label} {entity.start}-{entity.end} {entity.text}".lstrip()) for entity in found)
        print_either(as_json, {**line.record(), "entities": [asdict(entity) for entity in found]}, "\t".join(texts))

    answer_lines(lines, lambda texts: model.tag(texts, batch_size=size), show, batch_size=size)
