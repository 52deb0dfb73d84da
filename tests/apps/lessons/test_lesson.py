"""An exercise needs the statements that bind or change its names, and no others."""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import types
from pathlib import Path

import pytest

from clearhead.apps.lessons.lesson import find_exercises, read_cells, read_title, select_statements
from clearhead.apps.lessons.mathematics import formula_text, replace_formulas

LESSONS = sorted((Path(__file__).parents[3] / "docs" / "lessons").glob("[0-9][0-9]_*.py"))
LESSON = """\
# ---
# header
# ---

# %% [markdown]
# # 1 · One
#
# Text.

# %%
import math
import json
a = 1
b = [a]
c = print("shown")
b.append(2)
math.factorial(30)

# %%
def twice(x):
    a = 5
    return 2 * x + later
later = 3
late = a

# %% [markdown]
# More.
#
# **1 · Sum (2 minutes, easy).** Add.
#
# In words.

# %% tags=["exercise"]
a = 7
[a for a in b]
print(twice(len(b)))

# %% tags=["hide-cell", "solution"]
a = 8
"""


def chosen(text: str, tmp_path: Path, number: int = 1) -> list[str]:
    path = tmp_path / "01_one.py"
    path.write_text(text, encoding="utf-8")
    cells = read_cells(path)
    exercise = find_exercises(cells)[number - 1]
    return [ast.unparse(node) for nodes in select_statements(cells, exercise.index).values() for node in nodes]


def test_cells_titles_and_exercises(tmp_path: Path) -> None:
    path = tmp_path / "01_one.py"
    path.write_text(LESSON, encoding="utf-8")
    cells = read_cells(path)
    assert [cell.kind for cell in cells] == ["text", "code", "code", "text", "exercise", "solution"]
    lines = LESSON.splitlines()
    assert all(cell.kind == "text" or lines[cell.line - 1] == cell.body.splitlines()[0] for cell in cells)
    assert read_title(cells) == "One"
    assert [each.task for each in find_exercises(cells)] == ["**1 · Sum (2 minutes, easy).** Add.\n\nIn words."]


def test_the_statements_that_an_exercise_needs(tmp_path: Path) -> None:
    names = [line.split("\n")[0] for line in chosen(LESSON, tmp_path)]
    assert names == ["a = 1", "b = [a]", "b.append(2)", "def twice(x):", "later = 3"]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_exercise_starts_without_the_rest_of_its_lesson(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what the exercise needs with a stub for the trained models: no name is missing, and few statements run."""
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "shared", raising=False)
    cells = read_cells(path)
    for exercise in find_exercises(cells):
        needed = select_statements(cells, exercise.index)
        total = sum(len(ast.parse(cell.body).body) for cell in cells[: exercise.index] if cell.kind != "text")
        assert sum(map(len, needed.values())) <= max(10, total // 3)
        nodes = [node for statements in needed.values() for node in statements]
        if any(name in ast.unparse(node) for node in nodes for name in ("_model()", "minilm_folder()", "ch.check")):
            continue
        module = types.ModuleType("lesson")
        monkeypatch.setitem(sys.modules, "lesson", module)
        tree = ast.Module([*nodes, *ast.parse(cells[exercise.index].body).body], [])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(tree, str(path), "exec"), module.__dict__)
        assert "not written yet" in output.getvalue(), exercise.task
        assert sys.modules["shared"].ATTEMPTS[-1:] == [False]  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "shared", raising=False)


@pytest.mark.parametrize(
    "formula, text",
    [
        (r"\operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V.", "softmax((Q Kᵀ) / √d) V."),
        (r"\frac{x - m}{\sqrt{\operatorname{var}(x) + \varepsilon}} \cdot \gamma", "(x - m) / (√(var(x) + ε)) · γ"),
        (r"10000^{2i/d}, 2^{24}, e^{z}, x_{\text{not } M}", "10000^(2i/d), 2²⁴, e^z, x_(not M)"),
        (r"x \leftarrow x + f(x)", "x ← x + f(x)"),
    ],
)  # fmt: skip
def test_formulas_keep_their_meaning_in_one_line(formula: str, text: str) -> None:
    assert formula_text(formula) == text


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_no_tex_is_left(path: Path) -> None:
    for cell in read_cells(path):
        if cell.kind == "text":
            shown = replace_formulas(cell.body)
            assert "\\" not in shown.replace("\\n", "").replace("\\t", "") and "$" not in shown
