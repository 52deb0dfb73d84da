"""`clearhead demo`: make real data on this machine, train a model on it, and show results."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.apps.cli.console import print_json
from clearhead.apps.cli.options import ComputeOptions, Json, set_threads_and_seed, takes_compute_options
from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError, did_you_mean
from clearhead.spec.tasks.registry import BUILT_IN

if TYPE_CHECKING:
    from clearhead.apps.demo.common import DemoOutcome, DemoPlan

_FOLDER = Path(__file__).parents[1] / "demo"
KINDS = tuple(kind for kind in BUILT_IN if (_FOLDER / f"{kind}.py").is_file())
"""The tasks that have a demo: a module of their name."""


@takes_compute_options
def demo(
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help=f"Which demo: {', '.join(KINDS)}.")] = KINDS[0],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The run directory, new; by default runs/demo or runs/demo-KIND, or the next free."),
    ] = None,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Make real data here, train on it in a minute or two, and show what was learned. Nothing is downloaded.

    \b
    Example:
      clearhead demo
      clearhead demo generate
      clearhead demo translate --out runs/dates --seed 7

    translate: dates as people of many languages write them ("Montag, 5. Januar 1998") become ISO dates (1998-01-05).
    generate: a language model of the Python library found here writes a function, and says how well it knows code.
    classify: which language is this name from? CLDR's names of countries, languages, months and units in 54 languages.
    fill: a masked model of the same Python library fills blanks in code.

    What is scored was held out: dates, files and things named that are in no training text. The result is an ordinary
    run directory: use it, evaluate it, look into it. --json ends with the results, {..., "seconds", "run"}.
    """
    if kind not in KINDS:
        raise InputError(f"there is no demo '{kind}'{did_you_mean(kind, KINDS)}; there are: {', '.join(KINDS)}")
    from clearhead.apps.demo.common import DemoPlan, free_folder
    from clearhead.base.machine import choose_device, choose_precision

    # Before the data is made.
    choose_precision(compute.precision, choose_device(compute.device))
    began = time.monotonic()
    options = {"device": compute.device, "precision": compute.precision, "threads": compute.threads}
    overrides = [f"train.{key}={value}" for key, value in options.items() if value not in (None, "auto")]
    first = Path("runs/demo" if kind == KINDS[0] else f"runs/demo-{kind}")
    plan = DemoPlan(
        run=free_folder(out, first),
        seed=1 if compute.seed is None else compute.seed,
        device=compute.device,
        precision=compute.precision,
        batch_size=compute.batch_size,
        overrides=overrides,
    )
    set_threads_and_seed(compute.threads, seed=None)
    try:
        outcome = _runner(kind)(plan)
    except BaseException:
        if not (plan.run / "checkpoints").exists():
            # The folder is new, and its data alone would be in the way of the next demo.
            shutil.rmtree(plan.run, ignore_errors=True)
        raise
    seconds = round(time.monotonic() - began, 1)
    _print_next_commands(plan, outcome, seconds)
    if as_json:
        print_json({**outcome.record, "seconds": seconds, "run": str(plan.run)})


def _runner(kind: str) -> Callable[[DemoPlan], DemoOutcome]:
    runner: Callable[[DemoPlan], DemoOutcome] = getattr(
        importlib.import_module(f"clearhead.apps.demo.{kind}"), f"run_{kind}"
    )
    return runner


def _print_next_commands(plan: DemoPlan, outcome: DemoOutcome, seconds: float) -> None:
    """Name the pictures, and commands to continue with."""
    from clearhead.apps.demo.common import HEADS_PAGE

    console = plan.console
    pictures = {"Loss": "plots/loss.png", **outcome.pictures}
    drawn = (f"{name}: {plan.run}/{file}" for name, file in pictures.items() if (plan.run / file).exists())
    console.print(f"\n{seconds:.0f} seconds. {'   '.join(drawn)}", markup=False)
    run_file, again = quote(f"{plan.run}/run.toml"), quote(f"train.run={plan.run}-again")
    commands = {
        **outcome.commands,
        "See what its heads do with a text of your own": make_command(f"view {quote(str(plan.run))} TEXT"),
        "Its run file, to read and change": make_command(f"train {run_file} {again}"),
    }
    for purpose, command in commands.items():
        console.print(f"{purpose}: {command}", markup=False)
    page = plan.run / HEADS_PAGE
    if page.exists():
        console.print(f"What every head does, to open in a browser: {page.resolve().as_uri()}", markup=False)
