"""`clearhead check`: whether a checkpoint computes the same here and in transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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
    float, typer.Option("--tolerance", min=0.0, help="The largest relative difference that counts as the same.")
]


def check(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint, a run directory or a run file.")],
    against: Against = None,
    reference: Reference = None,
    tolerance: Tolerance = 1e-4,
    steps: Steps = None,
    kills: Kills = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare the outputs of a checkpoint with those in another library, layer by layer.

    \b
    Example:
      clearhead check bert-base-uncased-folder --against transformers
      clearhead check converted --against transformers --reference original
      clearhead check run.toml

    Both models read random tokens, padded tokens and, if there is a tokenizer, real text; the tokenizers read hard
    strings. If they differ, the first differing submodule is named with the likely cause, found by experiment: one
    setting after another is changed here until the outputs agree. A run directory is first saved as a Hugging Face
    checkpoint. The exit code is 1 if they differ. --json ends with {"same", "largest", "layers", "divergence",
    "causes"} and more.

    A run file (.toml) is checked as a job: its first steps are trained undisturbed, and again with SIGKILL at random
    moments, inside saving and inside validation, each time resumed; every bit must be the same. Without dropout, halves
    of batches accumulated, and two processes, must give the gradients of whole batches in one. Nothing is left behind.
    """
    from clearhead.files import absent

    if is_run_file(ref):
        return check_run_file(ref, steps=steps, kills=kills, seed=seed, as_json=as_json, against=against)
    if (steps, kills, seed) != (None, None, None):
        raise InputError("--steps, --kills and --seed are for a run file (.toml)")
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
