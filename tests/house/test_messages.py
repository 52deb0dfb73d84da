"""Messages keep references to arguments and texts separate, so that commands can name options and lines of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.apps.cli.test_surface import commands
from tests.house.source import Source, package_sources

REFERENCES = {"argument", "key", "nth_text", "at_text"}
# Sentences about run files and specs, whose keys have the names of options of some command.
ALLOWED = {
    "clearhead/spec/node_checks.py": {"top_k "},
    "clearhead/training/init_from.py": {"the model has no language codes: remove from_language and to_language"},
}


def lost_references(source: Source) -> list[str]:
    """Return the references inside f-strings, which turn them into plain text."""
    imported = {
        alias.name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "clearhead.base.errors"
        for alias in node.names
    }
    return [
        f"{source.path}:{node.lineno}"
        for text in ast.walk(source.tree)
        if isinstance(text, ast.JoinedStr)
        for node in ast.walk(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in REFERENCES & imported
    ]


def documentation(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the docstrings of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def named_arguments(source: Source, names: set[str]) -> set[str]:
    """Return the sentences that name an argument for which a command has an option."""
    documents = set(documentation(source.tree))
    pattern = re.compile(rf"(?<![\w.'\"\[])({'|'.join(sorted(names))})(?![\w.'\"=(])")
    texts = {node for node in ast.walk(source.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    sentences = {text.value for text in texts - documents if " " in text.value and "\n" not in text.value}
    return {sentence for sentence in sentences if pattern.search(sentence)}


def arguments_with_an_option() -> set[str]:
    """Return the names of options with an underscore, which are no ordinary words."""
    return {parameter.name for command in commands().values() for parameter in command.params if "_" in parameter.name}


def missing_f_prefixes(source: Source) -> list[str]:
    """Return the texts with a call in braces, in front of which the `f` is missing."""
    return [
        f"{source.path}:{node.lineno}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\{[a-z_][\w.]*\(", node.value)
    ]


def test_no_message_shows_its_code() -> None:
    assert [where for source in package_sources() for where in missing_f_prefixes(source)] == []


def test_a_reference_is_not_lost_in_a_text() -> None:
    assert [where for source in package_sources() for where in lost_references(source)] == []


def test_an_argument_with_an_option_is_a_reference() -> None:
    names = arguments_with_an_option()
    faults = {
        source.path: texts
        for source in package_sources()
        if source.package != "cli" and (texts := named_arguments(source, names))
    }
    assert faults == ALLOWED


def test_the_rules_can_fail() -> None:
    assert missing_f_prefixes(Source.of("fail(f'{count} labels ' '({listed(names)}); check')"))
    assert not missing_f_prefixes(Source.of("fail(f'{count} labels ({listed(names)}); check {{x}}')"))
    text = "from clearhead.base.errors import key\nraise InputError(f'check {key(name)}')"
    assert lost_references(Source.of(text)) == ["clearhead/core/example.py:2"]
    assert named_arguments(Source.of("fail(f'top_k is {x}')"), {"top_k"}) == {"top_k is "}
    assert not named_arguments(Source.of("'''Of top_k and more.'''\nfail('runs/top_k', top_k)"), {"top_k"})
