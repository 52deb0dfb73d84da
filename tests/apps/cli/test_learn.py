"""`clearhead learn` and the structure of the lessons; the build of the site runs them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.apps.cli import learn
from clearhead.apps.cli.main import main

LESSONS = sorted((Path(__file__).parents[3] / "docs" / "lessons").glob("[0-9][0-9]_*.py"))
TINY = """\
# %% [markdown]
# # 1. One

# %%
import math

print(math.sqrt(49))

# %% tags=["hide-cell", "solution"]
print("sol" "ved")

# %%
1 / 0

# %%
"after"
"""


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_structure_of_a_lesson(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"\n# # {int(path.name[:2])} · " in text
    for word in ("break it", "symptom", "detector", "the fix", "exercise", "minutes"):
        assert word in text.casefold(), word


# What the tutorials compute, by lesson: each stands in an assertion that the build of the site runs.
FIGURES = {
    2: ("-0.9589, 0.2837, 0.2300, 0.9732, 0.0108, 0.9999", "0.95231, -0.30515, 0.98045, -0.19678, 0.9957, -0.0926"),
    3: ("0.4281, 0.6802", "0.0351, 0.2595, 0.7054", "(262_400, 196_608)"),
    4: ("[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]",),
    5: ("0.6325, -1.2649, 1.2649, -0.6325", "0.27, 0.16", "0.3800, -0.0970, 0.2040, 0.1280"),
    10: ("12 * 12 == 144",),
    12: ("== 22_979_536",),
}


@pytest.mark.parametrize(
    "number, figure", [(number, figure) for number, all_of in FIGURES.items() for figure in all_of]
)
def test_figures_of_the_tutorials_are_asserted(number: int, figure: str) -> None:
    text = next(path for path in LESSONS if path.name.startswith(f"{number:02}")).read_text(encoding="utf-8")
    code = " ".join(line.strip() for line in text.splitlines() if not line.startswith("#"))
    assert figure in code


def test_copies_are_the_readers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "--out", str(tmp_path / "here")]) == 0
    copied = tmp_path / "here" / LESSONS[0].name
    assert copied.read_bytes() == LESSONS[0].read_bytes() and (tmp_path / "here" / "shared.py").is_file()
    copied.write_text("mine", encoding="utf-8")
    assert main(["learn", "--out", str(tmp_path / "here")]) == 0
    assert copied.read_text(encoding="utf-8") == "mine"
    assert f"your changed files in {tmp_path / 'here'} were not replaced: {copied.name}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words", (["99"], ["--plain"], ["--exercise", "1"], ["3", "--exercise", "4"], ["3", "--exercise", "0"])
)
def test_refused(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", *words, "--out", str(tmp_path / "new")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert (tmp_path / "new").exists() == (words[-1] == "4"), "the count of exercises is that of the reader's copy"


@pytest.mark.parametrize("keys, code", (("\n\n\n", 1), ("\n", 0), ("", 0)))
def test_cell_by_cell(keys: str, code: int, tmp_path: Path) -> None:
    (tmp_path / LESSONS[0].name).write_text(TINY, encoding="utf-8")
    command = [sys.executable, "-m", "clearhead", "learn", "1", "--plain", "--out", str(tmp_path)]
    done = subprocess.run(command, input=keys, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "1. One" in done.stdout and ("7.0" in done.stdout) == bool(keys)
    assert ("ZeroDivisionError" in done.stderr) == (code == 1) and "after" not in done.stdout
    assert "sol" not in done.stdout, "a solution is run, not shown"


def test_an_installation_without_lessons_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learn, "_SOURCES", (tmp_path / "none",))
    assert main(["learn", "--out", str(tmp_path / "out")]) == 2
    assert "has no lessons" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_its_package_lesson_9_has_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("shared", LESSONS[0].with_name("shared.py"))
    assert spec is not None and spec.loader is not None
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    monkeypatch.setattr(shared, "MODELS", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ch.load(shared.minilm_folder()).embed("a stand-in").shape == (48,)
