"""Budgets by device: a GPU decodes and reads as many tokens together as its memory holds, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from clearhead.apps.serve.api.engine import BatchEngine
from clearhead.base import machine
from clearhead.core import Transformer, build
from clearhead.fast import memory
from clearhead.fast.memory import cache_bytes, cache_tokens
from clearhead.generate import batching, continuation
from clearhead.generate.batching import CPU_CACHE_TOKENS, read_tokens
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.results import Continuation
from clearhead.generate.running import RunningBatch
from tests.generate.tiny import BOS, EOS, PAD, some_prompts, some_sources, tiny_decoder, tiny_model

META = torch.device("meta")


def on_meta(module: Transformer) -> Transformer:
    """Return a model of the same kind on a device that is not a CPU."""
    return build(module.spec, device="meta").eval()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of rows of each decoding step."""
    rows, step = list[int](), RunningBatch.step
    monkeypatch.setattr(RunningBatch, "step", lambda batch: rows.append(batch.num_rows) or step(batch))
    return rows


@pytest.fixture
def use_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes requests take the budgets of a GPU, and read some tokens at a time."""

    def use(tokens: int) -> None:
        monkeypatch.setattr(continuation, "device_of", lambda module: META)
        monkeypatch.setattr(continuation, "read_tokens", lambda module: tokens)

    return use


def test_a_cpu_has_the_budgets_of_its_caches() -> None:
    module = tiny_decoder("modern", seed=1)
    assert (CPU_CACHE_TOKENS, read_tokens(module)) == (8192, 2048)


def test_a_gpu_has_half_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_meta(tiny_decoder("modern", seed=1))
    token, _ = cache_bytes(module.spec, torch.float32)
    outputs = sum(len(weight) for weight in module.decoder.layers[0].parameters() if weight.dim() == 2)
    monkeypatch.setattr(machine, "free_memory", lambda device: 2 * 1000 * memory.CACHE_ROOM * token)
    monkeypatch.setattr(batching, "free_memory", lambda device: 2 * 1000 * batching.LAYER_ACTIVATIONS * outputs)
    assert (cache_tokens(module), read_tokens(module)) == (1000, 1000)
    for name in (machine, batching):
        monkeypatch.setattr(name, "free_memory", lambda device: 2**50)
    assert (cache_tokens(module), read_tokens(module)) == (2**20, 65_536)
    monkeypatch.setattr(machine, "free_memory", lambda device: 0)
    assert cache_tokens(module) == 1


def test_a_large_budget_takes_one_step_for_each_token(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """256 prompts of 32 tokens with 200 new ones: a budget of 8,192 runs 35 of them at a time, in 1,592 steps."""
    monkeypatch.setattr(continuation, "CPU_CACHE_TOKENS", 2**20)
    module, prompts = tiny_decoder("modern", seed=1, positions=256), [[BOS, *[3 + n % 7] * 31] for n in range(256)]
    generate_ids(module, GenerateRequest(prompts, GenerateOptions(max_new_tokens=200), EOS, PAD, banned=(EOS,)))
    assert steps == [256] * 199


@pytest.mark.parametrize("tokens", [11, 40, 10_000])
def test_a_gpu_reads_some_prompts_at_a_time(
    monkeypatch: pytest.MonkeyPatch, use_gpu: Callable[[int], None], tokens: int
) -> None:
    module, prompts = tiny_decoder("modern", seed=1, end_bonus=1.0), some_prompts(7, longest=11)
    options = GenerateOptions(max_new_tokens=9, temperature=1.0, seed=3)
    request = GenerateRequest(prompts, options, EOS, PAD, banned=(PAD, BOS))
    expected = [result.ids for (result,) in generate_ids(module, request)]
    reads, prefill = list[int](), continuation.prefill_prompts

    def count_reads(module: Transformer, prompts: list[list[int]], *args: object, **kwargs: object) -> object:
        reads.append(len(prompts) * max(map(len, prompts)))
        return prefill(module, prompts, *args, **kwargs)

    monkeypatch.setattr(continuation, "prefill_prompts", count_reads)
    use_gpu(tokens)
    assert [result.ids for (result,) in generate_ids(module, request)] == expected
    assert all(count <= max(tokens, 12) for count in reads) and (len(reads) == 1) == (tokens == 10_000)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_gpu_translates_by_its_memory(
    monkeypatch: pytest.MonkeyPatch, use_gpu: Callable[[int], None], steps: list[int], beams: int
) -> None:
    module, sources = tiny_model("modern", seed=8, target_vocab=13, end_bonus=3.0), some_sources(9, longest=17)
    options = SearchOptions(beam_size=beams, max_length=13)
    request = GenerateRequest([[BOS]] * len(sources), options, EOS, PAD, banned=(PAD, BOS), sources=sources)

    def best() -> list[Continuation]:
        return [some[0] for some in generate_ids(module, request)]

    expected = [result.ids for result in best()]
    use_gpu(40)
    monkeypatch.setattr(continuation, "cache_tokens", lambda module: 3 * beams * (1 + 18 + 13))
    steps.clear()
    assert [result.ids for result in best()] == expected
    assert max(steps) <= 3 * beams
    monkeypatch.setattr(continuation, "GPU_ROWS", 2 * beams)
    monkeypatch.setattr(continuation, "cache_tokens", lambda module: 2**20)
    steps.clear()
    assert [result.ids for result in best()] == expected
    assert max(steps) <= 2 * beams


def test_an_engine_of_a_gpu_runs_256_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device=None: 2**50)
    module = tiny_decoder("modern", seed=1)
    limits = {"cpu": (64, 2**16), "meta": (256, 2**19)}
    for device, (rows, tokens) in limits.items():
        engine = BatchEngine(module if device == "cpu" else on_meta(module), shares_prefixes=False)
        try:
            assert engine._has_room(rows, tokens)
            assert not engine._has_room(rows + 1, tokens) and not engine._has_room(rows, tokens + 1)
        finally:
            engine.join()
