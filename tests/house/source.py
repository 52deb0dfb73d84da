"""The source files of the repository, parsed once, for the tests of house rules."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root of the repository, and its text."""

    path: str
    text: str

    @classmethod
    def of(cls, text: str, path: str = "clearhead/core/example.py") -> Source:
        """Return code as a source file at a path, to test a rule on it."""
        return cls(path, text)

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the file."""
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The name of the subpackage or top-level module that contains the file."""
        parts = Path(self.path).with_suffix("").parts
        return parts[1] if len(parts) > 1 else parts[0]


@cache
def repository_files() -> tuple[Path, ...]:
    """Return every file that is or would be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(sorted(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()))


@cache
def python_sources(folder: str) -> tuple[Source, ...]:
    """Return every committed Python file below a folder of the repository."""
    paths = [path for path in repository_files() if path.suffix == ".py" and path.is_relative_to(ROOT / folder)]
    assert paths, f"no Python file below {folder}"
    return tuple(Source.of(path.read_text("utf-8"), path.relative_to(ROOT).as_posix()) for path in paths)


def package_sources(*packages: str) -> tuple[Source, ...]:
    """Return the source files of the given subpackages, or of all of clearhead."""
    return tuple(source for source in python_sources("clearhead") if not packages or source.package in packages)
