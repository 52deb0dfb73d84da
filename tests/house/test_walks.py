"""Five walks through the package stay short: loading, translating, generating, training, answering a request."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.house.walks import PACKAGE, RECORD, WALKS, FileTrace, file_if_counted, files_of_walks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    return files_of_walks()


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_runs_in_no_more_files_than_recorded(name: str, walks: dict[str, list[str]]) -> None:
    limit = json.loads(RECORD.read_text("utf-8"))[name]
    assert len(walks[name]) <= limit, f"{name} runs in {len(walks[name])} files: {walks[name]}"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("load", "checkpoints/runs/directory.py"),
        ("translate", "generate/decoder.py"),
        ("generate", "generate/continuation.py"),
        ("train", "training/loop.py"),
        ("serve", "apps/serve/api/engine.py"),
    ],
)
def test_a_walk_reaches_the_code_that_it_is_about(name: str, file: str, walks: dict[str, list[str]]) -> None:
    assert file in walks[name]


def test_a_file_counts_only_if_its_function_runs_while_the_trace_is_active() -> None:
    code = compile("x = 1\nclass A:\n    y = 2\ndef f():\n    return 3\n", str(PACKAGE / "text" / "x.py"), "exec")
    names: dict[str, object] = {}
    trace, before = FileTrace(), sys.getprofile()
    trace.install()
    try:
        with trace.active():
            exec(code, names)
        assert trace.files == set()
        names["f"]()  # type: ignore[operator]
        assert trace.files == set()
        with trace.active():
            names["f"]()  # type: ignore[operator]
    finally:
        sys.setprofile(before)
    assert trace.files == {"text/x.py"}


def test_a_function_that_an_import_calls_does_not_count() -> None:
    text = "def f():\n    return 3\nx = f()\ny = list(a for a in [x])\n"
    code, names, before = compile(text, str(PACKAGE / "text" / "x.py"), "exec"), dict[str, object](), sys.getprofile()
    trace = FileTrace()
    trace.install()
    try:
        with trace.active():
            exec(code, names)
    finally:
        sys.setprofile(before)
    assert names["y"] == [3] and trace.files == set()


@pytest.mark.parametrize("path", ["base/errors.py", "spec/model.py", "core/stack.py"])
def test_files_of_base_spec_and_core_do_not_count(path: str) -> None:
    code = compile("def f(): pass", str(PACKAGE / path), "exec").co_consts[0]
    assert file_if_counted(code) is None


def test_files_outside_the_package_do_not_count() -> None:
    assert file_if_counted(compile("def f(): pass", str(Path(__file__)), "exec").co_consts[0]) is None
