"""Kernel calls of several threads, which share the processors, and kernel calls in forked processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from clearhead import presets
from clearhead.core import build
from clearhead.fast.cache import IndexedCache
from clearhead.fast.native import load
from clearhead.fast.native.load import RECENT, ThreadShares
from clearhead.fast.native.options import INFERENCE, TRAINING
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT8, store

FORKED = """
import os, torch
from clearhead import presets
from clearhead.core import build
from clearhead.fast.cache import IndexedCache
from clearhead.fast.stored import INT8, store
from clearhead.fast.runner import Runner
torch.set_num_threads(2)
torch.manual_seed(1)
runner = Runner(store(build(presets.llama_tiny(60, layers=2)).eval(), INT8))
assert {entry.backend for entry in runner.report()} == {"kernels"}

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


@pytest.mark.parametrize("kernels", [INFERENCE, TRAINING])
def test_a_call_in_a_new_thread_keeps_to_the_number_of_threads(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test needs only the library of these kernels, which may have to be compiled."""
    thread_counts: list[int] = []
    folders: list[str] = []

    class Kernel:
        def __call__(self, *arguments: int) -> None:
            thread_counts.append(arguments[-1])

    class Library(ctypes.CDLL):
        stub_kernel = Kernel()

        def __init__(self) -> None:
            pass

    stub = Library()

    def library(folder: str) -> Library:
        folders.append(folder)
        return stub

    monkeypatch.setattr(load, "library", library)
    # Threads left by other tests may still call kernels, and would take a share.
    monkeypatch.setattr(load, "_SHARES", ThreadShares())
    load._kernel.cache_clear()
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            kernel = load.function("stub_kernel", pointers=0, kernels=kernels)
            assert kernel is not None
            thread = threading.Thread(target=kernel)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
        load._kernel.cache_clear()
    assert thread_counts == [1, 2] and set(folders) == {kernels}


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")
@pytest.mark.parametrize("precision", ["bf16 products", "int8"])
@pytest.mark.parametrize("length", [130, 137, 260])
def test_a_prompt_beside_other_callers_has_the_bits_that_it_has_alone(
    precision: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    module = build(presets.llama_tiny(60, layers=2)).eval()
    runner = Runner(store(module, INT8) if precision == "int8" else module, in_bf16=precision != "int8")
    assert {served.backend for served in runner.report()} == {"kernels"}
    ids = torch.arange(length)[None] % 60
    before, outputs = torch.get_num_threads(), []
    torch.set_num_threads(8)
    try:
        for share in (8, 4, 3, 1):

            @contextmanager
            def yield_share(threads: int, share: int = share) -> Iterator[int]:
                assert threads == 8
                yield share

            monkeypatch.setattr(load._SHARES, "share", yield_share)
            load._kernel.cache_clear()
            with torch.inference_mode():
                outputs.append(runner.tree().decode(ids, cache=IndexedCache()).logits)
            runner = Runner(runner.module, in_bf16=precision != "int8")
    finally:
        torch.set_num_threads(before)
        load._kernel.cache_clear()
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are for Linux")
def test_a_process_that_is_forked_after_a_call_computes_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def in_thread(work: object) -> None:
    assert callable(work)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()


def threads_of_call(turns: ThreadShares, threads: int) -> int:
    with turns.share(threads) as share:
        return share


@pytest.mark.parametrize(("threads", "share"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_two_callers_have_half_of_the_threads_each(threads: int, share: int) -> None:
    turns = ThreadShares(Clock())
    shares = []
    with turns.share(threads) as alone:
        in_thread(lambda: shares.append(threads_of_call(turns, threads)))
    assert (alone, shares) == (threads, [share])


def test_a_thread_between_two_calls_keeps_its_share_for_a_moment() -> None:
    turns = ThreadShares(clock := Clock())
    has_called, may_end = threading.Event(), threading.Event()

    def call_and_go_on() -> None:
        threads_of_call(turns, 2)
        has_called.set()
        may_end.wait(timeout=10)

    other = threading.Thread(target=call_and_go_on)
    other.start()
    has_called.wait(timeout=10)
    assert threads_of_call(turns, 2) == 1
    clock.now += 2 * RECENT
    assert threads_of_call(turns, 2) == 2
    assert threads_of_call(turns, 2) == 2, "the last call of the same thread does not count as another caller"
    may_end.set()
    other.join(timeout=10)


def test_a_thread_that_has_ended_leaves_its_share() -> None:
    turns = ThreadShares(Clock())
    in_thread(lambda: threads_of_call(turns, 2))
    assert threads_of_call(turns, 2) == 2


def test_calls_alone_have_all_threads_one_after_the_other() -> None:
    turns = ThreadShares(Clock())
    events = []

    def call() -> None:
        with turns.alone(2) as threads:
            events.append(f"begins with {threads}")
            time.sleep(0.02)
            events.append("ends")

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=10)
    assert events == ["begins with 2", "ends"] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_forks_between_two_calls_and_its_child_calls() -> None:
    turns = ThreadShares()
    begun: list[str] = []
    turns.prepare_for_forks(lambda: begun.append("child"))
    is_inside, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        with turns.alone(2):
            is_inside.set()
            may_end.wait(timeout=10)
            ended.set()

    caller = threading.Thread(target=call)
    caller.start()
    is_inside.wait(timeout=10)
    threading.Timer(0.05, may_end.set).start()
    child = os.fork()
    if child == 0:  # The copy does not have the other threads.
        with turns.alone(2) as threads:
            os._exit(0 if (threads, begun, ended.is_set()) == (2, ["child"], True) else 1)
    caller.join(timeout=10)
    assert os.waitpid(child, 0)[1] == 0
    assert not begun
