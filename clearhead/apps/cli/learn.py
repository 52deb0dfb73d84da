"""`clearhead learn`: copy the lessons into a folder, and open one of them."""

from __future__ import annotations

import filecmp
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from clearhead.apps.cli.console import print_message, print_text
from clearhead.base.commands import make_command
from clearhead.base.errors import InputError, RunFailure
from clearhead.base.files import read_text_file

_PACKAGE: Final = Path(__file__).parents[2]
# A wheel has the lessons in the package; the repository has them in docs.
_SOURCES: Final = _PACKAGE / "lessons", _PACKAGE.parent / "docs" / "lessons"
_SHARED: Final = "shared.py"
_CELL: Final = "# %%"
_PAUSE: Final = """
def _pause():
    try:
        input("[Enter runs this, Ctrl-D ends] ")
    except (EOFError, KeyboardInterrupt):
        print()
        raise SystemExit(0) from None
"""
# Solutions run, since later cells need them, but their output is hidden.
_HIDE: Final = "import io as _io, sys as _sys\n_shown, _sys.stdout = _sys.stdout, _io.StringIO()"
_SHOW: Final = "_sys.stdout = _shown"


def learn(
    number: Annotated[int | None, typer.Argument(metavar="[N]", help="The lesson to open; without it, a list.")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder for the lessons.")] = Path("lessons"),
    plain: Annotated[bool, typer.Option("--plain", help="Run in the terminal, even if Jupyter is installed.")] = False,
) -> None:
    """Copy the lessons into a folder, and open one in Jupyter or, if Jupyter is missing, in the terminal.

    \b
    Example:
      clearhead learn
      clearhead learn 2
      clearhead learn 2 --plain

    Existing files are not replaced. The first lesson that needs a model trains it in about a minute. In the terminal,
    Enter runs the next cell and Ctrl-D ends. To solve an exercise, edit the file and open it again. Solutions follow
    the exercises in the file; in the terminal they run without being shown.
    """
    sources = next((folder for folder in _SOURCES if folder.is_dir()), None)
    if sources is None:
        raise InputError("this installation has no lessons: install clearhead from a wheel or its repository")
    lessons = {int(path.name[:2]): path for path in sorted(sources.glob("[0-9][0-9]_*.py"))}
    if number is not None and number not in lessons:
        raise InputError(f"lesson {number} does not exist: expected one of {', '.join(map(str, lessons))}")
    if plain and number is None:
        raise InputError("--plain has no effect without the number of a lesson: give one, such as 1")
    _copy([*lessons.values(), sources / _SHARED], out)
    if number is None:
        for lesson_number, path in lessons.items():
            print_text(f"{lesson_number:>2}  {_title(path)}  {out / path.name}", end="\n")
        print_text(f"Open one: {make_command('learn 1')}", end="\n")
        return
    lesson = out / lessons[number].name
    if not plain and all(importlib.util.find_spec(name) for name in ("jupyterlab", "jupytext")):
        _open_notebook(lesson)
    else:
        _step_through(lesson)


def _copy(sources: list[Path], folder: Path) -> None:
    """Copy the missing lessons into a folder, and report the changed files, which are not replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"--out {folder} is a file: expected a folder, new or with lessons") from None
    unchanged = []
    for source in sources:
        target = folder / source.name
        if not target.exists():
            shutil.copyfile(source, target)
        elif not filecmp.cmp(target, source, shallow=False):
            unchanged.append(target.name)
    if unchanged:
        print_message(f"your changed files in {folder} were not replaced: {', '.join(unchanged)}")


def _title(path: Path) -> str:
    for line in read_text_file(path, "a lesson").splitlines():
        if line.startswith("# # "):
            return line.removeprefix("# # ").lstrip("0123456789 ·.")
    return path.stem


def _open_notebook(lesson: Path) -> None:
    notebook = lesson.with_suffix(".ipynb")
    if not notebook.exists():
        command = [sys.executable, "-m", "jupytext", "--to", "ipynb", "--output", str(notebook), str(lesson)]
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
            raise RunFailure(f"jupytext cannot convert {lesson} to a notebook: fix the error above, or add --plain")
    subprocess.run([sys.executable, "-m", "jupyterlab", str(notebook)], check=False)


def _cells(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind ("text", "solution" or "code") and the content of each cell of a file in the percent format."""
    for cell in f"\n{text}".split(f"\n{_CELL}")[1:]:
        header, _, body = cell.partition("\n")
        if "[markdown]" in header:
            yield "text", "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        else:
            yield "solution" if '"solution"' in header else "code", body


def _step_through(lesson: Path) -> None:
    """Run the lesson as a script in a separate process, which waits for Enter before each code cell."""
    script = [_PAUSE]
    for kind, body in _cells(read_text_file(lesson, "a lesson")):
        if kind == "solution":
            script += [_HIDE, body, _SHOW]
            continue
        script.append(f"print({body.strip()!r}, end='\\n\\n')")
        if kind == "code":
            script += ["_pause()", body]
    paths = filter(None, [str(lesson.parent.resolve()), os.environ.get("PYTHONPATH")])
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, lesson.name)
        copy.write_text("\n".join(script), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if subprocess.run([sys.executable, str(copy)], env=environment, check=False).returncode:
            raise RunFailure(f"{lesson} stopped at the error above: fix it in the file, and open the lesson again")
