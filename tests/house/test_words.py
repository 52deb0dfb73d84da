"""House rule 3: a name is the noun of its thing; words that fit anything are bound nowhere in what is done."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.house.source import Source, package_sources

WORDS = frozenset({"found", "one", "own", "part", "place"})
DONE = (
    "clearhead/apps/cli/evaluate.py",
    "clearhead/apps/cli/main.py",
    "clearhead/tasks/evaluate/",
    "clearhead/base/files.py",
    "clearhead/generate/",
    "clearhead/checkpoints/hf/export_family.py",
    "clearhead/model/training.py",
    "clearhead/spec/tasks/",
    "clearhead/apps/recipes/",
    "clearhead/tasks/",
    "clearhead/text/special_tokens.py",
    "clearhead/training/",
)
"""Files and folders in which none of the words is bound; the others follow."""
EXCEPTIONS: Mapping[str, str] = {
    "clearhead/spec/tasks/base.py:part": "the parts of a task, which its folder has as modules, are called so",
}
"""Names that stay, as PATH:NAME, each with its reason."""


def bound_words(source: Source) -> Iterator[str]:
    """Yield each variable, parameter, function, class and import that is named by one of the words."""
    for node in ast.walk(source.tree):
        names: list[str | None] = []
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names = [node.id]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.alias):
            names = [node.asname or node.name]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.MatchAs | ast.MatchStar):
            names = [node.name]
        elif isinstance(node, ast.MatchMapping):
            names = [node.rest]
        yield from (f"{source.path}:{name}" for name in names if name in WORDS)


def test_what_is_done_names_things_by_their_nouns() -> None:
    bound = {name for source in package_sources() if source.path.startswith(DONE) for name in bound_words(source)}
    assert not bound - EXCEPTIONS.keys()
    assert not EXCEPTIONS.keys() - bound, "these are bound no longer: strike them from the list"


def test_every_path_that_is_done_is_there() -> None:
    paths = [source.path for source in package_sources()]
    assert all(any(path.startswith(done) for path in paths) for done in DONE)


def test_every_way_to_bind_a_name_is_seen() -> None:
    text = """
from a import b as found
def part(one, *place): own: int = 1
for one, own in a: ...
match a:
    case [1, *part]: ...
    case {1: 2, **own}: ...
    case place: ...
[one for one in a if (found := one)]
"""
    counted = sorted(name.rpartition(":")[2] for name in bound_words(Source.of(text)))
    assert counted == ["found"] * 2 + ["one"] * 3 + ["own"] * 3 + ["part"] * 2 + ["place"] * 2


def test_words_that_are_only_used_pass() -> None:
    assert not [*bound_words(Source.of("table.place = f(one.part, own=place)"))]
