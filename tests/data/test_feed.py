"""Batches made ahead: the batches and positions of the plain source, its errors, and no thread left behind."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.base.progress import Display, message, use_display
from clearhead.data.batches.base import Batch, Batches, DeviceBatch
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.batches.text import causal_view
from clearhead.data.batches.text_stream import StreamedBatches, TextStream
from clearhead.data.feed import Ahead, DeviceCopies, Prepared
from clearhead.data.sources.texts import TextFiles, text_shards
from clearhead.text.tokenizer_training import train_tokenizer
from tests.data.batches.test_text import same
from tests.text.corpus import make_corpus

CPU = torch.device("cpu")


class Plan:
    """Epochs of changing lengths: 5, 6, 7, 5, ... batches."""

    def epoch(self, number: int) -> list[np.ndarray[Any, Any]]:
        return [np.array([number, index]) for index in range(5 + number % 3)]

    def num_sizes(self) -> int:
        return 1

    def has_one_length(self) -> bool:
        return True


def make_batch(rows: np.ndarray[Any, Any], epoch: int, index: int) -> Batch:
    ids = torch.from_numpy(rows)[None]
    return Batch(ids=ids, mask=None, labels=ids, num_labels=2, num_tokens=2, rows=rows)


def epochs() -> EpochBatches[Batch]:
    return EpochBatches(Plan(), make_batch, identity={"data": "x"})


@pytest.fixture(autouse=True)
def no_thread_stays() -> Any:
    # Threads of earlier tests may end meanwhile, so that their number says nothing.
    before = {*threading.enumerate()}
    yield
    assert {*threading.enumerate()} <= before


@pytest.fixture
def streamed(tmp_path: Path) -> Any:
    """Return a function that opens a text of several small pools."""
    lines = make_corpus(31)
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer("character", lines, vocab_size=97)

    def open_text() -> StreamedBatches:
        stream = TextStream(text_shards(TextFiles(tmp_path, "line")), tokenizer, 307, 5)
        return StreamedBatches(stream, lambda pool: causal_view(pool, block=31, batch_tokens=93, pack=True, seed=5))

    return open_text


def check_equal(plain: Batches[Batch], feed: Prepared[Batch], seed: int) -> None:
    """Take the same random walk through both: batches, positions, returns to earlier positions, and closing."""
    draw, states = random.Random(seed), [plain.state()]
    for _ in range(60):
        action = draw.random()
        if action < 0.1:
            state = draw.choice(states)
            plain.load_state(state)
            feed.load_state(state)
        elif action < 0.15:
            feed.close()
        else:
            assert same(next(plain), next(feed))
        assert feed.state() == plain.state()
        assert feed.batches_per_epoch == plain.batches_per_epoch
        states.append(plain.state())


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_batches_and_positions_are_those_of_the_plain_source(ahead: int) -> None:
    with contextlib.closing(Prepared(epochs(), CPU, ahead)) as feed:
        check_equal(epochs(), feed, seed=ahead)


def test_a_streamed_text_goes_back_across_its_pools(streamed: Any) -> None:
    with contextlib.closing(Prepared(streamed(), CPU, 2)) as feed:
        check_equal(streamed(), feed, seed=3)


def test_at_most_the_set_number_of_batches_is_made_before_it_is_taken() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    ahead = Ahead(make, 3)
    for taken in range(5):
        assert next(ahead) == taken
        deadline = time.monotonic() + 5
        while len(made) < taken + 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(made) == taken + 4
    ahead.close()
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)


def test_the_end_of_the_items_is_repeated() -> None:
    ahead = Ahead(iter([1, 2]).__next__)
    assert list(ahead) == [1, 2]
    assert list(ahead) == []
    ahead.close()


def test_a_failure_is_raised_after_the_batches_before_it_and_a_second_try_works() -> None:
    class Failing(EpochBatches[Batch]):
        fails = True

        def peek(self) -> Batch:
            if self.fails and self._position == 3:
                raise InputError("the file is gone")
            return super().peek()

    source = Failing(Plan(), make_batch, identity={})
    feed, plain = Prepared(source, CPU, 2), EpochBatches(Plan(), make_batch, identity={})
    for _ in range(3):
        assert same(next(feed), next(plain))
    for _ in range(2):
        with pytest.raises(InputError, match="the file is gone"):
            next(feed)
        assert feed.state() == plain.state()
    assert not any(thread.name == "clearhead feed" for thread in threading.enumerate())
    source.fails = False
    assert same(next(feed), next(plain))
    feed.close()


def test_a_refused_position_leaves_the_feed_where_it_was() -> None:
    feed, plain = Prepared(epochs(), CPU, 2), epochs()
    assert same(next(feed), next(plain))
    with pytest.raises(InputError, match="training data has changed"):
        feed.load_state({**feed.state(), "data": "other"})
    assert same(next(feed), next(plain))
    feed.close()


def test_no_thread_stays_when_the_feed_is_dropped() -> None:
    feed = Prepared(epochs(), CPU, 2)
    next(feed)
    assert any(thread.name == "clearhead feed" for thread in threading.enumerate())
    del feed
    gc.collect()


def test_a_signal_that_interrupts_the_wait_ends_the_thread_and_skips_no_batch() -> None:
    class Slow(EpochBatches[Batch]):
        def peek(self) -> Batch:
            time.sleep(0.3)
            return super().peek()

    feed = Prepared(Slow(Plan(), make_batch, identity={"data": "x"}), CPU, 2)
    timer = threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(feed)
    assert not any(thread.name == "clearhead feed" for thread in threading.enumerate())
    timer.join()
    assert same(next(feed), next(epochs()))
    feed.close()


SCRIPT = """
import time, torch
from clearhead.data.feed import Ahead, Prepared
from tests.data.test_feed import epochs
feed = Prepared(epochs(), torch.device("cpu"), 2)
next(feed)
kept = [feed, Ahead(lambda: time.sleep(0.01))]
raise ValueError("unexpected")
"""


def test_a_program_ends_though_nobody_closed_its_feeds() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "ValueError: unexpected" in done.stderr


def test_messages_of_the_thread_reach_the_display_of_the_caller() -> None:
    seen: list[str] = []

    class Recorded(Display):
        def message(self, text: str) -> None:
            seen.append(text)

    def make() -> int:
        message("a text is too long")
        return 0

    with use_display(Recorded()), contextlib.closing(Ahead(make, 1)) as ahead:
        next(ahead)
    assert "a text is too long" in seen


def test_all_tensors_move_to_the_device() -> None:
    feed = Prepared(epochs(), torch.device("meta"), 2)
    batch = next(feed)
    feed.close()
    assert {tensor.device.type for tensor in batch.tensors().values()} == {"meta"}
    assert isinstance(batch.rows, np.ndarray)
    assert set(batch.tensors()) <= {field.name for field in fields(Batch)}


def test_a_batch_of_another_kind_is_passed_on() -> None:
    assert DeviceCopies(torch.device("meta")).send("words") == ("words", None)


def test_a_gpu_copies_pinned_memory_on_a_separate_stream_and_only_the_device_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Event(torch.cuda.Event):
        def __new__(cls) -> Any:
            return super().__new__(cls) if torch.cuda.is_available() else object.__new__(cls)

        def __init__(self) -> None:
            calls.append("event")

        def __repr__(self) -> str:
            return "event"

    class Stream:
        def __init__(self, device: object) -> None:
            self.name = str(device)

        def record_event(self) -> Event:
            return Event()

        def wait_event(self, event: object) -> None:
            calls.append(("wait", self.name, event))

    @contextlib.contextmanager
    def use(stream: Stream) -> Any:
        calls.append("enter")
        yield
        calls.append("exit")

    def move(self: Any, device: object, *, non_blocking: bool = False) -> Any:
        calls.append(("copy", non_blocking))
        return self

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(DeviceBatch, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(DeviceBatch, "to", move)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: calls.append(("used by", stream.name)))
    copies = DeviceCopies(torch.device("cuda", 0))
    batch, event = copies.send(next(epochs()))
    assert calls == ["enter", "pin", ("copy", True), "event", "exit"]
    calls.clear()
    copies.receive(batch, event)
    assert calls == [("wait", "current", event), *[("used by", "current")] * 2]


def test_the_position_is_a_mapping_that_json_can_hold(streamed: Any) -> None:
    feed = Prepared(streamed(), CPU, 2)
    next(feed)
    assert isinstance(feed.state(), Mapping)
    assert isinstance(feed, Batches)
    feed.close()
