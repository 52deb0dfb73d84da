"""A shell completes commands, tasks and options, and falls back to the names of files."""

from __future__ import annotations

import pytest

from clearhead.apps.cli.main import main


def complete_line(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Return the exit code and the output of what the script of a shell calls at the end of a line."""
    words = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": f"{len(line.split(' ')) - 1}"},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": line.split(" ")[-1],
        },
    }[shell]
    for name, value in {**words, "_CLEARHEAD_COMPLETE": f"complete_{shell}"}.items():
        monkeypatch.setenv(name, value)
    code = main([])
    captured = capfd.readouterr()
    assert captured.err == ""
    return code, captured.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected", "missing"),
    [
        ("clearhead tra", ["train", "translate"], "tag"),
        ("clearhead new cl", ["classify"], "translate"),
        ("clearhead translate runs/a --be", ["--beam-size"], "--n-best"),
    ],
)
def test_words_are_completed(
    shell: str,
    line: str,
    expected: list[str],
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, out = complete_line(shell, line, monkeypatch, capfd)
    assert code == 0 and all(word in out for word in expected) and missing not in out.split()


def test_a_place_for_a_file_offers_files(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert complete_line("zsh", "clearhead translate runs/a ", monkeypatch, capfd) == (0, "_files\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_calls_this_program(
    shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_CLEARHEAD_COMPLETE", f"source_{shell}")
    assert main([]) == 0
    out = capfd.readouterr().out
    assert f"_CLEARHEAD_COMPLETE=complete_{shell}" in out
    assert {"bash": "-o default", "zsh": "#compdef clearhead", "fish": "complete --command clearhead"}[shell] in out
