"""The partial files of a killed command are removed when another command writes there."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main

DATA = "--source", "{out}/train.source", "--target", "{out}/train.target"


@pytest.mark.parametrize(
    ("words", "leftover"),
    [
        (("convert", "{run}", "--to", "hf", "{out}/model"), "{out}/.model.writing-{gone}"),
        (("view", "{run}", "a m u", "-o", "{out}/page.html"), "{out}/.page.html.writing-{gone}"),
        (("view", "{run}", "a m u", "-o", "{out}/maps.npz"), "{out}/.page.html.writing-{gone}"),
        (
            (
                "new",
                "translate",
                "--source",
                "{out}/train.source",
                "--target",
                "{out}/train.target",
                "-o",
                "{out}/a.toml",
            ),
            "{out}/.a.toml.writing-{gone}",
        ),
        (("average", "{run}", "--last", "2"), "{run}/checkpoints/.averaged.writing-{gone}"),
        (("average", "{run}", "--last", "2"), "{run}/checkpoints/.averaged.replaced.removing"),
    ],
)
def test_the_next_command_removes_it(
    words: Sequence[str],
    leftover: str,
    trained: Path,
    tmp_path: Path,
    unmeasured: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    names = {"run": f"{tmp_path}/run", "out": str(tmp_path), "gone": process.pid}
    left = Path(leftover.format(**names))
    left.mkdir()
    (left / "weights.safetensors").write_text("half", encoding="utf-8")
    assert main([word.format(**names) for word in words]) == 0, capfd.readouterr().err
    assert not left.exists()
    assert not [*tmp_path.rglob(".*")]
