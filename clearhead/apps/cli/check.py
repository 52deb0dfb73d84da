"""`clearhead check`: check that a model, a handwritten Transformer or a training job computes correctly."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.apps.cli.console import print_either, print_json, print_message, print_result
from clearhead.apps.cli.options import (
    ComputeOptions,
    Force,
    Json,
    locate_model,
    set_threads_and_seed,
    takes_compute_options,
)
from clearhead.base.errors import InputError, RunFailure
from clearhead.base.files import refuse_unwritable, write_output

Steps = Annotated[int | None, typer.Option("--steps", min=1, help="For a run file: the number of steps to train.")]
Kills = Annotated[int | None, typer.Option("--kills", min=1, help="For a run file: the number of kills; by default 5.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="For a model: also write the report as an HTML file.")
]

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="name=value", help="For FILE.py: arguments of its comparison, such as mask='block'."),
]
Against = Annotated[
    str | None, typer.Option("--against", metavar="LIBRARY", help="The library to compare with: transformers.")
]
Reference = Annotated[
    Path | None, typer.Option("--reference", metavar="FOLDER", help="Folder that the library loads; by default REF.")
]
Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", min=0.0, help="The largest relative difference that counts as equal; by default 1e-4."),
]
Hint = Annotated[
    int | None,
    typer.Option("--hint", min=1, max=3, help="For FILE.py: 1 shows the place, 2 the mathematics, 3 the fix."),
]
Width = Annotated[
    int | None, typer.Option("--width", min=2, help="For FILE.py: the width of the built module; by default 24.")
]
Heads = Annotated[
    int | None, typer.Option("--heads", min=1, help="For FILE.py: the heads of the built module; by default 3.")
]
As = Annotated[
    str | None, typer.Option("--as", metavar="KIND", help="For FILE.py:NAME: its kind; by default derived from NAME.")
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="S", min=1.0, help="For FILE.py: the time limit in seconds; by default 120."),
]


@takes_compute_options
def check(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint, a run, a run file, FILE.py[:NAME].")],
    settings: Settings = None,
    against: Against = None,
    reference: Reference = None,
    tolerance: Tolerance = None,
    hint: Hint = None,
    width: Width = None,
    heads: Heads = None,
    kind: As = None,
    time_limit: TimeLimit = None,
    steps: Steps = None,
    kills: Kills = None,
    html: Html = None,
    force: Force = False,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Check a model, compare it with transformers, a training with itself, or your own Transformer with the paper.

    \b
    Example:
      clearhead check runs/de-en --html report.html
      clearhead check bert-base-uncased-folder --against transformers
      clearhead check mine.py:MyAttention mask='block' --hint 1
      clearhead check run.toml --json > certificate.json

    A checkpoint or run is computed in single and double precision. The inputs that each output depends on are compared
    with the masks. Batches, padding, caches, packing, attention kernels and files may change results by rounding only.
    Weights, heads, norms and embedding rows are inspected too. With --against transformers, both models read random,
    padded and real texts, and the first submodule that differs is named with the cause.

    FILE.py or a notebook runs in another process and is compared with the paper; a known mistake that gives the same
    numbers is named. The words name=value are arguments of the comparison, as in Python. The first steps of a run file
    are trained, killed and resumed; every bit must equal training without a kill. The output is a certificate. The exit
    code is 1 if something is wrong, differs or is not written yet, and 2 if it cannot be compared. With --json, the
    last line is {"ok", "findings"} and more, {"same", "divergence", "causes"}, or {"ok", "reports"}.
    """
    from clearhead.apps.check.handwritten.files import python_file

    file, library = python_file(ref), {"--against": against, "--reference": reference, "--tolerance": tolerance}
    machine = _options_without_default(compute) | {"--html": html, "--force": force or None}
    file_options: dict[str, Any] = {"--hint": hint, "--width": width, "--heads": heads, "--as": kind}
    file_options |= {"--time-limit": time_limit, "name=value": settings or None}
    job = {"--steps": steps, "--kills": kills}
    if file is not None:
        _refuse_unused(f"{file[0]} is a Python file", {**machine, "--threads": None}, library, job)
        _check_file(*file, file_options, compute.threads or 1, as_json=as_json)
    elif is_run_file(ref):
        _refuse_unused(f"{ref} is a run file (.toml)", {**machine, "--seed": None}, library, file_options)
        check_run_file(ref, steps=steps, kills=kills, seed=compute.seed, as_json=as_json)
    elif is_certificate(ref):
        check_certificate(ref, machine | library | file_options | job, as_json=as_json)
    elif any(value is not None for value in library.values()):
        _refuse_unused(f"{ref} is compared on the CPU in fp32", {**machine, "--threads": None}, file_options, job)
        _check_checkpoint(ref, against, reference, tolerance, compute.threads, as_json=as_json)
    else:
        _refuse_unused(f"{ref} is a checkpoint or a run", file_options, job)
        check_model(ref, compute, html=html, force=force, as_json=as_json)


def _options_without_default(compute: ComputeOptions) -> dict[str, object]:
    """Return the values of the options for running a model, by option name; None for an option at its default."""
    return {
        "--device": None if compute.device == "auto" else compute.device,
        "--precision": None if compute.precision == "auto" else compute.precision,
        "--threads": compute.threads,
        "--batch-size": compute.batch_size,
        "--seed": compute.seed,
    }


def _refuse_unused(reason: str, *options: Mapping[str, object]) -> None:
    """Refuse options that have no effect on the check of the given input.

    Args:
        reason: the kind of input that makes the options useless, as the start of the message.
        options: option values by option name; None means not given.

    Raises:
        InputError: at least one of the options is given.
    """
    names = [name for group in options for name, value in group.items() if value is not None]
    if names:
        raise InputError(f"{reason}: {' and '.join(names)} would have no effect; leave that out")


def _check_checkpoint(
    ref: str,
    against: str | None,
    reference: Path | None,
    tolerance: float | None,
    threads: int | None,
    *,
    as_json: bool,
) -> None:
    from clearhead.base.files import explain_absent

    if against is None:
        raise InputError("--reference and --tolerance have no effect without --against: add --against transformers")
    if against != "transformers":
        raise InputError(f"--against expects transformers, got '{against}'")
    if reference is not None and not reference.exists():
        raise InputError(f"--reference {reference}: {explain_absent(reference, 'folder')}")
    if reference is not None and not (reference / "config.json").is_file():
        raise InputError(f"{reference} is not a Hugging Face checkpoint: it has no config.json; name another folder")
    resolved_ref = locate_model(ref)
    set_threads_and_seed(threads, None)
    from clearhead.apps.check.parity import compare_with_transformers

    with _hf_folder(resolved_ref) as folder:
        report = compare_with_transformers(
            folder, reference=reference, tolerance=tolerance if tolerance is not None else 1e-4
        )
    # A run was saved in a temporary folder: show the name that the user gave.
    report = replace(report, folder=resolved_ref, reference=resolved_ref if reference is None else report.reference)
    print_either(as_json, report.record(), *report.lines())
    if not report.is_same:
        raise typer.Exit(1)


def _settings(words: list[str]) -> dict[str, object]:
    """Parse keyword arguments from words name=value; values are Python literals, or text without quotation marks."""
    settings: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"'{word}' is not an argument of a comparison: expected name=value, such as mask='block'")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            settings[name] = value
    return settings


def _check_file(path: Path, name: str, options: Mapping[str, Any], threads: int, *, as_json: bool) -> None:
    from clearhead.apps.check.handwritten.files import KINDS, compare_file

    hint, kind, seconds = options["--hint"] or 3, options["--as"], options["--time-limit"] or 120.0
    settings = {"width": options["--width"] or 24, "heads": options["--heads"] or 3}
    settings |= _settings(options["name=value"] or [])
    if kind is not None and (kind not in KINDS or not name):
        raise InputError(f"--as expects one of {', '.join(KINDS)}, with FILE.py:NAME; got {kind}")
    width, heads = settings["width"], settings["heads"]
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width < 1 or width % heads:
        raise InputError(f"--width must be a multiple of --heads; got {width} and {heads}")
    if threads > 1:  # checking the number of threads loads torch
        set_threads_and_seed(threads, None)
    reports, failure = [], None
    try:
        for report in compare_file(path, name, kind=kind, settings=settings, seconds=seconds, threads=threads):
            reports.append(report)
            for line in () if as_json else report.lines(hint):
                print_result(line)
    except RunFailure as error:  # print the reports that came before the failure
        failure = error
    if as_json:
        is_ok = failure is None and all(report.ok for report in reports)
        print_json({"ok": is_ok, "reports": [report.record(hint) for report in reports]})
    if failure is not None:
        raise failure
    verdicts = {report.verdict for report in reports}
    if verdicts & {"wrong", "not written yet"}:
        raise typer.Exit(1)
    if verdicts != {"right"}:
        raise typer.Exit(2)


@contextmanager
def _hf_folder(ref: str) -> Iterator[Path]:
    """Yield the folder of a model as a Hugging Face checkpoint; other models are saved as one in a temporary folder."""
    import clearhead
    from clearhead.checkpoints.reference import ModelReference

    checkpoint = ModelReference.parse(ref).checkpoint_folder()
    if checkpoint is not None:
        yield checkpoint
        return
    model = clearhead.load(ref, device="cpu", precision="fp32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "saved"
        model.save(folder, format="hf")
        print_message(f"{ref} was saved as a Hugging Face checkpoint for the comparison")
        yield folder


def is_run_file(ref: str) -> bool:
    """Return whether a reference names a run file."""
    return ref.endswith(".toml") and not Path(ref).is_dir()


def is_certificate(ref: str) -> bool:
    """Return whether a reference names a JSON file with the certificate of a checked training job."""
    return ref.endswith(".json") and Path(ref).is_file()


def check_certificate(file: str, options: Mapping[str, object], *, as_json: bool) -> None:
    """Print the certificate of a training job, and exit with code 1 if it does not hold any more.

    Raises:
        InputError: the file cannot be read, or an option is given.
    """
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{file} is a certificate: {name} would have no effect; leave that out")
    from clearhead.apps.check.job.job import read_certificate

    record, lines = read_certificate(Path(file))
    print_either(as_json, record, *lines)
    if not record["ok"]:
        raise typer.Exit(1)


def check_run_file(file: str, *, steps: int | None, kills: int | None, seed: int | None, as_json: bool) -> None:
    """Check that a training job resumes exactly, print its certificate, and exit with code 1 if something is wrong.

    Raises:
        InputError: the run file cannot be trained.
    """
    # Import late: the libraries for training take seconds to load; a fault in the run file is reported before.
    from clearhead.training.runfile.read import load_run_file

    load_run_file(Path(file))
    from clearhead.apps.check.job.job import check_job

    report = check_job(file, steps=steps, kills=5 if kills is None else kills, seed=seed)
    print_either(as_json, report.record(), *report.lines())
    if not report.is_right:
        raise typer.Exit(1)


def check_model(ref: str, compute: ComputeOptions, *, html: Path | None, force: bool, as_json: bool) -> None:
    """Check a model, print the report, and exit with code 1 if something is wrong.

    Raises:
        InputError: the model cannot be loaded or checked, or the file cannot be written.
    """
    _refuse_unused(
        f"{ref} is checked in single and in double precision",
        {"--precision": _options_without_default(compute)["--precision"]},
    )
    if html is not None:
        refuse_unwritable(html, force=force)
    elif force:
        raise InputError("--force has no effect without --html; leave it out")
    resolved_ref = locate_model(ref)
    set_threads_and_seed(compute.threads, compute.seed)
    from clearhead.apps.check.model import model as checks
    from clearhead.apps.check.model.report import report_html
    from clearhead.model.loading import load_unchecked

    model, seed = load_unchecked(resolved_ref, device=compute.device), 7 if compute.seed is None else compute.seed
    report = checks.check_model(model, ref, rows_at_once=compute.batch_size, seed=seed)
    if html is not None:
        write_output(html, report_html(report), force=force)
        print_message(f"wrote {html}")
    print_either(as_json, report.record(), *report.lines())
    if not report.ok:
        raise typer.Exit(1)
