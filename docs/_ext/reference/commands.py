"""A page for each command, with its arguments and options, and lists of commands; all from the program itself."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer
from sphinx.application import Sphinx

from clearhead.apps.cli.main import make_app

FOLDER = "commands"


@cache
def program() -> Any:
    """Return the command `clearhead`, which contains all others."""
    return typer.main.get_command(make_app())


def write_pages(app: Sphinx) -> None:
    """Write the page of each command into the folder of the reference, in place of the former pages."""
    folder = Path(app.srcdir) / "reference" / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, command in program().commands.items():
        lines = [f"# clearhead {name}", "", *_describe_command(command, f"clearhead {name}")]
        for inner, below in getattr(command, "commands", {}).items():
            lines += [f"## {name} {inner}", "", *_describe_command(below, f"clearhead {name} {inner}")]
        (folder / f"{name}.md").write_text("\n".join(lines), "utf-8")


def lines(argument: str) -> Iterator[str]:
    """Yield links to the pages of commands, each with its first sentence; without names, the options of all commands.

    Args:
        argument: names of commands, separated by spaces.
    """
    names = argument.split()
    if not names:
        yield from _describe_command(program(), "clearhead")
        return
    for name in names:
        sentence = " ".join(program().commands[name].help.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
        yield f"- [`{name}`]({FOLDER}/{name}.md): {plain(sentence)}."
    yield from ("", "```{toctree}", ":hidden:", "", *(f"{FOLDER}/{name}" for name in names), "```", "")


def _describe_command(command: Any, name: str) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False)
    ]
    usage = " ".join([name, *(argument.metavar or argument.name.upper() for argument in arguments)])
    if getattr(command, "commands", None):
        usage += " COMMAND"
    yield from ("```text", f"{usage} [OPTIONS]" if options else usage, "```", "")
    yield from _help(command.help or "")
    for parameter in [*arguments, *options]:
        if parameter.name != "help":
            yield from _parameter(parameter)


def _help(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; a paragraph that begins with a backspace character keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if not paragraph.startswith("\b"):
            yield from (plain(" ".join(paragraph.split())), "")
            continue
        first, *others = paragraph.removeprefix("\b\n").splitlines()
        is_example = first.startswith(("Example", "Examples"))
        yield from (first, "", "```sh" if is_example else "```text", *(line[2:] for line in others), "```", "")


def plain(text: str) -> str:
    """Return a text as Markdown that shows every character of it; options and names in capitals are code."""
    text = re.sub(r"([\\*_<>{}\[\]$|~^#])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", text)


KINDS = {"int": "whole number", "float": "number", "Path": "path"}


def _parameter(parameter: Any) -> Iterator[str]:
    is_switch = getattr(parameter, "is_flag", False)
    if parameter.param_type_name == "argument":
        term = parameter.metavar or parameter.name.upper()
    else:
        term = ", ".join([*parameter.opts, *parameter.secondary_opts])
        term += "" if is_switch or not parameter.metavar else f" {parameter.metavar}"
    facts = ["switch" if is_switch else _kind(parameter.type_descriptor.annotation)]
    facts += [f"at least {parameter.min:g}"] if parameter.min is not None else []
    facts += [f"at most {parameter.max:g}"] if parameter.max is not None else []
    if parameter.required:
        facts.append("required")
    elif parameter.default not in (None, False, ()) and not callable(parameter.default):
        facts.append(f"default `{parameter.default}`")
    yield from (f"`{term}`", f": {', '.join(facts)}", "", f"  {plain(parameter.help or '')}", "")


def _kind(annotation: Any) -> str:
    return KINDS.get(getattr(annotation, "__name__", ""), "text")
