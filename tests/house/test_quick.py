"""`make quick` selects the tests for a change, and names those that it leaves out."""

from __future__ import annotations

import pytest

from tests.quick import HOUSE, LAWS, FileTimes, direct_imports, mirror_folder, select_tests


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("clearhead/core/attention.py", "tests/core/test_attention.py"),
        ("clearhead/core/shapes.py", "tests/core"),
        ("clearhead/version.py", None),
    ],
)
def test_a_module_has_the_nearest_file_or_folder(path: str, folder: str | None) -> None:
    assert mirror_folder(path) == folder


def test_a_change_of_the_library_runs_its_mirror_and_the_laws() -> None:
    selected, left_out = select_tests({"clearhead/core/attention.py"})
    assert selected == {HOUSE, LAWS, "tests/core/test_attention.py"}
    assert "tests/core/test_stack.py" in left_out and "tests/core/test_attention.py" not in left_out


def test_a_change_of_a_program_runs_all_tests_that_import_it() -> None:
    changed = "clearhead/apps/cli/console.py"
    selected, _ = select_tests({changed})
    importing = {path for path, imports in direct_imports().items() if "clearhead.apps.cli.console" in imports}
    assert importing and importing <= selected and LAWS not in selected


def test_a_helper_of_tests_counts_as_an_import() -> None:
    helpers = direct_imports()["tests/laws/test_cache.py"]
    assert "clearhead.spec.presets.hyperparameters" in helpers  # through tests/laws/tiny.py


def test_a_changed_test_runs_itself() -> None:
    path = "tests/text/test_chat.py"
    assert path in select_tests({path, "docs/index.md"})[0]


def test_the_slowest_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Reporter:
        def write_line(self, line: str) -> None:
            print(line)

    times = FileTimes()
    times.seconds.update({"tests/a.py": 100, "tests/b.py": 30})
    times.pytest_terminal_summary(Reporter())  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    times.start -= 130
    times.pytest_terminal_summary(Reporter())  # type: ignore[arg-type]
    assert "the slowest file: tests/a.py (100 s)" in capsys.readouterr().out
