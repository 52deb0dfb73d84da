"""`clearhead learn` and the structure of the lessons; the build of the site runs them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from clearhead.cli import learn
from clearhead.cli.main import main

LESSONS = sorted(Path(learn._SOURCES).glob("[0-9][0-9]_*.py"))
TINY = (
    '# %% [markdown]\n# # 1. One\n#\n# **text**\n\n# %%\nimport math\n\nmath.sqrt(49)\n\n# %%\n1 / 0\n\n# %%\n"after"\n'
)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_structure_of_a_lesson(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"\n# # {int(path.name[:2])} · " in text
    for word in ("break it", "symptom", "detector", "mend", "exercise", "minutes"):
        assert word in text.casefold(), word


def test_copies_are_the_readers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "--out", str(tmp_path / "here")]) == 0
    copied = tmp_path / "here" / LESSONS[0].name
    assert copied.read_bytes() == LESSONS[0].read_bytes() and (tmp_path / "here" / "shared.py").is_file()
    copied.write_text("mine", encoding="utf-8")
    assert main(["learn", "--out", str(tmp_path / "here")]) == 0
    assert copied.read_text(encoding="utf-8") == "mine"
    assert f"kept as you left them in {tmp_path / 'here'}: {copied.name}" in capfd.readouterr().err


@pytest.mark.parametrize("words", (["99"], ["--plain"]))
def test_refused(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", *words, "--out", str(tmp_path / "new")]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("keys", ("\n\n\n", "\n"))
def test_cell_by_cell(
    keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LESSONS[0].name).write_text(TINY, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(keys))
    monkeypatch.setattr("sys.path", ["."])
    assert main(["learn", "1", "--plain", "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr()
    assert "# 1. One" in printed.out and "7.0" in printed.out
    assert ("ZeroDivisionError" in printed.err) == ("'after'" in printed.out) == (keys == "\n\n\n")
