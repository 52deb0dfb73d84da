"""House rule 12: names, docstrings, comments, messages and pages are plain English (what a program can check of it)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.house.language import (
    Passage,
    find_arguments,
    find_bound_names,
    find_long_sentences,
    find_phrases,
    has_bad_start,
    is_participle,
    read_comments,
    read_docstrings,
    read_document,
    read_messages,
    split_docstring,
)
from tests.house.source import ROOT, Source, package_sources, python_sources, repository_files

NAME_EXCEPTIONS: Mapping[str, str] = {
    "clearhead/spec/nodes.py:place": "a key of spec.json, which saved models contain",
}
"""Names that stay, as PATH:NAME, each with its reason."""
NOUNS = frozenset(
    "added_entries added_tokens allowed_pairs allowed_tokens attended_positions banned_ids banned_words "
    "built_type cached_tensors compared_outputs declared_options disentangled_faults escaped_json estimated_width "
    "expected_flow expected_reach extended_length fixed_ids fused_attention generated_ids hidden_states "
    "labelled_states labelled_table labelled_texts masked_ids merged_without_transpose mixed_linear "
    "needed_entries needed_ids padded_inputs padded_length peaked_scores planned_steps pooled_outputs "
    "predicted_labels prepared_value projected_cross_entropy ragged_rows recomputed_parts required_parts "
    "reversed_mask_findings stored_matrices stored_size tagged_texts unsaved_buffers unsupported_upgrade_warning "
    "unused_outputs written_words".split()
)
"""Functions that only compute the value that the last word names, as `padded_length` does."""
CLASS_EXCEPTIONS = ("clearhead/spec/", "clearhead/core/", "clearhead/fast/native/abi.py")
"""A node of a spec, its module and the struct of a kernel share a name."""
EVERY_TASK = frozenset({"Training", "Parameters"})
"""Classes that each task has."""
UNCHECKED = ("CHANGELOG.md", "docs/results-history.md")
"""Logs: their entries are not rewritten when the rules change."""


@cache
def code() -> tuple[Source, ...]:
    """Return the package, the benchmarks and the helper modules of the tests."""
    helpers = tuple(source for source in python_sources("tests") if not Path(source.path).name.startswith("test_"))
    return package_sources() + python_sources("benchmarks") + helpers


@cache
def prose() -> tuple[Passage, ...]:
    """Return the docstrings, comments and messages of the package and the benchmarks, and the passages of each page."""
    sources = package_sources() + python_sources("benchmarks")
    readers: tuple[Callable[[Source], Iterator[Passage]], ...] = (read_docstrings, read_comments, read_messages)
    passages = [passage for source in sources for reader in readers for passage in reader(source)]
    for path in repository_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".md" and name not in UNCHECKED:
            passages += read_document(name, path.read_text("utf-8"))
    return tuple(passages)


def test_names_are_nouns_of_their_things() -> None:
    bound = {f"{source.path}:{name}": line for source in code() for name, line in find_bound_names(source.tree)}
    assert not {f"{key}, line {line}" for key, line in bound.items() if key not in NAME_EXCEPTIONS}
    assert not NAME_EXCEPTIONS.keys() - bound.keys(), "these are bound no longer: strike them from the list"


def test_functions_are_named_by_verbs() -> None:
    named: dict[str, str] = {}
    for source in code():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name):
                decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                if "property" not in decorators and "fixture" not in decorators:
                    named[node.name.strip("_")] = f"{source.path}:{node.lineno} {node.name}"
    assert not sorted(named[name] for name in named.keys() - NOUNS)
    assert not NOUNS - named.keys(), "these are gone: strike them from the list"


def test_a_name_of_a_class_occurs_once() -> None:
    places = defaultdict(set)
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in EVERY_TASK:
                shared = source.path.startswith(CLASS_EXCEPTIONS) or (node.name, source.package) == ("Model", "model")
                places[node.name].add("spec and core" if shared else f"{source.path}:{node.lineno}")
    assert not {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}


def test_docstrings_and_entries_begin_with_a_noun_or_a_verb() -> None:
    begun = {f"{passage.path}:{passage.text}" for passage in prose() if has_bad_start(passage)}
    assert not sorted(begun)


def test_sentences_are_short() -> None:
    assert not [f"{passage.path}:{passage.line} {text}" for passage in prose() for text in find_long_sentences(passage)]


def test_phrases_that_readers_stumble_over_are_gone() -> None:
    assert not [f"{phrase!r} in {passage}" for passage in prose() for phrase in find_phrases(passage)]


def test_the_arguments_of_a_docstring_are_those_of_the_signature() -> None:
    faults = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                documented, names = find_arguments(node)
                if documented and sorted(documented) != sorted(names):
                    faults.append(f"{source.path}:{node.lineno} {node.name} {sorted({*documented} ^ {*names})}")
    assert not faults


def test_every_way_to_bind_a_name_is_seen() -> None:
    text = """
from a import b as found
def part(one, *place): own: int = 1
for one, own in a: a.kept = 1
match a:
    case [1, *part]: ...
    case {1: 2, **own}: ...
    case place: ...
[one for one in a if (found := one)]
table.place = f(one.part, own=place)
"""
    bound = sorted(name for name, _ in find_bound_names(ast.parse(text)))
    assert bound == ["found"] * 2 + ["kept"] + ["one"] * 3 + ["own"] * 3 + ["part"] * 2 + ["place"] * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("checked_limits", True),
        ("_told", True),
        ("built", True),
        ("embed", False),
        ("feed_forward", False),
        ("check", False),
    ],
)
def test_participles_are_seen(name: str, expected: bool) -> None:
    assert is_participle(name) is expected


def test_sentences_of_every_kind_of_text_are_seen() -> None:
    long = " ".join(["word"] * 26) + "."
    short = f"{' '.join(['word'] * 25)}. `Code with words` follows."
    code = f'''
def f(a, b):
    """First. {long}

    Args:
        a: {long}
        b, c: of a batch.
    """
    # {long}
    fail(f"a {{b}} {long}")
'''
    source = Source.of(code)
    passages = [*read_docstrings(source), *read_comments(source), *read_messages(source)]
    assert [passage.kind for passage in passages] == ["docstring", "entry", "entry", "comment", "message"]
    assert [len(find_long_sentences(passage)) for passage in passages] == [1, 1, 0, 1, 1]
    assert [has_bad_start(passage) for passage in passages] == [False, False, True, False, False]
    assert find_arguments(source.tree.body[0]) == (["a", "b", "c"], ["a", "b"])  # type: ignore[arg-type]
    pages = [*read_document("a.md", f"# {long}\n{long}\n\n{short}\n- {long}\n\n```sh\n{long}\n```\n| a | {long} |")]
    assert [len(find_long_sentences(passage)) for passage in pages] == [1, 1, 0, 1, 0, 1]


def test_phrases_are_seen_outside_of_code() -> None:
    texts = ("Is told so many.", "rows whose bits are of one", "`behind` stands", "bits as they are", "Behind it")
    phrases = [find_phrases(Passage("a.py", 1, "comment", text)) for text in texts]
    assert phrases == [["Is told", "so many"], ["whose bits are of"], [], ["as they are"], ["Behind"]]


def test_examples_within_a_docstring_are_no_sentences() -> None:
    text = "Call it.\n\nExample:\n    >>> of a thing\n\nUse it:\n\n    code of its own\n\n- one item\n- two"
    passages = [*split_docstring("a.py", 1, text)]
    assert [passage.text for passage in passages] == ["Call it.", "Use it:", "one item", "two"]
