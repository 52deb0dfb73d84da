"""Tasks of other packages are found by their entry points, and a package that is broken breaks no command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.spec.tasks import registry
from clearhead.spec.tasks.record import TaskRecord

TASK = """
from clearhead.spec.tasks.base import EvaluateWords, NewWords, Task

TASK = Task(
    "{kind}", "labels", ("encoder",), NewWords("Write it.", (), "", ("text",), ("mood",), longer=""),
    EvaluateWords(("text",), "moods"), "predict {{run}} FILE", (), home="moods",
)
"""
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package `moods` whose module `task` has some code, with an entry point "mood"."""

    def forget() -> None:
        for cached in (registry.task_kinds, registry.find_task, registry.list_tasks):
            cached.cache_clear()

    def install_package(code: str) -> None:
        (tmp_path / "moods").mkdir()
        (tmp_path / "moods" / "task.py").write_text(code, encoding="utf-8")
        about = tmp_path / "moods-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moods\nVersion: 1\n", encoding="utf-8")
        (about / "entry_points.txt").write_text("[clearhead.tasks]\nmood = moods.task:TASK\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield install_package
    for name in ("moods.task", "moods"):
        sys.modules.pop(name, None)
    forget()


def test_a_task_of_another_package_is_one_of_all(install: Install) -> None:
    install(TASK.format(kind="mood"))
    assert registry.task_kinds()[-1] == "mood" and registry.list_tasks()[-1] is registry.find_task("mood")
    assert [task.kind for task in registry.tasks_with_outputs("labels")] == ["classify", "mood"]
    assert TaskRecord(kind="mood", facts={"words": ["glad", 3]}).facts == {"words": ["glad", 3]}


def test_an_option_without_help_is_still_an_option(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(TASK.format(kind="mood"))
    assert main(["new", "mood", "--help"]) == 0
    assert "--mood VALUE" in capsys.readouterr().out


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_like_it\n", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("TASK = Task()\n", "NameError: name 'Task' is not defined"),
        ("", "AttributeError"),
        (TASK.format(kind="temper"), "is not the task 'mood': expected a clearhead.spec.tasks.base.Task of this kind"),
        ("TASK = 3\n", "is not the task 'mood': expected a clearhead.spec.tasks.base.Task of this kind"),
    ],
)
def test_a_broken_package_is_named_and_breaks_no_other_task(
    code: str, reason: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(code)
    with pytest.raises(InputError, match=r"update its package") as caught:
        registry.find_task("mood")
    assert reason in str(caught.value)
    assert main(["new", "classify", "--help"]) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("moods.task:TASK") == 1 and reason in stderr
    assert registry.find_task("classify").kind == "classify" and len(registry.list_tasks()) == len(registry.BUILT_IN)


def test_a_package_without_a_part_is_named(install: Install) -> None:
    install(TASK.format(kind="mood"))
    with pytest.raises(
        InputError, match=r"'mood' cannot be used: No module named 'moods.use'; update the package moods"
    ):
        registry.find_task("mood").module("use")


def test_a_model_of_a_task_that_is_not_installed_is_refused_by_its_name() -> None:
    text = TaskRecord(kind="classify").to_json().replace('"classify"', '"classfy"')
    with pytest.raises(InputError, match=r"task.json: there is no task 'classfy' \(did you mean 'classify'\?\); the "):
        TaskRecord.from_json(text, "task.json")


def test_warnings_of_broken_packages_come_once(install: Install) -> None:
    install("TASK = 3\n")
    with pytest.warns(UserWarning, match="is not the task 'mood'"):
        registry.list_tasks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.tasks_with_outputs("vector")[0].kind == "embed"
