"""The page "Add a task" shows the code of the package that the tests install."""

from __future__ import annotations

import pytest

from tests.house.source import ROOT
from tests.house.test_documents import blocks

PAGE = ROOT / "docs" / "guides" / "add-a-task.md"
PACKAGE = ROOT / "tests" / "tasks" / "ninth" / "package"
PATHS = [PACKAGE / "pyproject.toml", *PACKAGE.glob("clearhead_rate/*.py")]
FILES = {path.name: path.read_text("utf-8") for path in PATHS}


@pytest.mark.parametrize("language", ["python", "toml"])
def test_its_code_is_that_of_the_package(language: str) -> None:
    shown = blocks(PAGE, language)
    assert shown
    for text in shown:
        assert any(f"\n{text}" in f"\n{code}" for code in FILES.values()), f"in no file of the package:\n{text}"


def test_it_walks_through_every_file() -> None:
    shown = "".join(blocks(PAGE, "python") + blocks(PAGE, "toml"))
    for name in FILES.keys() - {"__init__.py"}:
        lines = [line for line in FILES[name].splitlines() if len(line) > 20 and "import " not in line]
        assert any(line in shown for line in lines), f"nothing of {name} is on the page"
