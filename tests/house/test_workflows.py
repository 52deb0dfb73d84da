"""The workflows run what everybody can run: their Linux job uses the targets of .ci/run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.source import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    return loaded


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in read(name)["jobs"].values() for step in job.get("steps", ())]


def targets(text: str) -> list[str]:
    return re.findall(r"^(?:exec )?make ([\w-]+)", text, re.MULTILINE)


def test_every_run_of_the_linux_job_is_a_target_of_ci() -> None:
    runs = [step["run"] for step in steps("linux.yml") if "run" in step]
    assert len(runs) >= 6 and all(re.fullmatch(r"make [\w-]+", run) for run in runs)
    assert targets("\n".join(runs)) == targets((ROOT / ".ci" / "run").read_text("utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_targets_exist_and_nothing_secret_is_named(path: Any) -> None:
    text = path.read_text("utf-8")
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {target for step in steps(path.name) if "run" in step for target in targets(step["run"])}
    assert named <= rules and "secrets." not in text
    assert read(path.name)["permissions"]["contents"] == "read"
    assert all(re.search(r"@(v\d|release/v\d)", step["uses"]) for step in steps(path.name) if "uses" in step)
    # What a stranger can name, such as a branch, is not pasted into a shell.
    assert not [step for step in steps(path.name) if "${{ github." in step.get("run", "")]


def test_every_system_and_every_python_is_tried() -> None:
    linux, others = (read(name)["jobs"]["test"]["strategy"]["matrix"] for name in ("linux.yml", "other-systems.yml"))
    assert linux["python"] == others["python"] == PYTHONS
    assert {system.partition("-")[0] for system in others["system"]} == {"macos", "windows"}
    runs = [step["run"] for step in steps("other-systems.yml") if "run" in step]
    assert any(run.startswith("clearhead demo") for run in runs) and any("pytest" in run for run in runs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    stated = [
        classifier.rpartition(" ")[2] for classifier in project["classifiers"] if re.search(r":: 3\.\d+$", classifier)
    ]
    assert stated == PYTHONS and project["requires-python"] == f">={PYTHONS[0]}"


def test_a_release_needs_everything_and_a_tag() -> None:
    release = read("release.yml")
    # YAML 1.1 reads the key `on` as true.
    assert release[True] == {"push": {"tags": ["v*"]}}  # type: ignore[index]
    assert set(release["jobs"]["publish"]["needs"]) == {*release["jobs"]} - {"publish"}
    assert "make docs" in [step.get("run") for step in steps("site.yml")]


def test_a_plugin_that_warns_of_another_plugin_is_left_out(tmp_path: Path) -> None:
    """Earlier releases of pytest-benchmark warn of pytest-xdist when they are loaded."""
    (tmp_path / "warning_plugin.py").write_text("import warnings\nwarnings.warn('of another plugin')\n", "utf-8")
    (tmp_path / "warning_plugin-1.dist-info").mkdir()
    (tmp_path / "warning_plugin-1.dist-info" / "METADATA").write_text("Name: warning_plugin\nVersion: 1\n", "utf-8")
    points = tmp_path / "warning_plugin-1.dist-info" / "entry_points.txt"
    for name, code in (("benchmark", 0), ("another", 1)):
        points.write_text(f"[pytest11]\n{name} = warning_plugin\n", "utf-8")
        words = [sys.executable, "-W", "error", "-m", "pytest", "-q", "--noconftest", "tests/base/test_progress.py"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == bool(code), done.stdout + done.stderr


def test_the_build_of_the_site_shows_progress_and_gives_a_cell_time() -> None:
    """It takes many minutes, and a cell may train a model while other programs run."""
    (line,) = [line for line in (ROOT / "Makefile").read_text("utf-8").splitlines() if "-m sphinx" in line]
    assert not {"--quiet", "-q", "-Q"} & set(line.split())
    (limit,) = re.findall(
        r"^nb_execution_timeout = (\d+)", (ROOT / "docs" / "conf.py").read_text("utf-8"), re.MULTILINE
    )
    assert int(limit) >= 3600
