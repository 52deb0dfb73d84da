"""Callbacks of the event loop are short even for large requests, so that others are answered meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow
MOST_SECONDS = 0.05
LARGE = 7_000_000
NUMBERS = {f"{number:x}": 0 for number in range(500_000)}

REQUESTS: dict[str, tuple[str, Callable[[], Any], int]] = {
    "chat": (
        "/v1/chat/completions",
        lambda: {"model": "rope", "messages": [{"role": "user", "content": "a m " * (LARGE // 4)}]},
        400,
    ),
    "chat of a model with positions": (
        "/v1/chat/completions",
        lambda: {"model": "lm", "messages": [{"role": "user", "content": "a m " * (LARGE // 4)}]},
        400,
    ),
    "messages": (
        "/v1/chat/completions",
        lambda: {"model": "rope", "messages": [{"role": "user", "content": "a"}] * 150_000, "max_tokens": 1},
        400,
    ),
    "translations": (
        "/models/mt",
        lambda: {"inputs": ["a m u e " * 3500] * 200, "parameters": {"generate_parameters": {"max_length": 2}}},
        200,
    ),
    "completion": ("/v1/completions", lambda: {"model": "rope", "prompt": ["a m " * 250_000] * 7}, 400),
    "ids": ("/v1/completions", lambda: {"model": "rope", "prompt": [[5] * 100_000] * 10, "max_tokens": 1}, 0),
    "choices": (
        "/v1/completions",
        lambda: {"model": "lm", "prompt": ["a"] * 2048, "n": 64, "max_tokens": 0, "echo": True, "logprobs": 5},
        200,
    ),
    "unknown keys": ("/v1/completions", lambda: {"prompt": "a", **NUMBERS}, 400),
    "unknown parameters": ("/models/labels", lambda: {"inputs": "a", "parameters": NUMBERS}, 400),
    "wrong type": ("/v1/completions", lambda: {"model": "lm", "prompt": NUMBERS}, 400),
    "no json": ("/v1/completions", lambda: "[" + "1," * (LARGE // 2), 400),
    "embeddings": ("/v1/embeddings", lambda: {"model": "sent", "input": ["the cat sat"] * 2048}, 200),
    "labels": ("/models/labels", lambda: {"inputs": ["the cat sat"] * 2048}, 200),
    "tokenize": ("/tokenize", lambda: {"model": "rope", "text": "a m " * 240_000}, 200),
    "too long to tokenize": ("/tokenize", lambda: {"model": "lm", "text": "a m " * (LARGE // 4)}, 400),
    "detokenize": ("/detokenize", lambda: {"model": "lm", "tokens": [7] * 131_072}, 200),
    "inside": ("/attention", lambda: {"model": "lm", "text": NUMBERS}, 400),
}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, str]]]:
    """The processor time of each callback of every event loop, with its name.

    Garbage collection is not counted: it visits the objects of other tests in this process.
    """
    callbacks: list[tuple[float, str]] = []
    run = asyncio.Handle._run
    begun_at: dict[int, float] = {}
    collecting: defaultdict[int, float] = defaultdict(float)

    def collect(phase: str, _: dict[str, int]) -> None:
        thread = threading.get_ident()
        if phase == "start":
            begun_at[thread] = time.thread_time()
        else:
            collecting[thread] += time.thread_time() - begun_at.pop(thread, time.thread_time())

    def clock() -> float:
        return time.thread_time() - collecting[threading.get_ident()]

    def run_timed(self: asyncio.Handle) -> None:
        begun = clock()
        run(self)
        callbacks.append((clock() - begun, f"{self}"[:300]))

    monkeypatch.setattr(asyncio.Handle, "_run", run_timed)
    gc.callbacks.append(collect)
    yield callbacks
    gc.callbacks.remove(collect)


@pytest.mark.filterwarnings("ignore::clearhead.base.errors.LongTexts")
@pytest.mark.parametrize("name", REQUESTS)
def test_no_callback_computes_for_long(name: str, address: str, seconds: list[tuple[float, str]]) -> None:
    path, make, status = REQUESTS[name]
    body = make()
    content = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    seconds.clear()
    headers = {"content-type": "application/json"}
    if status:
        answer = httpx.post(f"{address}{path}", content=content, headers=headers, timeout=600)
        assert answer.status_code == status, answer.text[:300]
    else:  # its computation takes long: the client leaves
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}{path}", content=content, headers=headers, timeout=4)
    longest = max(seconds)
    assert longest[0] < MOST_SECONDS, longest
