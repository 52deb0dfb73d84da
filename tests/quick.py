"""Run the tests for a change: python -m tests.quick [BASE]

The selection has the house tests, the changed test files and the mirror folder of each changed module. It also has
every test file that imports a changed program of apps/, and one case of each law if the library changed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import ROOT, Source, python_sources
from tests.house.test_imports import find_imports, find_reachable, graph, module_name

SECONDS = 120
HOUSE, LAWS = "tests/house", "tests/laws"


def find_changed_files(base: str) -> set[str]:
    """Return the paths of all files that differ from the common ancestor with a branch, uncommitted ones included."""
    ancestor = _git("merge-base", base, "HEAD")[0]
    return {*_git("diff", "--name-only", ancestor), *_git("ls-files", "--others", "--exclude-standard")}


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def direct_imports() -> dict[str, frozenset[str]]:
    """Return the modules of clearhead that each test file imports, itself or through helpers in tests/."""
    sources = {module_name(source): source for source in python_sources("tests")}
    return {
        source.path: frozenset().union(*(find_imports(sources[name]) for name in _helpers(module, sources)))
        for module, source in sources.items()
        if Path(source.path).name.startswith("test_")
    }


def _helpers(module: str, sources: dict[str, Source]) -> set[str]:
    """Return a test module and every module of tests/ that it reaches by imports."""
    modules, waiting = {module}, [module]
    while waiting:
        text = sources[waiting.pop()].text
        new = {name for name in sources if f"from {name} import" in text or f"import {name}\n" in text} - modules
        modules |= new
        waiting += new
    return modules


def mirror_folder(path: str) -> str | None:
    """Return the nearest folder or file of tests/ that mirrors a file of the package; None if there is none."""
    file = Path("tests", *Path(path).parts[1:]).with_name(f"test_{Path(path).stem}.py")
    if (ROOT / file).is_file():
        return str(file)
    folder = next(parent for parent in file.parents if (ROOT / parent).is_dir())
    return None if folder == Path("tests") else str(folder)


def select_tests(changed: set[str]) -> tuple[set[str], set[str]]:
    """Return the test files and folders to run, and the test files that import the change and are left out."""
    package = {path for path in changed if path.startswith("clearhead/")}
    modules = {module_name(Source.of("", path)) for path in package if path.endswith(".py")}
    programs = {module for module in modules if module.startswith("clearhead.apps.")}
    selected = {HOUSE, *filter(None, map(mirror_folder, package))}
    selected |= {path for path in changed if Path(path).match("tests/**/test_*.py") and (ROOT / path).is_file()}
    selected |= {path for path, imports in direct_imports().items() if imports & programs}
    if modules - programs:
        selected.add(LAWS)
    affected = {module for module in graph() if modules & find_reachable(module).keys()}
    left_out = {path for path, imports in direct_imports().items() if imports & (affected | modules)}
    return selected, {path for path in left_out if not any(path.startswith(chosen) for chosen in selected)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the first case of each law."""
    seen: set[str] = set()
    rest = []
    for item in items:
        law = item.nodeid.partition("[")[0]
        if item.nodeid.startswith(LAWS) and (law in seen or item.get_closest_marker("slow")):
            rest.append(item)
        seen.add(law)
    items[:] = [item for item in items if item not in rest]
    config.hook.pytest_deselected(items=rest)


class FileTimes:
    """Adds up the seconds of each test file, and names the slowest one where a run takes longer than SECONDS."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of one phase of a test."""
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest file."""
        total = time.monotonic() - self.start
        if total > SECONDS:
            file, seconds = self.seconds.most_common(1)[0]
            terminalreporter.write_line(
                f"{total:.0f} s are more than {SECONDS}; the slowest file: {file} ({seconds:.0f} s)"
            )


def pytest_configure(config: pytest.Config) -> None:
    """Register the times of files in the process that receives all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileTimes())


def main(base: str) -> int:
    """Run the selected tests and return the exit code of pytest."""
    selected, left_out = select_tests(find_changed_files(base))
    print(f"running {', '.join(sorted(selected))}")
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "tests.quick", *sorted(selected)]
    code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    print(f"{len(left_out)} test files that import the change were left out; `make test` runs them")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["main"]))
