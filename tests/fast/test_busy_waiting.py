"""Threads wait busily only while no other program needs their processors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.fast import busy_waiting
from clearhead.fast.busy_waiting import FIRST_TRIAL, LOOKS_BEFORE_MESSAGE, SpinPolicy, Usage


class Threads:
    """Threads that note how they wait."""

    def __init__(self, count: int, *, can_sleep: bool = True) -> None:
        self.count, self.can_sleep, self.asleep = count, can_sleep, False

    def sleep(self) -> bool:
        self.asleep = self.can_sleep
        return self.can_sleep

    def spin(self) -> None:
        assert self.asleep
        self.asleep = False


@pytest.mark.parametrize(
    ("count", "others", "processors", "asleep"),
    [(2, 1.0, 2, True), (2, 0.1, 2, False), (1, 1.9, 2, False), (3, 1.0, 7, False), (7, 0.5, 7, True)],
)
def test_threads_sleep_while_others_need_their_processors(
    count: int, others: float, processors: int, asleep: bool
) -> None:
    threads = Threads(count)
    waiting = SpinPolicy(threads)
    waiting.look(others, processors)
    assert threads.asleep == asleep
    waiting.look(0.0, processors)
    assert not threads.asleep


def test_threads_that_sleep_try_less_and_less_often_whether_they_must() -> None:
    """A program of low priority takes what sleeping threads leave, and little from others."""
    threads = Threads(2)
    waiting, seen = SpinPolicy(threads), ""
    for _ in range(4 * FIRST_TRIAL):
        waiting.look(1.0, 2)
        seen += "s" if threads.asleep else "t"
    once, twice = FIRST_TRIAL * "s", 2 * FIRST_TRIAL * "s"
    assert seen.startswith(f"{once}t{twice}t")
    waiting.look(0.1, 2)
    waiting.look(1.0, 2)
    assert threads.asleep


@pytest.mark.parametrize(("can_sleep", "level"), [(True, logging.INFO), (False, logging.WARNING)])
def test_one_sentence_says_that_a_long_computation_waits(
    can_sleep: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="clearhead.fast.busy_waiting")
    waiting = SpinPolicy(Threads(2, can_sleep=can_sleep))
    for _ in range(LOOKS_BEFORE_MESSAGE - 1):
        waiting.look(1.0, 2)
    assert not caplog.records
    for _ in range(3 * LOOKS_BEFORE_MESSAGE):
        waiting.look(1.0, 2)
    (record,) = caplog.records
    assert record.levelno == level and "other programs use 1.0 of the 2 processors" in record.getMessage()
    assert ("OMP_WAIT_POLICY=passive" in record.getMessage()) != can_sleep


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what their programs use")
def test_what_others_use_is_counted_without_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    number = min(os.sched_getaffinity(0))
    statistics = tmp_path / "stat"
    monkeypatch.setattr(busy_waiting, "_STATISTICS", statistics)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {number})

    def make_usage(user: int, idle: int, stolen: int) -> Usage:
        row = f"{user * ticks} {3 * ticks} 0 {idle * ticks} 0 0 0 {stolen * ticks} 0 0"
        others = f"cpu{number + 1} {99 * user * ticks} 0 0 0 0 0 0 0 0 0"
        statistics.write_text(f"cpu  {row}\n{others}\ncpu{number} {row}\nintr 5 7\n", "ascii")
        return Usage.now()

    before, now = make_usage(10, 100, 0), make_usage(17, 200, 2)
    assert now.busy - before.busy == pytest.approx(9.0)
    assert Usage(20.0, 9.0, 5.0).others_since(Usage(10.0, 0.0, 0.0)) == pytest.approx(0.4)
    assert Usage(20.0, 9.0, 9.5).others_since(Usage(10.0, 0.0, 0.0)) == 0.0


def test_a_way_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(busy_waiting, "_start_watching", started.append)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    busy_waiting.adapt_waiting()
    assert not started
    monkeypatch.delenv("OMP_WAIT_POLICY")
    busy_waiting.adapt_waiting()
    assert started == ([os.getpid()] if sys.platform == "linux" else [])


WAITING = """
import ctypes, time
import torch
from clearhead.fast.busy_waiting import OpenMP, _libgomp

threads, library = OpenMP(), _libgomp()
nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)

def used() -> float:
    # The other thread of a team waits for the next work.
    before = time.process_time()
    for _ in range(20):
        library.GOMP_parallel(nothing, None, 2, 0)
        time.sleep(0.02)
    return time.process_time() - before

library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
used()
times = [used()]
for change in (threads.sleep, threads.spin):
    change()
    time.sleep(0.3)
    times.append(used())
print(*times)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other OpenMP libraries")
def test_threads_of_openmp_sleep_and_spin_in_one_process() -> None:
    """The processor time of a thread that waits, however busy the machine is."""
    if busy_waiting._libgomp() is None:
        pytest.skip("this PyTorch does not use GCC's OpenMP library")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    run = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    spinning, asleep, again = map(float, run.stdout.split())
    assert asleep < 0.5 * spinning and asleep < 0.5 * again
