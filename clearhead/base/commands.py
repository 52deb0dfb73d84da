"""Command lines for messages; they can be copied into a shell of the same environment."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from contextvars import ContextVar
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTENSIONS: Final = ContextVar[list[str] | None]("EXTENSIONS", default=None)
"""Extension files that the running command has loaded; None means that no command runs."""
_NAME: Final = "clearhead"
_FOLDER: Final = Path(__file__).resolve().parents[2]


def make_command(words: str) -> str:
    """Return a command line of clearhead; it starts with the program's full path if PATH does not find the program.

    Args:
        words: the command and its arguments, quoted for a shell, such as "view runs/demo TEXT". The result also has
            `--parts FILE` for each extension file that the running command has loaded.
    """
    return " ".join([_program(), words, *(f"--parts {quote(file)}" for file in EXTENSIONS.get() or ())])


def make_install_command(*requirements: str, extra: str = "") -> str:
    """Return the command that installs packages into this environment.

    Args:
        requirements: packages, such as "numpy>=1.26".
        extra: an extra of clearhead whose packages are installed too; "" means none.
    """
    words = [sys.executable, "-m", "pip", "install"]
    if find_spec("pip") is None:  # an environment made by uv
        words = ["uv", "pip", "install", "--python", sys.executable]
    words += requirements
    if extra and (_FOLDER / "pyproject.toml").is_file():
        words += ["-e", f"{_FOLDER}[{extra}]"]
    elif extra:
        words += map(str, list_requirements(extra))
    return " ".join(map(quote, words))


def list_requirements(extra: str = "") -> list[Requirement]:
    """Return the packages of an extra, including those of extras inside it.

    Args:
        extra: the name of the extra; "" means the packages that clearhead always needs.

    Raises:
        PackageNotFoundError: clearhead is not installed.
    """
    from packaging.requirements import Requirement

    requirements: list[Requirement] = []
    for requirement in map(Requirement, metadata.requires(_NAME) or ()):
        marker, requirement.marker = requirement.marker, None
        is_optional = marker is not None and not marker.evaluate({"extra": ""})
        if is_optional != bool(extra) or (marker is not None and not marker.evaluate({"extra": extra})):
            continue
        if requirement.name != _NAME:
            requirements.append(requirement)
            continue
        for included in sorted(requirement.extras):
            requirements += list_requirements(included)
    return requirements


def quote(word: str) -> str:
    """Return a word quoted for the shell of this system."""
    return shlex.quote(word).replace("'", '"') if os.name == "nt" else shlex.quote(word)


def _program() -> str:
    folders = sysconfig.get_path("scripts"), sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))
    script, on_path, here = shutil.which(_NAME, path=os.pathsep.join(folders)), shutil.which(_NAME), Path.cwd()
    if script is None:
        return f"{quote(sys.executable)} -m {_NAME}"
    if on_path is not None and os.path.samefile(on_path, script):
        return _NAME
    return quote(str(Path(script).relative_to(here)) if here in Path(script).parents[1:] else script)
