"""Proof of the guide "Install": each of its lines runs, in an empty environment for each block.

python -m tests.prove_install FOLDER_OF_WHEELS

TORCH_INDEX is the address of PyTorch's index for a CPU. If it is not set, pip and uv take PyTorch from the indexes in
pip's configuration. The lines that name PyTorch's index then run without that option.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.house.source import ROOT, repository_files

GUIDE = ROOT / "docs" / "guides" / "install.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN_INDEX = re.compile(r' --index-url "\$TORCH_INDEX"| --torch-backend=cpu')
STARTS = "python3 -m venv .venv", "uv venv .venv"


def blocks() -> list[list[str]]:
    """Return the lines of each block of the guide that makes an environment."""
    every = [text.splitlines() for text in BLOCK.findall(GUIDE.read_text("utf-8"))]
    return [lines for lines in every if lines[0] in STARTS]


def run(line: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a line in a shell; return what it wrote to stdout."""
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-euc", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def settings_of_pip() -> dict[str, str]:
    """Return the indexes and folders that pip looks into, as uv reads them."""
    values: dict[str, list[str]] = {"extra-index-url": [], "find-links": []}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        for key, words in values.items():
            if name.rpartition(".")[2] == key:
                words += value.strip("'").split()
    return {
        "UV_INDEX": " ".join(values["extra-index-url"]),
        "UV_FIND_LINKS": ",".join(dict.fromkeys(values["find-links"])),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def environment_of(folder: Path) -> dict[str, str]:
    """Return variables of an environment without clearhead: PATH has only Python 3, uv and the system's programs."""
    tools = folder / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    subprocess.run([tools / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "uv").symlink_to(tools / "bin" / "uv")
    (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    hidden = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return (
        inherited
        | {name: value for name, value in settings_of_pip().items() if value}
        | {
            "PATH": f"{programs}:/usr/bin:/bin",
            "UV_CACHE_DIR": str(folder / "uv"),
            "CLEARHEAD_CACHE": str(folder / "cache"),
        }
    )


def main(wheels: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone = folder / "clone"
        for path in repository_files():
            target = clone / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        shutil.copytree(wheels, clone / "dist")
        environment = environment_of(folder)
        assert shutil.which("clearhead", path=environment["PATH"]) is None
        for lines in blocks():
            shutil.rmtree(clone / ".venv", ignore_errors=True)
            for line in lines:
                line = line.partition("  #")[0]
                run(line if environment.get("TORCH_INDEX") else OWN_INDEX.sub("", line), clone, environment)
            check(clone, environment, from_clone=any("--editable" in line for line in lines))


def check(clone: Path, environment: dict[str, str], *, from_clone: bool) -> None:
    """Check an installation: where clearhead is, that its extra is complete, and that a line of doctor installs one."""
    clearhead = f"{clone}/.venv/bin/clearhead"
    script = f"{clone}/.venv/bin/python -P -c 'import clearhead; print(clearhead.__file__)'"
    installed = Path(run(script, clone.parent, environment).strip())
    assert installed.is_relative_to(clone / ("clearhead" if from_clone else ".venv")), installed
    packages = json.loads(run(f"{clearhead} doctor --json", clone, environment).splitlines()[-1])["packages"]
    assert packages["unmet"] == packages["extras_without"]["serve"] == [], packages
    (line,) = re.findall(r"without tensorboard: .*?; install: (.*)", run(f"{clearhead} doctor", clone, environment))
    run(line, clone.parent, environment)
    packages = json.loads(run(f"{clearhead} doctor --json", clone, environment).splitlines()[-1])["packages"]
    assert packages["extras_without"]["tensorboard"] == [], packages


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
