"""Threads of a process share the processors, and a process forks between two calls."""

from __future__ import annotations

import os
import threading
import time

import pytest

from clearhead.fast.native.load import RECENT, Turns


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


def threads_of_call(turns: Turns, threads: int) -> int:
    with turns.shared(threads) as share:
        return share


@pytest.mark.parametrize(("threads", "share"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_two_callers_have_half_of_the_threads_each(threads: int, share: int) -> None:
    turns = Turns(Clock())
    shares = []
    with turns.shared(threads) as alone:
        in_thread(lambda: shares.append(threads_of_call(turns, threads)))
    assert (alone, shares) == (threads, [share])


def test_a_thread_between_two_calls_keeps_its_share_for_a_moment() -> None:
    turns = Turns(clock := Clock())
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
    assert threads_of_call(turns, 2) == 2, "its own last call is no other caller"
    may_end.set()
    other.join(timeout=10)


def test_a_thread_that_has_ended_leaves_its_share() -> None:
    turns = Turns(Clock())
    in_thread(lambda: threads_of_call(turns, 2))
    assert threads_of_call(turns, 2) == 2


def test_calls_alone_have_all_threads_one_after_the_other() -> None:
    turns = Turns(Clock())
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
    turns = Turns()
    begun: list[str] = []
    turns.stay_whole_in_forks(lambda: begun.append("child"))
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
    if child == 0:  # the copy has no other threads
        with turns.alone(2) as threads:
            os._exit(0 if (threads, begun, ended.is_set()) == (2, ["child"], True) else 1)
    caller.join(timeout=10)
    assert os.waitpid(child, 0)[1] == 0
    assert not begun
