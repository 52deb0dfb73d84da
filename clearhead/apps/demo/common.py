"""What the demos share: their options, their run directory, their training and their outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from clearhead.apps.demo.library_sources import LibrarySources, library_sources, write_sources
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead import Model
    from clearhead.training.record import RunResult


HEADS_PAGE = "plots/heads.html"
"""The page of every head, in the run directory."""


def results_console() -> Console:
    """Return a console on standard output that does not wrap lines, highlight numbers or replace emoji codes."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


@dataclass(frozen=True)
class DemoPlan:
    """The options of every demo.

    Args:
        run: the run directory, new.
        seed: of the data and of the training.
        device: where the trained model runs.
        precision: of the trained model.
        batch_size: texts computed together once the model is trained; None: what fits.
        overrides: changes to the run file, such as "train.steps=500".
        console: shows the results.
    """

    run: Path
    seed: int
    device: str = "auto"
    precision: str = "auto"
    batch_size: int | None = None
    overrides: Sequence[str] = ()
    console: Console = field(default_factory=results_console, compare=False)


@dataclass(frozen=True)
class DemoOutcome:
    """The outcome of a demo.

    Args:
        record: its results, for `--json`.
        pictures: what a picture shows -> its file in the run directory.
        commands: what can be done next -> its command line.
    """

    record: dict[str, Any]
    pictures: Mapping[str, str]
    commands: Mapping[str, str] = field(default_factory=dict)


def data_folder(plan: DemoPlan) -> Path:
    """Make the run directory with a folder for its data, and return that folder."""
    # The run directory may hold these two before its run begins: see clearhead.checkpoints.runs.directory.
    (plan.run / "plots").mkdir(parents=True)
    folder = plan.run / "data"
    folder.mkdir()
    return folder


def write_tables(plan: DemoPlan, parts: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Path]:
    """Write rows of columns into the run directory, a .tsv file for each part, and return where they are."""
    folder = data_folder(plan)
    files = {name: folder / f"{name}.tsv" for name in parts}
    for name, rows in parts.items():
        files[name].write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return files


def train_recipe(recipe: str, plan: DemoPlan, files: Mapping[str, Path]) -> RunResult:
    """Train through an ordinary run file.

    Args:
        recipe: the run file, with {run} and a name in braces for each file.
        plan: the run directory, the seed and the overrides.
        files: name -> the file or folder that replaces it.
    """
    from clearhead.training.assemble import train_run
    from clearhead.training.runfile.read import parse_run_file

    quoted = {name: json.dumps(str(path)) for name, path in {**files, "run": plan.run}.items()}
    text = recipe.format_map(quoted)
    run_file = parse_run_file(text, "the demo's run file", [f"train.seed={plan.seed}", *plan.overrides])
    return train_run(run_file)


def train_on_library(
    recipe: str, plan: DemoPlan, *, max_bytes: int, max_valid_bytes: int, folder: Path | None
) -> LibrarySources:
    """Gather source code of Python's library, show how much there is, and train on it; return it.

    Args:
        recipe: the run file, as for `train_recipe`, with {train} and {valid}.
        plan: the options of every demo.
        max_bytes: the largest total size of the files to learn from.
        max_valid_bytes: the largest total size of the files held out.
        folder: where the sources are; None: where this Python keeps its library.
    """
    sources = library_sources(max_bytes=max_bytes, max_valid_bytes=max_valid_bytes, folder=folder)
    parts = {"train": sources.train, "valid": sources.valid}
    train, valid = (sum(file.num_bytes for file in files) / 1e6 for files in parts.values())
    plan.console.print(
        f"Python's own library, found in {sources.folder}: {len(sources.train)} files ({train:.2f} MB) to learn from, "
        f"{len(sources.valid)} files ({valid:.2f} MB) held out.",
        markup=False,
    )
    data = data_folder(plan)
    for name, files in parts.items():
        write_sources(files, data / name)
    train_recipe(recipe, plan, {name: data / name for name in parts})
    return sources


def load_trained(plan: DemoPlan, label: str = "best") -> Model:
    """Return the model of a checkpoint of the run."""
    import clearhead

    return clearhead.load(f"{plan.run}@{label}", device=plan.device, precision=plan.precision)


def write_heads_page(model: Model, text: str, plan: DemoPlan, *, generate: int = 0) -> None:
    """Write a page that shows what every head does while the model reads a text.

    Args:
        model: the trained model.
        text: what it reads.
        plan: the run directory.
        generate: most tokens that a decoder-only model writes behind the text.
    """
    from clearhead.interpret.maps.page import SampleOptions

    maps = model.attention(text, generate=generate)
    maps.save_html(plan.run / HEADS_PAGE, title=plan.run.name, options=SampleOptions(effects=True))


def free_folder(out: Path | None, first: Path) -> Path:
    """Return the folder for the run: the requested one, or the first free name.

    Args:
        out: the requested folder, if any.
        first: the name that is tried first; a number is added if it is taken.

    Raises:
        InputError: the requested folder is not empty.
    """
    if out is None:
        return next(path for path in _names(first) if not path.exists())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already and is not an empty folder; name a new one with --out")
    return out


def _names(first: Path) -> Iterator[Path]:
    yield first
    number = 2
    while True:
        yield first.with_name(f"{first.name}-{number}")
        number += 1
