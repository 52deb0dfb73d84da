"""Shared code of the demos: parse options, create the run directory, collect source code and train on it."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead import Model
    from clearhead.training.record import RunResult


HEADS_PAGE = "plots/heads.html"
"""Path of the page with all heads, in the run directory."""


def results_console() -> Console:
    """Return a console on standard output that does not wrap lines, highlight numbers or replace emoji codes."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


@dataclass(frozen=True)
class DemoPlan:
    """The options of every demo.

    Args:
        run: the run directory; it must not exist.
        seed: the seed of the data and of the training.
        device: the device of the trained model.
        precision: the precision of the trained model.
        batch_size: the batch size of the trained model. None means the largest that fits.
        overrides: the changes to the run file, such as "train.steps=500".
        console: the console for the results.
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
    """Results of a demo.

    Args:
        record: the results for `--json`.
        pictures: the title of each picture -> its file in the run directory.
        commands: the description of each suggested command -> its command line.
    """

    record: dict[str, Any]
    pictures: Mapping[str, str]
    commands: Mapping[str, str] = field(default_factory=dict)


def data_folder(plan: DemoPlan) -> Path:
    """Create the run directory with a folder for data, and return that folder."""
    # The run directory may hold these two before its run begins: see clearhead.checkpoints.runs.directory.
    (plan.run / "plots").mkdir(parents=True)
    folder = plan.run / "data"
    folder.mkdir()
    return folder


def write_tables(plan: DemoPlan, parts: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Path]:
    """Write a .tsv file for each set into the run directory, and return the paths by name."""
    folder = data_folder(plan)
    files = {name: folder / f"{name}.tsv" for name in parts}
    for name, rows in parts.items():
        files[name].write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return files


def train_recipe(recipe: str, plan: DemoPlan, files: Mapping[str, Path]) -> RunResult:
    """Fill in the run file of a demo and train with it.

    Args:
        recipe: the run file, with {run} and a name in braces for each file.
        plan: the run directory, the seed and the overrides.
        files: the file or folder for each name in braces.
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
    """Collect source code of Python's standard library, print its size, train on it, and return the sources.

    Args:
        recipe: the run file, as in `train_recipe`, with {train} and {valid}.
        plan: the options of every demo.
        max_bytes: the maximum total size of the training files in bytes.
        max_valid_bytes: the maximum total size of the held-out files in bytes.
        folder: the folder of the sources. None means the library folder of this Python.
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
    """Load the model from a checkpoint of the run, such as "best"."""
    import clearhead

    return clearhead.load(f"{plan.run}@{label}", device=plan.device, precision=plan.precision)


def write_heads_page(model: Model, text: str, plan: DemoPlan, *, generate: int = 0) -> None:
    """Write a page that shows the attention of every head for one text.

    Args:
        model: the trained model.
        text: the text.
        plan: the options of the demo; the page is written into its run directory.
        generate: the maximum number of tokens that a decoder-only model generates after the text.
    """
    from clearhead.interpret.maps.page import SampleOptions

    maps = model.attention(text, generate=generate)
    maps.save_html(plan.run / HEADS_PAGE, title=plan.run.name, options=SampleOptions(effects=True))


def free_folder(out: Path | None, first: Path) -> Path:
    """Return the folder for the run: the requested one, or the first free name.

    Args:
        out: the requested folder. None means a free name.
        first: the first name to try; a number is added if it is taken.

    Raises:
        InputError: the requested folder is not empty.
    """
    if out is None:
        return next(path for path in _candidate_folders(first) if not path.exists())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already and is not an empty folder: choose another with --out")
    return out


def _candidate_folders(first: Path) -> Iterator[Path]:
    yield first
    number = 2
    while True:
        yield first.with_name(f"{first.name}-{number}")
        number += 1


# Folders to skip: installed packages, tests, character tables, help texts, and build files of Python.
LEFT_OUT = frozenset(
    {
        *("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"),
        *("__pycache__", "__phello__", "lib-dynload"),
    }
)
_BUILT = ("_sysconfigdata", "config-")
_HASHED = 2**32


class SourceFile(NamedTuple):
    """One source file: its name relative to the library's folder, with forward slashes, and its text."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """The size of the text as UTF-8."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class LibrarySources:
    """Source files of Python's library in two sets, each sorted by name.

    Args:
        train: the training files.
        valid: the held-out files.
        folder: the folder of the library.
    """

    train: list[SourceFile]
    valid: list[SourceFile]
    folder: Path


def library_sources(
    *, max_bytes: int, max_valid_bytes: int, valid_share: float = 0.05, folder: Path | None = None
) -> LibrarySources:
    """Read the source files of Python's standard library and split them by file.

    The hash of a file's name decides its set and its order. So a file never changes its set if others are added or
    removed. If not all fit, the chosen files are spread over the whole library.

    Args:
        max_bytes: the maximum total size of the training files in bytes of UTF-8.
        max_valid_bytes: the maximum total size of the held-out files in bytes of UTF-8.
        valid_share: the share of all files to hold out, between 0 and 1.
        folder: the folder of the sources. None means the library folder of this Python.

    Raises:
        InputError: there are too few source files for two sets.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    turns = sorted((_hash_name(name), name) for name in _names(folder))
    valid = _take(folder, [name for turn, name in turns if turn < valid_share * _HASHED], max_valid_bytes)
    train = _take(folder, [name for turn, name in turns if turn >= valid_share * _HASHED], max_bytes)
    if not train or not valid:
        raise InputError(
            f"expected the source files (*.py) of Python's standard library in {folder}, got only {len(turns)}: use a "
            "Python that was installed with them"
        )
    return LibrarySources(train, valid, folder)


def write_sources(files: list[SourceFile], folder: Path) -> None:
    """Write files below a new folder under their names, with line feeds as line ends."""
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8", newline="\n")


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of the source files below a folder, without following links to folders."""
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(_BUILT)]
        for name in files:
            if name.endswith(".py") and not name.startswith(_BUILT):
                yield (Path(here) / name).relative_to(folder).as_posix()


def _hash_name(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big")


def _take(folder: Path, names: list[str], max_bytes: int) -> list[SourceFile]:
    """Read files in order, skip those too large for the rest of `max_bytes`, and return the others sorted by name."""
    taken: list[SourceFile] = []
    left = max_bytes
    for name in names:
        text = _read(folder / name)
        if text is None:
            continue
        file = SourceFile(name, text)
        if (size := file.num_bytes) <= left:
            taken.append(file)
            left -= size
    return sorted(taken)


def _read(path: Path) -> str | None:
    """Return the text of a file; None if it is empty or not readable as UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() and "\0" not in text else None
