"""`clearhead average`: average the last checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.console import print_json, print_message, print_result
from clearhead.apps.cli.options import Json, refuse_absent_runs


def average(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    last: Annotated[int, typer.Option("--last", min=1, help="The number of checkpoints, counted from the newest.")],
    as_json: Json = False,
) -> None:
    """Average the last N checkpoints of a run.

    \b
    Example:
      clearhead average runs/de-en --last 5
      clearhead translate runs/de-en@averaged input.de

    The mean of their weights is saved as RUN@averaged. With --json, the last line is {"run", "steps", "path"}.
    """
    refuse_absent_runs([run])
    from clearhead.training.optim.weight_averages import average_run

    path, steps = average_run(run, last)
    print_message(f"averaged the checkpoints of steps {', '.join(map(str, steps))}")
    if as_json:
        print_json({"run": str(run), "steps": steps, "path": str(path)})
    else:
        print_result(f"{run}@averaged")
