"""A lesson in a terminal shows its pictures as files, and its end says what is open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LESSON = """\
# %% [markdown]
# # 1 · One
#
# A formula $\\frac{a}{b}$ in a paragraph that is longer than the terminal is wide, so that it wraps at words.

# %%
import matplotlib.pyplot as plt
from shared import attempt

loud = print("loud")
figure, axis = plt.subplots()
axis.plot([1, 2])
plt.show()

# %%
class Page:
    def _repr_html_(self):
        return "<b>page</b>"


Page()

# %%
1 + 1

# %% [markdown]
# **1 · First (1 minute, easy).** Do.

# %% tags=["exercise"]
mine = None


def check(mine):
    if mine is None:
        raise NotImplementedError
    return "right"


attempt(lambda: check(mine))

# %% [markdown]
# **2 · Second (1 minute, easy).** Do.

# %% tags=["exercise"]
attempt(lambda: "right")

# %% tags=["hide-cell", "solution"]
print("hidden")
"""
# The interface of docs/lessons/shared.py, without its imports.
SHARED = """\
ATTEMPTS = []


def attempt(check):
    try:
        print(check())
        ATTEMPTS.append(True)
    except NotImplementedError:
        print("not written yet")
        ATTEMPTS.append(False)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "01_one.py").write_text(LESSON, encoding="utf-8")
    (tmp_path / "lessons" / "02_two.py").write_text("# %% [markdown]\n# # 2 · Two\n", encoding="utf-8")
    (tmp_path / "lessons" / "shared.py").write_text(SHARED, encoding="utf-8")
    return tmp_path


def read(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "clearhead.apps.lessons.terminal", "lessons/01_one.py", *words]
    done = subprocess.run(command, cwd=folder, input="\n" * 20, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_a_whole_lesson(folder: Path) -> None:
    shown, errors = read(folder)
    assert not errors and "hidden" not in shown
    assert "A formula a / b in" in shown and max(map(len, shown.partition("loud")[0].splitlines())) <= 88
    pictures = folder / "lessons" / "pictures"
    assert (pictures / "01_one-1.png").read_bytes().startswith(b"\x89PNG")
    assert (pictures / "01_one-2.html").read_text() == "<b>page</b>"
    for picture in pictures.iterdir():
        assert picture.as_uri() in shown and f"picture lessons/pictures/{picture.name}" in shown
    assert "\n2\n" in shown.replace("[Enter runs this, Ctrl-D ends] ", "\n"), "the last value of a cell is shown"
    line = LESSON.splitlines().index("mine = None") + 1
    end = shown[shown.index("Open: ") :]
    assert "Open: 1 · First (1 minute, easy)" in end and f"line {line};" in end and "learn 1 --exercise 1" in end
    assert "Second" not in end and "Next: Two" in end and "learn 2" in end


def test_an_exercise_runs_what_it_needs(folder: Path) -> None:
    shown, _ = read(folder, "1")
    assert "loud" not in shown.replace('print("loud")', "") and "not written yet" in shown
    assert f"Edit lessons/01_one.py, line {LESSON.splitlines().index('mine = None') + 1}" in shown
    assert not (folder / "lessons" / "pictures").exists()
    path = folder / "lessons" / "01_one.py"
    path.write_text(LESSON.replace("mine = None", "mine = 3"), encoding="utf-8")
    assert "\nright\n" in read(folder, "1")[0]
    assert "All exercises of this lesson are solved" in read(folder)[0]


def test_an_error_names_the_line_of_the_lesson(folder: Path) -> None:
    path = folder / "lessons" / "01_one.py"
    path.write_text(LESSON.replace("1 + 1", "1 / 0"), encoding="utf-8")
    _, errors = read(folder, code=1)
    line = LESSON.splitlines().index("1 + 1") + 1
    assert (
        f'01_one.py", line {line}' in errors
        and "1 / 0" in errors
        and errors.endswith("ZeroDivisionError: division by zero\n")
    )
    assert "terminal.py" not in errors
