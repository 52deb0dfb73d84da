"""The help of every command: complete at 80 columns, with examples that its parser takes."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from clearhead.apps.cli.main import make_app
from tests.apps.cli.test_surface import commands

COLUMNS = 80
APP = make_app()
COMMANDS = commands()


@cache
def help_of(name: str) -> str:
    result = CliRunner().invoke(APP, [*name.split(), "--help"], env={"COLUMNS": f"{COLUMNS}"})
    assert result.exit_code == 0
    return result.output


def words(text: str) -> str:
    return " ".join(text.split())


def letters(text: str) -> str:
    """Return a text without white space, which wrapping may change."""
    return re.sub(r"[\s\b]", "", text)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns_and_is_complete(name: str) -> None:
    page = help_of(name)
    assert max(map(len, page.splitlines())) <= COLUMNS
    assert "…" not in page
    command: Any = COMMANDS[name] if name else typer.main.get_command(APP)
    parts = [command.help] if command.help else []
    for parameter in command.params:
        names = [parameter.metavar or ""] if parameter.param_type_name == "argument" else parameter.opts
        parts += [*names, parameter.help or ""]
    parts += [f"{subcommand.name} {subcommand.short_help}" for subcommand in getattr(command, "commands", {}).values()]
    missing = [text for text in parts if letters(text) not in letters(page)]
    assert not missing


def examples(name: str) -> list[list[str]]:
    """Return the words after `clearhead`, up to a pipe, of each example in the help of a command."""
    page = re.sub(r"\\\n\s+", "", help_of(name))
    lines = page.partition("Example:\n")[2].split("\n\n")[0].splitlines()
    calls = [re.split(r"\bclearhead ", line)[-1] for line in lines if "clearhead " in line]
    return [shlex.split(re.split(r" [|>] ", call)[0]) for call in calls]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_examples_are_accepted_by_the_parser(name: str) -> None:
    example_lines = examples(name)
    assert any(" ".join(arguments).startswith(name) for arguments in example_lines)
    for arguments in example_lines:
        path = arguments[: 2 if arguments[0] == "new" else 1]
        if arguments[-1] != "--help":
            COMMANDS[" ".join(path)].make_context("clearhead", arguments[len(path) :])


def test_a_wrong_example_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        COMMANDS["fill"].make_context("clearhead", ["RUN", "a ___", "--source", "x"])


@pytest.mark.parametrize("name", ["translate", "evaluate"])
def test_help_states_the_length_penalty_and_the_rule_for_stopping(name: str) -> None:
    page = words(help_of(name))
    assert re.search(r"length penalty, by default 1\.0", page)
    assert re.search(r"once no unfinished hypothesis can still", page)


def test_help_of_train_states_its_rule_for_stopping() -> None:
    assert "training stops after `patience` validations in a row without a better metric" in words(help_of("train"))
