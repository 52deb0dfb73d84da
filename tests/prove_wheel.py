"""Proof of a wheel with kernels: build it from an sdist, install it without a compiler, run the demo, measure speed.

make wheel
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from statistics import median

from clearhead.fast.native.options import INFERENCE, LEVELS, PACKAGED, TRAINING, library_name

ROOT = Path(__file__).parents[1]
MOST_BYTES = 15_000_000
BENCHMARK = "benchmarks/precisions.py", "--only", "GPT-2", "--rounds", "1", "--new", "8", "--json"


def run(*command: str | Path, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    """Run a command that may end with these codes; return what it wrote to stdout."""
    began = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(f"{time.monotonic() - began:5.0f} s  {' '.join(Path(word).name for word in command[:6])}", flush=True)
    assert done.returncode in codes, done.stdout
    return done.stdout


def build_wheel(sdist: Path, tools: Path, folder: Path, **environment: str) -> Path:
    """Build the wheel of an sdist."""
    pip = sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"
    run(*pip, "-w", folder, sdist, PYTHONPATH=str(tools), **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools, dist, venv = folder / "tools", folder / "dist", folder / "venv"
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", tools, "hatchling>=1.27")
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", dist, PYTHONPATH=str(tools))
        (sdist,) = dist.glob("*.tar.gz")
        plain = build_wheel(sdist, tools, folder / "plain", CXX="no-compiler")
        assert plain.name.endswith("-py3-none-any.whl"), plain.name
        wheel = build_wheel(sdist, tools, folder / "wheel")
        check(wheel)
        run(sys.executable, "-m", "venv", "--without-pip", venv)
        run(sys.executable, "-m", "pip", "--python", venv, "install", "--quiet", "--no-deps", wheel)
        # What it depends on lies here already; the line leads there, and no file of this checkout is found by it.
        paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
        use(venv, folder)
        if len(sys.argv) > 1:
            Path(sys.argv[1]).mkdir(exist_ok=True)
            shutil.copy(wheel, sys.argv[1])


def check(wheel: Path) -> None:
    """Check the name, the size and the libraries of a wheel."""
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl") and wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as opened:
        libraries = {Path(name).name: opened.read(name) for name in opened.namelist() if name.endswith(".so")}
        assert all(f"/{PACKAGED}/" in name for name in opened.namelist() if name.endswith(".so"))
    assert libraries.keys() == {library_name(kernels, level) for kernels in (INFERENCE, TRAINING) for level in LEVELS}
    assert all(b"libgomp.so.1" in content and b"libtorch" not in content for content in libraries.values())


def use(venv: Path, folder: Path) -> None:
    """Run the demo and a benchmark from an environment with no compiler."""
    nothing = {"PATH": str(venv / "bin"), "CLEARHEAD_CACHE": str(folder / "cache"), "PYTHONPATH": "", "CXX": ""}
    assert not any(shutil.which(name, path=nothing["PATH"]) for name in ("g++", "clang++", "c++"))
    package_path = run(venv / "bin/python", "-P", "-c", "import clearhead; print(clearhead.__file__)", **nothing)
    assert Path(package_path.strip()).is_relative_to(venv), package_path
    output = run(venv / "bin/clearhead", "demo", "--json", "--out", folder / "run", **nothing)
    print(output.splitlines()[-1])
    assert "kernels" not in output, output
    # Its own limits are for an idle machine and several rounds: 1 says that one was missed.
    output = run(venv / "bin/python", *BENCHMARK, codes=(0, 1), **nothing)
    print(output)
    assert output.startswith("kernels for "), output
    speeds = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    medians = {work: {name: median(rates) for name, rates in speed.items()} for work, speed in speeds.items()}
    slower = {work: speed for work, speed in medians.items() if speed["int8"] < 0.95 * speed["fp32"]}
    assert not slower, slower


if __name__ == "__main__":
    main()
