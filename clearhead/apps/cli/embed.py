"""`clearhead embed`: a vector for each text, or the similarity of two texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.lines import STANDARD_INPUT, Input, Line, answer_lines
from clearhead.apps.cli.options import ComputeOptions, Force, LineFile, Paired, Ref, takes_compute_options
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from numpy import ndarray

    from clearhead import Model


ARRAY = ".npy"


@takes_compute_options
def embed(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="The cosine of the two texts in a line, with a tab between them.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .npy file for the vectors, float32, a row for each line.")
    ] = None,
    force: Force = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object for each line of input; with -o one in all.")
    ] = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Make a vector of each text, one line in, one line out.

    \b
    Example:
      clearhead embed runs/captions captions.txt -o captions.npy
      clearhead embed runs/captions pairs.tsv --similarity
      echo "two dogs in the snow" | clearhead embed runs/captions --json

    Vectors are pooled and normalized as the model says. Without -o a line of output is the vector as a JSON list. With
    --pair the two texts of a line are read together and have one vector; with --similarity each has its own, and the
    output is their cosine, from -1 to 1. An empty line has no vector: its line of output is empty, or null in JSON, and
    -o refuses it, and writes its file when all is done. --json writes {"index", "text", "vector"}, for two texts "pair"
    too, or "similarity"; with -o it ends with {"file", "texts", "width"}.
    """
    _check_output(output, force, pair, similarity)
    lines, size = Input.of(file), compute.batch_size
    model = compute.load_model(ref)
    if similarity:
        _show_similarities(model, lines, size, as_json)
        return
    rows: list[ndarray] = []

    def keep(line: Line, vector: ndarray | None) -> None:
        if vector is None:
            raise InputError(f"{lines.name}:{line.number}: the line is empty, and every row of {output} is a vector")
        rows.append(vector)

    def show(line: Line, vector: ndarray | None) -> None:
        numbers = None if vector is None else [float(number) for number in vector]
        text = "" if numbers is None else json.dumps(numbers)
        print_either(as_json, {**line.record(), "vector": numbers}, text)

    receive = show if output is None else keep
    answer_lines(
        lines, lambda texts: model.embed(texts, batch_size=size), receive, batch_size=size, paired=pair, output=output
    )
    if output is not None:
        _save(output, rows, lines.name, as_json)


def _check_output(output: Path | None, force: bool, pair: bool, similarity: bool) -> None:
    from clearhead.base.files import absent, refuse_unwritable

    if similarity and (pair or output is not None):
        other = "--pair reads both texts as one" if pair else "-o keeps vectors"
        raise InputError(f"{other}, and --similarity compares two vectors: leave out one of them")
    if output is not None and output.suffix != ARRAY:
        raise InputError(f"-o writes a {ARRAY} file, but names {output}: give a name that ends in {ARRAY}")
    if force and output is None:
        raise InputError("--force has no effect without -o")
    if output is not None:
        refuse_unwritable(output, force=force)
        if not output.parent.is_dir():
            raise InputError(f"{output} cannot be written: {absent(output.parent, 'folder')}")


def _save(output: Path, rows: Sequence[ndarray], name: str | None, as_json: bool) -> None:
    """Write the vectors of all lines; the file appears when it is complete."""
    import numpy as np

    from clearhead.base.files import replacing

    if not rows:
        raise InputError(f"{name}: there is no text to embed; expected at least one line")
    vectors = np.stack(rows)
    try:
        with replacing(output) as temporary, temporary.open("wb") as file:
            np.save(file, vectors, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}") from None
    print_message(f"{len(vectors)} vectors of width {vectors.shape[1]}")
    print_either(as_json, {"file": str(output), "texts": len(vectors), "width": vectors.shape[1]}, str(output))


def _show_similarities(model: Model, lines: Input, batch_size: int | None, as_json: bool) -> None:
    from clearhead.tasks.embed.use import similarity

    def cosines(pairs: list[tuple[str, str]]) -> list[float]:
        firsts, seconds = (list(texts) for texts in zip(*pairs, strict=True))
        given = model.tree, model.tokenizer, firsts, seconds
        found = similarity(*given, max_length=model.task.max_length, batch_size=batch_size)
        return [float(cosine) for cosine in found]

    def show(line: Line, cosine: float | None) -> None:
        text = "" if cosine is None else f"{cosine:.6f}"
        print_either(as_json, {**line.record(), "similarity": cosine}, text)

    answer_lines(lines, cosines, show, paired=True, batch_size=batch_size)
