"""Calls of kernels from other threads, and in forked processes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest
import torch

from clearhead.fast.native import load

FORKED = """
import os, torch
from clearhead import presets
from clearhead.core import build
from clearhead.fast.cache import IndexedCache
from clearhead.fast.int8 import to_int8
from clearhead.fast.runner import Runner
torch.set_num_threads(2)
torch.manual_seed(1)
runner = Runner(to_int8(build(presets.llama_tiny(60, layers=2)).eval()))
assert {one.by for one in runner.report()} == {"kernels"}

def logits():
    with torch.inference_mode():
        return runner.tree().decode(torch.arange(40).view(2, 20), cache=IndexedCache()).logits

before = logits()
child = os.fork()
if child == 0:
    found = logits()
    os._exit(0 if torch.get_num_threads() == 1 and torch.allclose(found, before, atol=1e-4) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child"
assert torch.get_num_threads() == 2 and torch.equal(logits(), before)
"""


def test_a_call_in_a_new_thread_keeps_to_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Kernel:
        def __call__(self, *arguments: int) -> None:
            given.append(arguments[-1])

    class Library(ctypes.CDLL):
        one = Kernel()

        def __init__(self) -> None:
            pass

    found = Library()
    monkeypatch.setattr(load, "library", lambda _: found)
    load._kernel.cache_clear()
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            kernel = load.function("one", pointers=0)
            assert kernel is not None
            thread = threading.Thread(target=kernel)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
        load._kernel.cache_clear()
    assert given == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")
def test_a_process_that_is_forked_after_a_call_computes_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
