"""A run with a custom module: trained, resumed exactly, loaded with its file, saved, and used."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.base.progress import Display, use_display
from clearhead.core.extensions.files import load_parts
from clearhead.spec import registry
from clearhead.training.runfile.read import toml_text
from tests.training import quick

OWN = Path(__file__).parent / "own.py"


def tables(folder: Path, run: str, **train: object) -> dict[str, Any]:
    text = folder / "text.txt"
    text.write_text("a text of some words, and another one\n" * 40)
    custom = folder / "mine.py"
    if not custom.exists():
        first_part, *_ = OWN.read_text().split("@dataclass(frozen=True)\nclass Gain")
        custom.write_text(first_part.replace("LastTokens", "NewestTokens"))
    return {
        "task": {"kind": "generate"},
        "data": {"train": {"text": str(text)}, "valid": 0.2, "max_length": 11},
        "tokenizer": {"kind": "character"},
        "model": {
            "layers": 2, "width": 14, "heads": 2, "feedforward": 19, "parts": str(custom),
            "mixer": {"kind": "newest_tokens", "count": 2, "rate": 0.3},
        },
        "train": {
            "run": str(folder / run), "batch_tokens": 64, "learning_rate": 1e-2, "schedule": "constant", "warmup": 0,
            "save_every": 2, "validate_every": 4, "snapshots": 0, "precision": "fp32", **train,
        },
    }  # fmt: skip


class Heard(Display):
    def __init__(self, messages: list[str]) -> None:
        self.messages = messages

    def message(self, text: str) -> None:
        self.messages.append(text)


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "step-4" / "weights.safetensors").read_bytes()


def test_it_trains_resumes_exactly_loads_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.leave_out(monkeypatch)
    whole = ch.train(tables(tmp_path, "whole", steps=4))
    ch.train(tables(tmp_path, "halves", steps=2))
    halves = ch.train(tables(tmp_path, "halves", steps=4), resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "halves")
    messages: list[str] = []
    with use_display(Heard(messages)):
        model = ch.load(halves.run, parts=tmp_path / "mine.py")
    assert ["MeanOfNewestTokens caches nothing" in line for line in messages] == [True]
    (generation,) = model.generate("a te", max_new_tokens=5, temperature=0)
    text = generation.text
    model.save(tmp_path / "saved")
    assert ch.load(tmp_path / "saved").generate("a te", max_new_tokens=5, temperature=0)[0].text == text
    assert model.generate("a te", max_new_tokens=5, beam_size=3)[0].tokens
    ids = torch.tensor([[model.tokenizer.bos_id, *model.tokenizer.encode("a te")]])
    for letter in text:
        with torch.no_grad():
            best = model.module(ids).logits[:, -1:].argmax(-1)
        assert model.tokenizer.decode([int(best)]) == letter
        ids = torch.cat([ids, best], 1)
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\n")
    load_parts(tmp_path / "mine.py")
    for use in (lambda: ch.load(whole.run), lambda: ch.train(tables(tmp_path, "whole", steps=6), resume=True)):
        with pytest.raises(InputError, match=r"was made with another version of mine\.py: .*; restore the file"):
            use()


def forget_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all imported files of custom modules, like a new process."""
    kinds: dict[str, registry.PartKind] = {}
    monkeypatch.setattr(registry, "_kinds", lambda: kinds)
    for name in [name for name in sys.modules if name.startswith("clearhead_parts_")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("equal", [None, "steps"])
def test_parts_of_a_run_directory_are_imported_only_where_they_are_named(
    equal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A relative name belongs to the folder of the run file; a folder that was downloaded names no code to run.

    A module of the working directory shadows none of the standard library in the runs of a sweep.
    """
    quick.leave_out(monkeypatch)
    project, elsewhere, marker = tmp_path / "project", tmp_path / "elsewhere", tmp_path / "marker"
    project.mkdir()
    elsewhere.mkdir()
    content = tables(project, "run", steps=2)
    content["model"]["parts"] = "mine.py"
    (project / "run.toml").write_text(toml_text(content))
    trap = f"open({str(marker)!r}, 'w')\nraise RuntimeError('shadowed')\n"
    for name in ("mine.py", "random.py"):
        (elsewhere / name).write_text(trap)
    monkeypatch.chdir(elsewhere)
    forget_parts(monkeypatch)
    swept = [] if equal is None else ["--sweep", "train.seed=3", "--equal", equal]
    assert main(["train", str(project / "run.toml"), *swept]) == 0, capfd.readouterr().err

    downloaded = tmp_path / "downloaded"
    shutil.move(project / "run", downloaded)
    for file in downloaded.rglob("*.toml"):
        text = file.read_text()
        line = next((line for line in text.splitlines() if line.startswith("parts = ")), None)
        assert line is None or file.name != "base.toml"
        file.write_text(text.replace(line or "\0", "").replace("[model]", '[model]\nparts = "mine.py"'))
        (file.parent / "mine.py").write_text(trap)
    commands = [["train", str(downloaded)]]
    if equal is None:
        commands.append(["train", str(downloaded / "run.toml"), "--resume"])
        shutil.copytree(downloaded, tmp_path / "bare", ignore=lambda *_: ["checkpoints"])
        commands.append(["train", str(tmp_path / "bare")])
    for command in commands:
        forget_parts(monkeypatch)
        assert main(command) == 2
        assert "name it with --parts FILE" in capfd.readouterr().err
    forget_parts(monkeypatch)
    if equal is not None:  # the directory of a sweep names no parts
        base = downloaded / "base.toml"
        base.write_text(base.read_text().replace('parts = "mine.py"', ""))
    assert main(["train", str(downloaded), "--parts", str(project / "mine.py")]) == 0, capfd.readouterr().err
    assert not marker.exists()
