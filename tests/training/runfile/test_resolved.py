"""Run files that were written once are read to the same values, and so are the resolved ones in run directories."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from clearhead.apps.demo import classify, fill, generate, translate
from clearhead.spec.tasks.registry import BUILT_IN
from clearhead.training.runfile.read import parse_run_file, to_toml
from tests.house.source import ROOT

HERE = Path(__file__).parent
DEMOS = {"translate": translate, "generate": generate, "classify": classify, "fill": fill}


def collect_run_files() -> dict[str, str]:
    """Return run files by name: one or more of each task, those of the examples, and those of the demo."""
    folders = {"": HERE / "given", "example-": ROOT / "examples"}
    files = {f"{prefix}{path.stem}": path for prefix, folder in folders.items() for path in folder.glob("*.toml")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return texts | {f"demo-{name}": module.RECIPE for name, module in DEMOS.items()}


@pytest.mark.parametrize("name", sorted(collect_run_files()))
def test_a_run_file_means_what_it_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("example-"):
        monkeypatch.chdir(ROOT / "examples")  # the examples name their parts from there
    text = collect_run_files()[name]
    if name.startswith("demo-"):
        text = text.format_map(_Quoted())
    recorded = (HERE / "resolved" / f"{name}.toml").read_text(encoding="utf-8")
    for source in (text, recorded):
        run = parse_run_file(source, name)
        assert tomllib.loads(to_toml(run)) == tomllib.loads(recorded)
        assert parse_run_file(to_toml(run), name) == run


def test_every_task_is_recorded() -> None:
    recorded = [(HERE / "resolved" / f"{kind}.toml").read_text(encoding="utf-8") for kind in BUILT_IN]
    for kind, text in zip(BUILT_IN, recorded, strict=True):
        tables = tomllib.loads(text)
        assert tables["task"]["kind"] == kind and "stream" in tables["data"]


class _Quoted(dict[str, str]):
    """The name of each file, in quotes."""

    def __missing__(self, name: str) -> str:
        return json.dumps(name)
