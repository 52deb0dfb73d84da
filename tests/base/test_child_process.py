"""Child processes answer in JSON, stay within their limits, and never answer a wrong request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clearhead.base.child_process import ChildProcess
from clearhead.base.errors import InputError

MODULE = """
import os, resource, time

def answer(request):
    if request == "loop":
        while True: pass
    if request == "sleep":
        time.sleep(1000)
    if request == "memory":
        return {"answer": len(bytearray(10**9))}
    if request == "seconds":
        return {"answer": resource.getrlimit(resource.RLIMIT_CPU)[0] - time.process_time()}
    if request == "crash":
        os.abort()
    print("printed")
    return {"fault": "is odd"} if request == "odd" else {"answer": request}
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    (tmp_path / "answering.py").write_text(MODULE)
    child = ChildProcess(tmp_path / "answering.py", ())
    yield child
    child._end()


def test_answers_are_json_and_one_process_gives_all(child: ChildProcess) -> None:
    values = [1, None, "größer \ud800", {"a": [1.5, "b" * 100_000]}]
    assert [child.ask(value, "the text", 20.0)["answer"] for value in values] == values
    process = child._process
    with pytest.raises(InputError, match=r"^the text is odd$"):
        child.ask("odd", "the text", 20.0)
    with pytest.raises(InputError, match="the text needs more than the 512 MB"):
        child.ask("memory", "the text", 20.0)
    assert child.ask("again", "the text", 20.0) == {"answer": "again"} and child._process is process


def test_a_child_without_a_parent_ends_by_itself(child: ChildProcess) -> None:
    for _ in range(2):
        assert 0 < child.ask("seconds", "the text", 20.0)["answer"] <= 60
    process = child._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
    child._process = None


def test_a_child_that_crashes_or_uses_its_time_up_is_replaced(child: ChildProcess) -> None:
    for request, sentence in (("crash", "needs more than"), ("loop", r"took more than 0\.2 seconds of processor time")):
        with pytest.raises(InputError, match=f"the text {sentence}"):
            child.ask(request, "the text", 0.2)
        assert child._process is None and child.ask(1, "the text", 20.0) == {"answer": 1}


@pytest.mark.parametrize("request_", ["loop", "sleep"])
def test_an_abandoned_request_ends_its_child(child: ChildProcess, request_: str) -> None:
    child.ask(1, "the text", 20.0)
    assert child._process is not None
    pid, abandoned = child._process.pid, threading.Event()
    threading.Timer(0.3, abandoned.set).start()
    with pytest.raises(InputError, match="was given up"):
        child.ask(request_, "the text", 10_000.0, abandoned.is_set)
    assert not psutil.pid_exists(pid) and child.ask(2, "the text", 20.0) == {"answer": 2}


def test_an_interrupt_leaves_no_answer_for_the_next_request(child: ChildProcess) -> None:
    child.ask(1, "the text", 20.0)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        child.ask("sleep", "the text", 20.0)
    assert child.ask("next", "the text", 20.0) == {"answer": "next"}
