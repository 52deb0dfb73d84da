"""The verdict on a library of kernels: it was tried in another process, on this machine, before it serves here.

It is kept in the cache by the digest of all that it depends on, so that a library is tried once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch

from clearhead.fast.native.cache import kernel_folder, locked, read_own, write_own
from clearhead.fast.probe import processor

KEPT_AS: Final = ".verdict"
PASSED: Final = "passed"
SECONDS: Final = 60
"""A test takes two; one that takes so many hangs."""
_TEST: Final = Path(__file__).parent.parent / "selftest.py"
_RUN: Final = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from clearhead.fast import selftest; "
_TICK: Final = 0.1
_NAMES: Final = "SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT"
_CRASHES: Final = {getattr(signal, name) for name in _NAMES if hasattr(signal, name)}  # Windows has no SIGBUS


def refuse_untried(file: Path, kernels: str) -> None:
    """Refuse a library that crashes, hangs or computes wrong on this machine.

    Args:
        file: of the library.
        kernels: the folder of its sources.

    Raises:
        OSError: it does, or it cannot be tried; a sentence says what happened.
    """
    facts = sorted(processor().isa), processor().description, torch.__version__, kernels
    parts = file.read_bytes(), _TEST.read_bytes(), repr(facts).encode()
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    kept = kernel_folder() / f"{digest}{KEPT_AS}"
    if not kept.exists():
        with locked(kept.parent):
            if not kept.exists():
                write_own(kept, _tried(file, kernels).encode())
    if (said := read_own(kept).decode()) != PASSED:
        raise OSError(f"{said} (to try again, delete {kept})")


def _tried(file: Path, kernels: str) -> str:
    """Return what is wrong with a library, or that it passed."""
    # With the modules that this process has, whatever lies in the working directory.
    command = [sys.executable, "-I", "-c", f"{_RUN}selftest.main(*sys.argv[1:])", str(file), kernels]
    # It may be one of many programs, and threads that wait busily would take its time.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, json.dumps(sys.path)], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as child:
        try:
            # Ticks: what stops both processes for a while, as a laptop's lid does, is no hang.
            for _ in range(int(SECONDS / _TICK)):
                try:
                    said, errors = child.communicate(timeout=_TICK)
                    break
                except subprocess.TimeoutExpired:
                    continue
            else:
                return f"a test of them on this machine did not end within {SECONDS} s"
        finally:
            child.kill()
    if -child.returncode in _CRASHES:
        return f"a test of them on this machine ended with {signal.Signals(-child.returncode).name}"
    if child.returncode:
        # Of what may be otherwise the next time, such as too little memory, no verdict is kept.
        last = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise OSError(f"a test of them on this machine failed: {last[0]}")
    return said or PASSED
