"""`clearhead check`: whether a checkpoint, or a hand-written part of a Transformer, computes what it should."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.check_job import Kills, Steps, check_run_file, is_run_file
from clearhead.cli.console import print_either, print_message
from clearhead.cli.options import Json, Seed, located
from clearhead.errors import InputError

Against = Annotated[
    str | None, typer.Option("--against", metavar="LIBRARY", help="What to compare with: transformers.")
]
Reference = Annotated[
    Path | None, typer.Option("--reference", metavar="FOLDER", help="What the library loads; by default the same REF.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance", min=0.0, help="The largest relative difference that counts as the same; by default 1e-4."
    ),
]
Hint = Annotated[
    int | None,
    typer.Option("--hint", min=1, max=3, help="Of FILE.py: 1 where it differs, 2 the mathematics, 3 the mend."),
]
Width = Annotated[
    int | None, typer.Option("--width", min=2, help="Of FILE.py: the width of what is built; by default 24.")
]
Heads = Annotated[
    int | None, typer.Option("--heads", min=1, help="Of FILE.py: the heads of what is built; by default 3.")
]
As = Annotated[
    str | None, typer.Option("--as", metavar="KIND", help="Of FILE.py:NAME: what it is; by default by its name.")
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="S", min=1.0, help="Of FILE.py: the most seconds; by default 120."),
]


def check(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint, a run, a run file, FILE.py[:NAME].")],
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
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint with another library, layer by layer, or your own Transformer with the mathematics.

    \b
    Example:
      clearhead check bert-base-uncased-folder --against transformers
      clearhead check converted --against transformers --reference original
      clearhead check mine.py:MyAttention --hint 1
      clearhead check tests/adapters.py
      clearhead check run.toml

    Both models read random tokens, padded tokens and, if there is a tokenizer, real text; the tokenizers read hard
    strings. If they differ, the first differing submodule is named with the likely cause, found by experiment: one
    setting after another is changed here until the outputs agree. A run directory is first saved as a Hugging Face
    checkpoint. The exit code is 1 if they differ. --json ends with {"same", "largest", "layers", "divergence",
    "causes"} and more.

    FILE.py is run in a process of its own. What is in it (a class or function whose name says what it is: attention,
    norm, positions, rope, loss, layer, transformer) is compared with the mathematics on the same weights, and where it
    differs, the known mistake that gives the same numbers is named. The exit code is 1 if a part is wrong or not
    written yet, and 2 if it cannot be compared. --json ends with {"ok", "reports"}.

    A run file (.toml) is checked as a job: its first steps are trained undisturbed, and again with SIGKILL at random
    moments, inside saving and inside validation, each time resumed; every bit must be the same. Without dropout, halves
    of batches accumulated, and two processes, must give the gradients of whole batches in one. Nothing is left behind.
    """
    from clearhead.check.handwritten.files import python_file

    file = python_file(ref)
    options: Mapping[str, Mapping[str, object]] = {
        "a Python file": {"--hint": hint, "--width": width, "--heads": heads, "--as": kind, "--time-limit": time_limit},
        "a run file (.toml)": {"--steps": steps, "--kills": kills, "--seed": seed},
        "a checkpoint or a run": {"--against": against, "--reference": reference, "--tolerance": tolerance},
    }
    if file is not None:
        _refuse_others(options, f"{file[0]}", "a Python file")
        _check_file(*file, hint or 3, kind, (width or 24, heads or 3), time_limit or 120.0, as_json)
    elif is_run_file(ref):
        _refuse_others(options, ref, "a run file (.toml)")
        check_run_file(ref, steps=steps, kills=kills, seed=seed, as_json=as_json)
    else:
        _refuse_others(options, ref, "a checkpoint or a run")
        _check_checkpoint(ref, against, reference, 1e-4 if tolerance is None else tolerance, as_json)


def _refuse_others(options: Mapping[str, Mapping[str, object]], ref: str, subject: str) -> None:
    """Refuse options that are for something else.

    Args:
        options: their values by their names, None where one is not given, for each thing that can be checked.
        ref, subject: what is checked, and which of these it is.

    Raises:
        InputError: one is given.
    """
    for other, values in options.items():
        if other != subject and any(value is not None for value in values.values()):
            *names, last = values
            raise InputError(f"{', '.join(names)} and {last} are for {other}; {ref} is {subject}")


def _check_checkpoint(ref: str, against: str | None, reference: Path | None, tolerance: float, as_json: bool) -> None:
    from clearhead.files import absent

    if against is None:
        raise InputError("name the library to compare with: --against transformers")
    if against != "transformers":
        raise InputError(f"--against {against} is not known; expected transformers")
    if reference is not None and not reference.exists():
        raise InputError(f"--reference {reference}: {absent(reference, 'folder')}")
    if reference is not None and not (reference / "config.json").is_file():
        raise InputError(f"{reference} is not a Hugging Face checkpoint: it has no config.json")
    place = located(ref)
    from clearhead.check.parity import compare_with_transformers

    with _folder(place) as folder:
        report = compare_with_transformers(folder, reference=reference, tolerance=tolerance)
    print_either(as_json, report.record(), *report.lines())
    if not report.is_same:
        raise typer.Exit(1)


def _check_file(
    path: Path, name: str, hint: int, kind: str | None, sizes: tuple[int, int], seconds: float, as_json: bool
) -> None:
    from clearhead.check.handwritten.files import KINDS, compare_file

    if kind is not None and (kind not in KINDS or not name):
        raise InputError(f"--as takes one of {', '.join(KINDS)}, with FILE.py:NAME; got {kind}")
    if sizes[0] % sizes[1]:
        raise InputError(f"--width must be a multiple of --heads; got {sizes[0]} and {sizes[1]}")
    reports = compare_file(path, name, kind=kind, width=sizes[0], heads=sizes[1], seconds=seconds)
    record = {"ok": all(report.ok for report in reports), "reports": [report.record(hint) for report in reports]}
    print_either(as_json, record, *(line for report in reports for line in report.lines(hint)))
    verdicts = {report.verdict for report in reports}
    if verdicts & {"wrong", "not written yet"}:
        raise typer.Exit(1)
    if verdicts != {"right"}:
        raise typer.Exit(2)


@contextmanager
def _folder(place: str) -> Iterator[Path]:
    """Yield the folder of a Hugging Face checkpoint; another model is saved as one first."""
    import clearhead
    from clearhead.hf.files.hub import find_checkpoint

    found = find_checkpoint(place)
    if found is not None:
        yield found
        return
    model = clearhead.load(place, device="cpu", precision="fp32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "saved"
        model.save(folder, format="hf")
        print_message(f"{place} was saved as a Hugging Face checkpoint for the comparison")
        yield folder
