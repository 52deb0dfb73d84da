"""The order in which the core is read, with its line counts, as the docstring of the folder gives it."""

from __future__ import annotations

import re
from pathlib import Path

import clearhead.core
from tests.house.code_lines import code_lines

ORDER = ["model", "stack", "attention", "feedforward", "norm", "embedding", "head", "context"]


def test_the_docstring_has_the_order_and_the_lines() -> None:
    folder = Path(str(clearhead.core.__file__)).parent
    stated = re.findall(r"\b([a-z]+)\s(\d+)[,.]", str(clearhead.core.__doc__))
    assert stated == [(name, str(code_lines((folder / f"{name}.py").read_text("utf-8")))) for name in ORDER]


def test_each_file_says_where_it_stands_in_the_equation() -> None:
    folder = Path(str(clearhead.core.__file__)).parent
    for name in ORDER[2:7]:
        first = (folder / f"{name}.py").read_text("utf-8").partition("\n")[0]
        assert "of the equation in `stack`" in first, name
