"""Long, many or abandoned requests leave room for others, and change no bit of their answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from clearhead.apps.serve import work
from clearhead.apps.serve.api import engine, server
from clearhead.apps.serve.api.engine import BatchEngine, EndEvent, EngineJob, events
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.generate import running
from tests.apps.serve.api.test_engine import block_engine

ENDLESS = {"model": "rope", "prompt": "a m", "max_tokens": 1_048_575, "temperature": 0, "stream": True}


def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if is_true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within a minute")


def is_idle(served: ServedModel) -> bool:
    return served.engine.num_running == served.engine.num_waiting == 0


def chat(address: str, number: int, count: int = 16) -> str:
    messages = [{"role": "user", "content": "a m u e "[: 1 + number % 8]}]
    body = {"model": "rope", "messages": messages, "max_tokens": count, "temperature": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_later_chats_end_while_an_endless_stream_runs(address: str, models: Models) -> None:
    alone = [chat(address, number) for number in range(20)]
    with httpx.stream("POST", f"{address}/v1/completions", json=ENDLESS, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            assert list(pool.map(lambda number: chat(address, number), range(20))) == alone
        assert models.get("rope").engine.num_running >= 1
        assert next(line for line in lines if line).startswith("data: {")
    wait_until(lambda: is_idle(models.get("rope")))


def job_of(served: ServedModel, prompt: str, count: int, rows: int = 1) -> EngineJob:
    options = {"max_new_tokens": count, "temperature": 1.0, "seed": 3, "num_return_sequences": rows}
    return EngineJob.of_request(served.engine, served.request(prompt, served.model.generate_options(**options)))


async def texts_of(served: ServedModel, jobs: list[EngineJob]) -> list[dict[int, str]]:
    texts: list[dict[int, str]] = [{} for _ in jobs]
    async for number, event in events(served.engine, jobs):
        if isinstance(event, EndEvent):
            texts[number][event.number] = str(event.continuation.text)
    return texts


@pytest.mark.parametrize("name", ["rope", "lm"])
def test_pauses_and_moves_to_another_cache_change_no_text(
    name: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = models.get(name)
    specs = [("a m", 50, 1), ("u", 45, 2), ("a m u e a", 40, 1), ("e", 30, 1), ("m a", 3, 1), ("e e", 50, 1)]
    alone = [asyncio.run(texts_of(served, [job_of(served, *job_spec)]))[0] for job_spec in specs]
    for module, limits in (
        (engine, {"RESERVED_TOKENS": 8, "MOST_TOKENS": 110, "MOST_PROMPT_TOKENS": 20}),
        (running, {"GROUP_TOKENS": 16, "CHECKED_TOKENS": 2}),
    ):
        for limit, value in limits.items():
            monkeypatch.setattr(module, limit, value)
    pauses, lanes = [], set()
    pause, step, share = running.RunningBatch.pause, running.RunningBatch.step, BatchEngine._share_growth

    def count_rows(self: running.RunningBatch, sequence: Any) -> Any:
        pauses.append(pause(self, sequence))
        return pauses[-1]

    def watch_step(self: running.RunningBatch) -> Any:
        lanes.update(self._groups)
        return step(self)

    def shared(self: BatchEngine) -> None:
        share(self)
        long = [job for job in self._present.values() if job.needs_growth and not job.paused]
        assert len(long) <= 1 or sum(job.cost for job in long) <= engine.MOST_TOKENS

    monkeypatch.setattr(running.RunningBatch, "pause", count_rows)
    monkeypatch.setattr(running.RunningBatch, "step", watch_step)
    monkeypatch.setattr(BatchEngine, "_share_growth", shared)
    released = block_engine(served.engine)
    threading.Timer(0.2, released.set).start()
    together = asyncio.run(texts_of(served, [job_of(served, *job_spec) for job_spec in specs]))
    assert together == alone
    assert any(pauses) and len(lanes) > 1
    assert not served.engine._present and is_idle(served)


def test_a_job_ends_at_the_tokens_that_one_may_hold(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_JOB_TOKENS", 30)
    monkeypatch.setattr(engine, "RESERVED_TOKENS", 10)
    served = models.get("rope")
    job = job_of(served, "a m", 1_048_575)
    assert job.limit == 30 - job.num_read
    assert job_of(served, "a m", 1_048_575, rows=3).limit == 10


def test_many_prompts_of_one_request_wait_inside_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_WAITING", 1)
    api = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    completion = api.completions.create(model="rope", prompt=["a m", "u"] * 1024, max_tokens=1, temperature=0)
    assert len({choice.text for choice in completion.choices[::2]}) == 1 and len(completion.choices) == 2048
    options = {"parameters": {"generate_parameters": {"max_length": 3}}}
    answer = httpx.post(f"{address}/models/mt", json={"inputs": ["a m u"] * 300, **options}, timeout=120)
    assert answer.status_code == 200 and len(answer.json()) == 300


def test_a_refused_request_leaves_nothing_behind(address: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MOST_WAITING", 2)
    served = models.get("mt")
    released = block_engine(served.engine)
    body = {"inputs": ["a m u"] * 300}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(httpx.post, f"{address}/models/mt", json=body, timeout=120) for _ in range(2)]
        wait_until(lambda: served.engine.num_waiting == 2)
        refused = httpx.post(f"{address}/models/mt", json=body, timeout=120)
        assert refused.status_code == 429 and served.engine.num_waiting == 2
        released.set()
        assert [request.result().status_code for request in waiting] == [200, 200]
    assert is_idle(served)


ABANDONED = {
    "translations": ("/models/mt", {"inputs": ["a m u e"] * 300}),
    "vectors": ("/v1/embeddings", {"model": "sent", "input": ["the cat sat on the mat " * 3] * 2048}),
    "labels": ("/models/labels", {"inputs": ["the cat sat"] * 2048}),
    "echo": (
        "/v1/completions",
        {"model": "lm", "prompt": ["a m u e"] * 2048, "max_tokens": 0, "echo": True, "logprobs": 1},
    ),
    "completions": ("/v1/completions", {**ENDLESS, "stream": False, "prompt": ["a m"] * 300}),
}


@pytest.mark.parametrize("name", ABANDONED)
def test_a_client_that_leaves_ends_what_runs_and_what_waits(
    name: str, address: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = ABANDONED[name]
    served = models.get(str(body.get("model") or path.rpartition("/")[2]))
    turns, turn = [], BatchEngine.turn

    def slow(self: BatchEngine) -> None:
        if self is served.engine:
            turns.append(self.num_running + self.num_waiting)
            time.sleep(0.05)
        turn(self)

    monkeypatch.setattr(BatchEngine, "turn", slow)
    monkeypatch.setattr(engine, "CHUNK_CHARACTERS", 100)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}{path}", json=body, timeout=httpx.Timeout(60, read=1.5))
    assert turns and turns[-1] > 0
    wait_until(lambda: is_idle(served))
    # It ended because the client had left, not because all was computed.
    assert len(turns) < 300


def test_a_stream_ends_with_an_error_after_the_same_seconds(
    address: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_ANSWER", 2.0)
    with httpx.stream("POST", f"{address}/v1/completions", json=ENDLESS, timeout=60) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert len(lines) > 1 and stream.status_code == 200
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert "no end of this stream within 2 seconds" in error["message"] and error["type"] == "server_error"
    wait_until(lambda: is_idle(models.get("rope")))


def test_what_looks_inside_for_too_long_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MOST_SECONDS", 0.0)
    edits = [{"address": "decoder.layers.0.after", "factor": 0.5}]
    for path, body in (("attention", {"text": "a m"}), ("edit", {"inputs": "a m", "edits": edits})):
        answer = httpx.post(f"{address}/{path}", json={"model": "rope", **body}, timeout=60)
        assert answer.status_code == 400 and "took more than 0 seconds" in answer.json()["error"]["message"]


def test_a_long_prompt_delays_no_short_one(models: Models) -> None:
    served = models.get("rope")
    options = served.model.generate_options(max_new_tokens=3, temperature=0)
    prompts: list[list[int]] = [[5] * 8000, [5, 6]]

    async def first_to_end() -> int:
        jobs = [EngineJob.of_request(served.engine, served.request(prompt, options)) for prompt in prompts]
        ended = [number async for number, event in events(served.engine, jobs) if isinstance(event, EndEvent)]
        return ended[0]

    assert asyncio.run(first_to_end()) == 1


def test_prompts_after_one_that_is_too_long_are_not_tokenized(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized, request = [], ServedModel.request

    def count_requests(self: ServedModel, prompt: Any, *rest: Any, **options: Any) -> Any:
        tokenized.append(prompt)
        return request(self, prompt, *rest, **options)

    monkeypatch.setattr(ServedModel, "request", count_requests)
    body = {"model": "lm", "prompt": ["a m", "a m u e " * 100, "a", "a"]}
    assert httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code == 400
    assert len(tokenized) == 2
