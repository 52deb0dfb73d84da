"""Kernels in wheels: libraries in C++ without PyTorch, one for each level of processors, beside the Python files.

`pip wheel .` gives py3-none-PLATFORM on Linux where there is g++, elsewhere and with CLEARHEAD_WHEEL=any py3-none-any.
Editable installs are left alone: a checkout compiles for its own processor when kernels are first needed.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "clearhead/fast/native"
# Nothing is needed but the system's C library and the OpenMP library that PyTorch brings and loads first.
LINKED = "-shared", "-s", "-static-libstdc++", "-static-libgcc"


class KernelHook(BuildHookInterface[Any]):
    """Compiles the kernels of a wheel into a temporary folder, from where hatchling takes them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries, and the tag of the platform that they are for."""
        is_possible = sys.platform == "linux" and platform.machine() == "x86_64"
        compiler = shutil.which(os.environ.get("CXX") or "g++")
        if version == "editable" or not is_possible or compiler is None or os.environ.get("CLEARHEAD_WHEEL") == "any":
            return
        self.made = tempfile.TemporaryDirectory()
        folder, options = Path(self.made.name), runpy.run_path(str(Path(self.root, NATIVE, "options.py")))
        jobs = [
            (kernels, level) for kernels in (options["INFERENCE"], options["TRAINING"]) for level in options["LEVELS"]
        ]

        def compile_one(job: tuple[str, str]) -> str | None:
            kernels, level = job
            name = options["library_name"](kernels, level)
            sources = sorted(Path(self.root, NATIVE, kernels).glob("*.cpp"))
            command = [*options["command"](compiler, kernels, options["LEVELS"][level][1]), *map(str, sources), *LINKED]
            done = subprocess.run([*command, "-o", str(folder / name)], capture_output=True, text=True, check=False)
            if done.returncode:
                self.app.display_warning(f"{name} is left out: {compiler} failed: {done.stderr[-400:]}")
            return None if done.returncode else name

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            names = [name for name in pool.map(compile_one, jobs) if name is not None]
        if names:
            place = f"{NATIVE}/{options['PACKAGED']}"
            build_data["force_include"] |= {str(folder / name): f"{place}/{name}" for name in names}
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if hasattr(self, "made"):
            self.made.cleanup()
