"""Commands in messages work in a shell: with the path of clearhead, and for this environment."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from clearhead.apps.cli.main import make_app
from clearhead.base import commands
from clearhead.base.commands import EXTENSIONS, list_requirements, make_command, make_install_command
from clearhead.core.extensions.files import load_parts
from tests.house.source import ROOT, Source, package_sources

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the commands are those of a POSIX shell")

# A card and a run file are read on other machines, and reports of a check name the process that failed.
FOR_ELSEWHERE = {
    "clearhead/model/saving.py", "clearhead/apps/recipes/run_file.py", "clearhead/apps/demo/translate.py",
    "clearhead/training/parallel/processes.py", "clearhead/training/parallel/world.py",
    "clearhead/apps/train_process.py",
    "clearhead/apps/check/job/job.py", "clearhead/apps/check/model/report.py", "clearhead/apps/cli/new.py",
}  # fmt: skip
QUOTED_NAME = re.compile(r"[`']clearhead [a-z]+[`']")
EXTENSION = """
from dataclasses import dataclass
import clearhead as ch
from torch import Tensor, nn


@dataclass(frozen=True)
class CommandScale:
    by: float = 2.0


@ch.register(CommandScale, role="norm")
class CommandScaleLayer(nn.Module):
    def __init__(self, width: int, spec: CommandScale) -> None:
        super().__init__()
        self.by = spec.by

    def forward(self, x: Tensor, context: object = None) -> Tensor:
        return self.by * x
"""


def texts_of(source: Source) -> list[str]:
    """Return the strings of a file except docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(source.tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
    return [node.value for node in constants if isinstance(node.value, str) and id(node) not in docstrings]


def test_one_function_writes_every_command_that_installs() -> None:
    sources = [source for source in package_sources() if source.path != "clearhead/base/commands.py"]
    assert [source.path for source in sources if "pip install" in source.text] == []


def test_one_function_writes_every_command_that_a_reader_types() -> None:
    import typer

    names = "|".join(typer.main.get_command(make_app()).commands)  # type: ignore[attr-defined]
    command = re.compile(rf"\bclearhead ({names})\b")
    sources = [source for source in package_sources() if source.path not in FOR_ELSEWHERE]
    texts = [(source.path, QUOTED_NAME.sub("", text)) for source in sources for text in texts_of(source)]
    faults = [f"{path}: {text}" for path, text in texts if command.search(text)]
    assert faults == []


def test_the_name_stands_alone_only_where_path_leads_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(sysconfig.get_path("scripts"), "clearhead")
    monkeypatch.chdir(tmp_path)
    assert make_command("view runs/a TEXT") == "clearhead view runs/a TEXT"
    for path in ("", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        assert make_command("view") == f"{shlex.quote(str(script))} view"
        # The clearhead of another environment.
        (tmp_path / "clearhead").write_text("#!/bin/sh\n", "utf-8")
        (tmp_path / "clearhead").chmod(0o755)
    monkeypatch.chdir(script.parents[1])
    assert make_command("view") == f"{script.parent.name}/clearhead view"
    monkeypatch.chdir(script.parent)
    assert make_command("view") == f"{shlex.quote(str(script))} view"


def test_without_a_script_python_runs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    words = shlex.split(make_command("--version"))
    assert words == [sys.executable, "-m", "clearhead", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)
    assert done.stdout.startswith("clearhead ")


def test_the_advice_of_a_command_works_where_path_lacks_it(tmp_path: Path) -> None:
    """The printed command runs in the same folder."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "clearhead").exists())
    script = Path(sysconfig.get_path("scripts"), "clearhead")
    environment = os.environ | {"PATH": path, "CLEARHEAD_CACHE": str(tmp_path / "cache")}
    assert shutil.which("clearhead", path=path) is None
    done = subprocess.run(
        [script, "heads"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    advice = done.stderr.rpartition("; see ")[2].strip()
    assert advice.endswith("clearhead heads --help")
    shown = subprocess.run(
        advice, shell=True, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert shown.returncode == 0 and "clearhead heads" in shown.stdout


def test_a_clone_is_installed_again_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(make_install_command(extra="serve"))
    assert words == [sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[serve]"]
    words = shlex.split(make_install_command("numpy>=1.26", "torch"))
    assert words == [sys.executable, "-m", "pip", "install", "numpy>=1.26", "torch"]


def test_a_wheel_gets_the_packages_of_the_extra_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index does not have clearhead, and the packages of included extras are listed too."""
    monkeypatch.setattr(commands, "_FOLDER", tmp_path)
    words = shlex.split(make_install_command(extra="serve"))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    names = {Requirement(word).name for word in words[4:]}
    assert names == {"llguidance", "fastapi", "prometheus-client", "uvicorn"}
    assert all(Requirement(word).specifier for word in words[4:])


def test_an_environment_of_uv_is_installed_into_by_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    words = shlex.split(make_install_command("numpy"))
    assert words == ["uv", "pip", "install", "--python", sys.executable, "numpy"]


def requirement_names(texts: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_every_extra_of_the_package_has_packages() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {canonicalize_name(requirement.name) for requirement in list_requirements()} == requirement_names(
        project["dependencies"]
    )
    for extra, texts in project["optional-dependencies"].items():
        direct = requirement_names(texts) - {"clearhead"}
        names = {canonicalize_name(requirement.name) for requirement in list_requirements(extra)}
        assert direct <= names and "clearhead" not in names and not names & {"torch"}


@pytest.mark.parametrize("word", ["runs/de en", "it's", "$HOME", "a;b"])
def test_a_word_is_quoted_for_the_shell(word: str) -> None:
    assert shlex.split(commands.quote(word)) == [word]


def test_commands_name_the_extension_files_of_the_running_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(EXTENSION, "utf-8")
    monkeypatch.chdir(tmp_path)
    load_parts("mine.py")
    assert make_command("view a") == "clearhead view a"
    token = EXTENSIONS.set([])
    try:
        assert make_command("view a") == "clearhead view a"
        for _ in range(2):
            load_parts("mine.py")
        assert make_command("view a") == "clearhead view a --parts mine.py"
    finally:
        EXTENSIONS.reset(token)
