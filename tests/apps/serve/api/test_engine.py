"""Engine of a model: prompts that arrive together, the events of a step, and scores."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from clearhead.apps.serve.api import served as served_module
from clearhead.apps.serve.api.engine import BatchEngine, EndEvent, EngineJob, Event, TokenEvent, events
from clearhead.apps.serve.api.served import Models, ServedModel
from clearhead.fast.replica import replica
from clearhead.generate import continuation, prefill
from clearhead.interpret.maps.token_texts import token_texts
from tests.generate.recording import Recording, record_steps

PROMPTS = ["a m", "u", "a m u e a", "e e", "m a"]


def block_engine(engine: BatchEngine) -> threading.Event:
    """Block the engine until the returned event is set, so that requests are read together."""
    released = threading.Event()
    engine.call("hold", lambda some: [released.wait(20) for _ in some], [None])
    while engine.num_waiting:
        time.sleep(0.001)
    return released


def make_job(served: ServedModel, prompt: str, deliver: Callable[[Event], None], count: int = 7) -> EngineJob:
    options = served.model.generate_options(max_new_tokens=count, temperature=0)
    job = EngineJob.of_request(served.engine, served.request(prompt, options))
    job.deliver = deliver
    return job


def together(engine: BatchEngine, jobs: Callable[[Callable[[Event], None]], list[EngineJob]]) -> list[Event]:
    """Submit jobs at once, and return their events in order."""
    delivered: list[Event] = []
    released = block_engine(engine)
    some = jobs(delivered.append)
    for job in some:
        engine.submit([job])
    released.set()
    for _ in range(2000):
        if sum(isinstance(event, EndEvent | Exception) for event in delivered) == len(some):
            break
        time.sleep(0.005)
    return delivered


def test_prompts_that_come_together_are_read_in_one_call(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    served = models.get("lm")
    alone = [served.model.generate(prompt, max_new_tokens=7, temperature=0)[0].text for prompt in PROMPTS]
    read = []
    plain = served.engine.tree.decoder.forward

    def count_reads(sequence: Any, *rest: Any) -> Any:
        read.append(sequence.ids.shape)
        return plain(sequence, *rest)

    monkeypatch.setattr(served.engine.tree.decoder, "forward", count_reads)
    delivered = together(served.engine, lambda deliver: [make_job(served, prompt, deliver) for prompt in PROMPTS])
    assert {event.continuation.text for event in delivered if isinstance(event, EndEvent)} == set(alone)
    assert read[0][0] == len(PROMPTS) and len(read) == 7


def test_translations_that_come_together_are_read_in_one_call(models: Models) -> None:
    served = models.get("mt")

    def jobs(deliver: Callable[[Event], None]) -> list[EngineJob]:
        jobs_of_texts = [
            EngineJob.of_request(served.engine, served.translation(text, {}, None, None)) for text in PROMPTS
        ]
        for job in jobs_of_texts:
            job.deliver = deliver
        return jobs_of_texts

    delivered = together(served.engine, jobs)
    texts = [served.tokenizer.decode(event.continuation.ids) for event in delivered if isinstance(event, EndEvent)]
    assert sorted(texts) == sorted(served.model.translate(PROMPTS))


def test_a_gpu_serves_from_slots_by_recorded_steps(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of each request are the same; requests that arrive later take free slots."""
    served, replays = models.get("lm"), []
    expected = [event_values(served.engine, served, number) for number in range(3)]
    monkeypatch.setattr(continuation, "SLOT_DEVICES", ("cpu",))
    record_steps(monkeypatch, least=2)
    replay = Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda recording: replays.append(1) or replay(recording))
    engine = BatchEngine(replica(served.model.module))
    try:
        assert [event_values(engine, served, number) for number in range(3)] == expected
    finally:
        engine.join()
    assert len(replays) > 10


def event_values(engine: BatchEngine, served: ServedModel, first: int) -> list[set[tuple[int, str, int]]]:
    """Return the text and token of each event of some prompts that are served together."""
    values: list[set[tuple[int, str, int]]] = [set() for _ in PROMPTS]

    def note(number: int, deliver: Callable[[Event], None], event: Event) -> None:
        if isinstance(event, TokenEvent):
            values[number].add((len(values[number]), event.text, event.token))
        deliver(event)

    def jobs(deliver: Callable[[Event], None]) -> list[EngineJob]:
        options = served.model.generate_options(max_new_tokens=9, temperature=0)
        some = [EngineJob.of_request(engine, served.request(prompt, options)) for prompt in PROMPTS[first:]]
        for number, job in enumerate(some):
            job.deliver = partial(note, number, deliver)
        return some

    together(engine, jobs)
    return values


def test_a_step_wakes_an_event_loop_once(models: Models) -> None:
    served, woken, received = models.get("lm"), [], []

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
            woken.append(callback)
            return super().call_soon_threadsafe(callback, *args, context=context)

    async def ask(prompt: str) -> None:
        async for _, event in events(served.engine, [make_job(served, prompt, print)]):
            received.append(event)

    async def ask_all() -> None:
        tasks = [asyncio.create_task(ask(prompt)) for prompt in PROMPTS]
        await asyncio.sleep(0)
        released.set()
        await asyncio.gather(*tasks)

    released = block_engine(served.engine)
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(ask_all())
    assert len(received) >= 7 * len(PROMPTS) and len(woken) <= 9


def test_many_texts_are_scored_in_bounded_batches(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    served = models.get("lm")
    prompts = [tuple(served.tokenizer.encode(prompt)) for prompt in PROMPTS]
    whole = served.score(prompts, 2)
    assert [scored.ids for scored in whole] == prompts
    sizes, states = [], served.model.tree.forward

    def count_scores(ids: Any, **options: Any) -> Any:
        sizes.append(ids.numel())
        return states(ids, **options)

    monkeypatch.setattr(served_module, "read_tokens", lambda module: 12)
    monkeypatch.setattr(served.model.tree, "forward", count_scores)
    again = served.score(prompts, 2)
    assert len(sizes) > 1 and max(sizes) <= 12
    for scored, other in zip(again, whole, strict=True):
        assert scored.ids == other.ids
        assert scored.log_probabilities[1:] == pytest.approx(other.log_probabilities[1:], abs=1e-5)


def test_echo_gives_the_offsets_and_scores_of_the_text(address: str, models: Models) -> None:
    served, text = models.get("lm"), "a m u e"
    body = {"model": "lm", "prompt": text, "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    choice = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]
    logprobs, ids = choice["logprobs"], served.prompt_ids(served.request(text, served.model.generate_options()))
    with torch.no_grad():
        expected = served.model.module(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert choice["text"].startswith(text) and logprobs["tokens"][: len(ids)] == token_texts(served.tokenizer, ids)
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:position])) for position in range(len(ids) + 3)]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    values = [float(expected[position, index]) for position, index in enumerate(ids[1:])]
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=1e-4)
    for position, top in enumerate(logprobs["top_logprobs"][1 : len(ids)]):
        best = expected[position].topk(2)
        # Tokens of one text have one entry.
        assert max(top.values()) == pytest.approx(float(best.values[0]), abs=1e-4)
        assert set(top) == set(token_texts(served.tokenizer, best.indices.tolist()))


def test_equal_beginnings_are_read_once(address: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "BLOCK_TOKENS", 8)
    served, system = models.get("lm"), "the cat sat on the mat and "
    apart = ServedModel("apart", served.model, shares_prefixes=False)
    body = {"model": "lm", "max_tokens": 5, "temperature": 0}

    def counts() -> tuple[int, int]:
        metrics = dict(line.rsplit(" ", 1) for line in httpx.get(f"{address}/metrics").text.splitlines())
        read, shared = (float(metrics[f'clearhead_{name}_tokens{{model="lm"}}']) for name in ("read", "shared"))
        return int(read), int(shared)

    def jobs_apart(prompt: str, deliver: Callable[[Event], None]) -> list[EngineJob]:
        return [make_job(apart, prompt, deliver, 5)]

    before, tokens = counts(), 0
    for prompt in ("a", "e m", "a", "u u"):
        answer = httpx.post(f"{address}/v1/completions", json={**body, "prompt": system + prompt}, timeout=60).json()
        events_apart = together(apart.engine, partial(jobs_apart, system + prompt))
        (ended,) = (event for event in events_apart if isinstance(event, EndEvent))
        assert answer["choices"][0]["text"] == ended.continuation.text
        tokens += answer["usage"]["prompt_tokens"]
    read, shared = (after - first for after, first in zip(counts(), before, strict=True))
    assert shared >= 3 * 8 and read + shared == tokens
    assert apart.engine.prefixes is None and apart.engine.num_shared == 0
    apart.engine.join()
    # Requests that look inside or edit use a separate run.
    edit = {"model": "lm", "inputs": system + "a", "edits": [{"address": "decoder.layers.0.after", "factor": 0.5}]}
    assert httpx.post(f"{address}/edit", json=edit, timeout=60).status_code == 200
    assert counts() == (before[0] + read, before[1] + shared)


def test_engines_of_all_models_take_turns_in_one_thread(models: Models) -> None:
    """Each computing thread has its own OpenMP threads, so two of them would exceed the processors."""
    threads = [
        served.engine.call("thread", lambda some: [threading.get_ident() for _ in some], [None]).result(20)[0]
        for served in models
    ]
    assert len(threads) > 1 and len({*threads}) == 1 and threads[0] != threading.get_ident()


def test_a_turn_that_fails_is_told_to_its_clients_alone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    served = models.get("lm")
    with monkeypatch.context() as broken:
        broken.setattr(served.engine, "_read", lambda some: 1 / 0)
        (failure,) = together(served.engine, lambda deliver: [make_job(served, "a", deliver)])
        assert isinstance(failure, Exception) and "ZeroDivisionError" in f"{failure}"
    delivered = together(served.engine, lambda deliver: [make_job(served, "a", deliver)])
    assert isinstance(delivered[-1], EndEvent)
