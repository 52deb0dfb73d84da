"""`clearhead check REF`: what a model reads, what must not change its results, and the health of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.options import ComputeOptions, located, set_threads_and_seed
from clearhead.base.errors import InputError
from clearhead.base.files import refuse_unwritable, write_output

Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Of a model: also write the report as one HTML file.")
]


def check_model(ref: str, compute: ComputeOptions, *, html: Path | None, force: bool, as_json: bool) -> None:
    """Check a model, print the report, and exit with 1 where something is wrong.

    Raises:
        InputError: the model cannot be loaded or checked, or the file cannot be written.
    """
    if html is not None:
        refuse_unwritable(html, force=force)
    elif force:
        raise InputError("--force replaces the file of --html; without that it would have no effect")
    place = located(ref)
    set_threads_and_seed(compute.threads, compute.seed)
    from clearhead.apps.check.model import model as checks
    from clearhead.apps.check.model.report import report_html
    from clearhead.model.loading import load_unchecked

    model, seed = load_unchecked(place, device=compute.device), 7 if compute.seed is None else compute.seed
    report = checks.check_model(model, ref, rows_at_once=compute.batch_size, seed=seed)
    if html is not None:
        write_output(html, report_html(report), force=force)
        print_message(f"wrote {html}")
    print_either(as_json, report.record(), *report.lines())
    if not report.ok:
        raise typer.Exit(1)
