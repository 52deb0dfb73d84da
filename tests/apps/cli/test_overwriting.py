"""No command replaces a file without --force, whichever option names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from tests.apps.cli.test_surface import commands

WRITTEN = {"--html": ".html", "--output": ".toml", "--plot": ".png", "--svg": ".svg"}
"""The options that name an output file, with the ending of its name unless a command sets another."""
SUFFIXES = {"embed": ".npy", "view": ".html", "explain": ".html", "compare": ".png", "diff": ".html"}


def test_no_file_is_replaced_without_force(
    trained: Path,
    runs: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = ["--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target"]
    table, arguments = runs("classify"), {name: ["gpt2"] for name in ("inspect", "embed")}
    arguments |= {
        "view": [f"{trained}/run", "a m u"],
        "explain": [f"{trained}/run", "a m u"],
        "compare": [f"{trained}/run"] * 2,
        "diff": [f"{trained}/run"] * 2,
    }
    arguments |= {name: ["gpt2"] for name in ("translate", "classify", "tag", "fill", "predict")}
    arguments |= {name: ["gpt2", "--file", "texts"] for name in ("generate", "answer")}
    arguments["check"] = [f"{trained}/run"]
    arguments |= {"evaluate --output": [f"{trained}/run", *pairs]}
    arguments |= {"evaluate --plot": [str(table), "--text", f"{table.parent}/valid.tsv"]}
    all_commands = commands()
    for task in all_commands["new"].commands:
        arguments[f"new {task}"] = pairs if task in ("translate", "embed") else ["--text", "none"]
    arguments["new classify"] += ["--labels", "label"]
    takes = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in all_commands.items()
    }
    writing = [(name, option) for name, options in takes.items() for option in sorted(options & WRITTEN.keys())]
    assert {name for name, _ in writing} == {name for name, options in takes.items() if "--force" in options}
    capfd.readouterr()
    for name, option in writing:
        file = tmp_path / f"mine{SUFFIXES.get(name, WRITTEN[option])}"
        file.write_text("mine", encoding="utf-8")
        words = arguments[name] if name in arguments else arguments[f"{name} {option}"]
        assert main([*name.split(), *words, option, str(file)]) == 2, (name, option)
        message = capfd.readouterr().err
        assert message == f"clearhead: {file} exists already: name another file, or replace it with --force\n"
        assert file.read_text(encoding="utf-8") == "mine" and [*tmp_path.iterdir()] == [file]
        file.unlink()


def test_translations_replace_a_file_by_force(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine\n", encoding="utf-8")
    pairs = ["--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target"]
    assert main(["evaluate", f"{trained}/run", *pairs, "-o", f"{tmp_path}/out", "--force"]) == 0
    written = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert len(written) == 25 and "mine" not in written
