"""`clearhead learn`: copy the lessons into a folder, and open one of them."""

from __future__ import annotations

import filecmp
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from clearhead.apps.cli.console import print_message, print_text
from clearhead.base.commands import make_command, make_install_command
from clearhead.base.errors import InputError, RunFailure

_PACKAGE: Final = Path(__file__).parents[2]
# A wheel has the lessons in the package; the repository has them in docs.
_SOURCES: Final = _PACKAGE / "lessons", _PACKAGE.parent / "docs" / "lessons"
_SHARED: Final = "shared.py"


def learn(
    number: Annotated[int | None, typer.Argument(metavar="[N]", help="The lesson to open; without it, a list.")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder for the lessons.")] = Path("lessons"),
    exercise: Annotated[
        int | None, typer.Option("--exercise", metavar="K", min=1, help="Run only exercise K, in the terminal.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Run in the terminal, even if Jupyter is installed.")] = False,
) -> None:
    """Copy the lessons into a folder, and open one in Jupyter or, if Jupyter is missing, in the terminal.

    \b
    Example:
      clearhead learn
      clearhead learn 2
      clearhead learn 2 --exercise 1

    Existing files are not replaced. The first lesson that needs a model trains
    it in about a minute. In the terminal, Enter runs the next cell and Ctrl-D
    ends; pictures are written to files. To solve an exercise, edit the file,
    then run --exercise: it runs only the code that this exercise needs.
    Solutions follow the exercises in the file and run without being shown.
    Notebooks need two more packages: jupyterlab and jupytext.
    """
    from clearhead.apps.lessons.lesson import find_exercises, read_cells, read_title

    sources = next((folder for folder in _SOURCES if folder.is_dir()), None)
    if sources is None:
        raise InputError("this installation has no lessons: install clearhead from a wheel or its repository")
    lessons = {int(path.name[:2]): path for path in sorted(sources.glob("[0-9][0-9]_*.py"))}
    if number is not None and number not in lessons:
        raise InputError(f"lesson {number} does not exist: expected one of {', '.join(map(str, lessons))}")
    for option, is_given in (("--plain", plain), ("--exercise", exercise is not None)):
        if is_given and number is None:
            raise InputError(f"{option} has no effect without the number of a lesson: give one, such as 1")
    _copy([*lessons.values(), sources / _SHARED], out)
    if number is None:
        for lesson_number, path in lessons.items():
            print_text(f"{lesson_number:>2}  {read_title(read_cells(path))}  {out / path.name}", end="\n")
        print_text(f"Open one: {make_command('learn 1')}", end="\n")
        return
    lesson = out / lessons[number].name
    if exercise is not None:
        count = len(find_exercises(read_cells(lesson)))
        if exercise > count:
            raise InputError(f"--exercise {exercise}: lesson {number} has {count}; expected a number from 1 to {count}")
        _read_in_terminal(lesson, str(exercise))
        return
    has_jupyter, has_jupytext = (importlib.util.find_spec(name) is not None for name in ("jupyterlab", "jupytext"))
    if has_jupyter and not has_jupytext and not plain:
        print_message(f"JupyterLab needs jupytext to open lessons: {make_install_command('jupytext')}")
    if has_jupyter and has_jupytext and not plain:
        _open_notebook(lesson)
    else:
        _read_in_terminal(lesson)


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


def _open_notebook(lesson: Path) -> None:
    notebook = lesson.with_suffix(".ipynb")
    if not notebook.exists():
        command = [sys.executable, "-m", "jupytext", "--to", "ipynb", "--output", str(notebook), str(lesson)]
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
            raise RunFailure(f"jupytext cannot convert {lesson} to a notebook: fix the error above, or add --plain")
    subprocess.run([sys.executable, "-m", "jupyterlab", str(notebook)], check=False)


def _read_in_terminal(lesson: Path, *words: str) -> None:
    """Run the reader in a separate process, which shares this terminal."""
    command = [sys.executable, "-m", "clearhead.apps.lessons.terminal", str(lesson), *words]
    if subprocess.run(command, check=False).returncode:
        raise RunFailure(f"{lesson} stopped at the error above: fix it in the file, and open the lesson again")
