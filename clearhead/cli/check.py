"""`clearhead check`: whether a checkpoint computes here what it computes elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import print_json, print_message, print_result
from clearhead.cli.options import Json
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
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint's folder, a hub name or a run directory.")],
    against: Against = None,
    reference: Reference = None,
    tolerance: Tolerance = 1e-4,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint with what another library computes from it, layer by layer.

    \b
    Example:
      clearhead check bert-base-uncased-folder --against transformers
      clearhead check converted --against transformers --reference original

    Both read random tokens, padded ones and, where there is a tokenizer, real text; the tokenizers read hard strings.
    Where they differ, the first part that does is named, and the likely cause, found by experiment: one thing after
    another is changed here until the outputs agree. A run directory is written in the layout of the hub first. Ends
    with exit code 1 where they differ. --json ends with {"same", "largest", "layers", "divergence", "causes"} and more.
    """
    from clearhead.check.parity import compare_with_transformers

    if against is None:
        raise InputError("say what to compare with: --against transformers")
    if against != "transformers":
        raise InputError(f"--against {against} is not known; expected transformers")
    if reference is not None and not (reference / "config.json").is_file():
        raise InputError(f"{reference} is no checkpoint's folder: it holds no config.json")
    with _folder(ref) as folder:
        card = compare_with_transformers(folder, reference=reference, tolerance=tolerance)
    if as_json:
        print_json(card.record())
    else:
        for line in card.lines():
            print_result(line)
    if not card.is_same:
        raise typer.Exit(1)


@contextmanager
def _folder(ref: str) -> Iterator[Path]:
    """Give the folder of a reference in the layout of the hub; a model of ours is written there first."""
    from clearhead.hf.files.hub import find_checkpoint

    found = find_checkpoint(ref)
    if found is not None:
        yield found
        return
    import clearhead

    model = clearhead.load(ref, device="cpu", precision="fp32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "saved"
        model.save(folder, format="hf")
        print_message(f"{ref} was written in the layout of the hub to be compared")
        yield folder
