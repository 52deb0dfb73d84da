"""Memory forecasts are exact: bytes of weights and of the KV cache, in each precision that a model can have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base import machine
from clearhead.base.errors import InputError, LackOfMemory
from clearhead.core import Transformer, build
from clearhead.fast.memory import FORMATS, cache_bytes, cache_dtype, forecast_memory, refuse_load
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT8, choose_int4, store
from clearhead.generate.prefill import prefill_prompts
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from tests import hf_models
from tests.laws.tiny import tiny

MODELS = ["encoder/post/learned", "decoder/pre-grouped/rotary", "encoder-decoder/post/learned"]
PRECISIONS = [choice.precision for choice in FORMATS if choice.precision != "int4"]
"""Precisions of the tiny models, whose rows are not multiples of 32."""


def convert_to(module: Transformer, precision: str) -> Transformer:
    convert = {
        "fp32": module.float,
        "bf16": module.bfloat16,
        "int8": lambda: store(module, INT8),
        "int4": lambda: store(module, choose_int4(module)),
    }
    return convert[precision]()


@pytest.mark.parametrize("name", MODELS)
def test_weights_take_the_bytes_of_the_forecast(name: str) -> None:
    spec = tiny(name).spec
    dtypes = dict.fromkeys(tiny(name).state_dict(), torch.float16)
    forecasts = forecast_memory(spec, dtypes)
    assert [forecast.precision for forecast in forecasts] == PRECISIONS
    for forecast in forecasts:
        module = convert_to(tiny(name), forecast.precision)
        weights = {id(weight): weight for weight in (*module.parameters(), *module.buffers())}
        assert sum(weight.nbytes for weight in weights.values()) == forecast.weight_bytes
        largest = max(weight.numel() for weight in weights.values())
        assert forecast.load_bytes == int(1.1 * forecast.weight_bytes) + 2 * 2 * largest


def test_weights_in_4_bits_take_the_bytes_of_the_forecast() -> None:
    sizes = Hyperparameters(family="decoder", layers=2, width=64, heads=2, feedforward=96)
    module = build(build_spec(sizes, source_vocab=29, target_vocab=29))
    forecasts = forecast_memory(module.spec)
    assert [forecast.precision for forecast in forecasts] == [choice.precision for choice in FORMATS]
    assert convert_to(module, "int4") is module
    weights = {id(weight): weight for weight in (*module.parameters(), *module.buffers())}
    assert sum(weight.nbytes for weight in weights.values()) == forecasts[-1].weight_bytes
    assert forecasts[-1].weight_bytes < 0.8 * forecasts[-2].weight_bytes


@pytest.mark.parametrize("name", MODELS[1:])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_kv_cache_takes_the_bytes_of_the_forecast(name: str, precision: str) -> None:
    tree = Runner(convert_to(tiny(name), precision)).tree()
    prompts = [[3, 5, 7, 11, 13], [2, 3, 5, 7, 11]]
    sources = [[1, 2, 3], [3, 2, 1]] if tree.encoder is not None else None
    with torch.inference_mode():
        cache = prefill_prompts(tree, prompts, sources, pad_id=0).cache
    cache.convert(cache_dtype(tree))  # The next step does the same for the keys of the encoder's tokens.
    buffers = [entry.buffer for table in (cache.self_attention, cache.scales) for entry in table.values()]
    used_bytes = sum(buffer[:, :, :, : cache.length].contiguous().nbytes for buffer in buffers if buffer is not None)
    target_token, source_token = cache_bytes(tree.spec, cache_dtype(tree))
    assert used_bytes == target_token * 2 * 5
    assert sum(key.nbytes + value.nbytes for key, value in cache.memory_attention.values()) == source_token * 2 * 3
    assert cache_dtype(tree) == next(choice.cache for choice in FORMATS if choice.precision == precision)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a million weights in bf16, whose rows are multiples of 32."""
    folder = hf_models.rotary_model(tmp_path_factory.mktemp("cache") / "model")
    config = transformers.LlamaConfig(
        vocab_size=600, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=61, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf_models.save(transformers.LlamaForCausalLM(config).bfloat16(), folder)
    return folder


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_the_cache_of_a_loaded_model_takes_the_bytes_that_inspect_prints(
    checkpoint: Path, kernels: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without kernels, a model in 8 or 4 bits computes in fp32, and so its cache is fp32."""
    monkeypatch.setenv("CLEARHEAD_KERNELS", kernels)
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    bytes_per_token = {entry["precision"]: entry["cache_bytes_per_target_token"] for entry in record["precisions"]}
    assert list(bytes_per_token) == [choice.precision for choice in FORMATS]
    for precision, expected in bytes_per_token.items():
        tree = ch.load(checkpoint, device="cpu", precision=precision).runner.tree()
        with torch.inference_mode():
            cache = prefill_prompts(tree, [[3, 5, 7, 11, 13], [2, 3, 5, 7, 11]], None, pad_id=0).cache
            tree.decode(torch.tensor([[1], [2]]), cache=cache)
        buffers = [entry.buffer for table in (cache.self_attention, cache.scales) for entry in table.values()]
        used = sum(buffer[:, :, :, :6].contiguous().nbytes for buffer in buffers if buffer is not None)
        assert used == 2 * 6 * expected == 2 * 6 * cache_bytes(tree.spec, cache_dtype(tree))[0], precision
        assert {entry.buffer.dtype for entry in cache.self_attention.values()} == {cache_dtype(tree)}


def test_a_load_that_does_not_fit_names_the_precisions_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(tiny("decoder/post/learned").spec, device="meta")
    dtypes = dict.fromkeys(module.state_dict(), torch.float32)
    peaks = {
        forecast.precision: forecast.load_bytes for forecast in forecast_memory(module.spec, dtypes, is_mapped=False)
    }
    assert sorted(peaks.values(), reverse=True) == list(peaks.values())
    free = 0

    def refuse(precision: str) -> None:
        monkeypatch.setattr(machine, "free_memory", lambda: free)
        plan = next(choice.form for choice in FORMATS if choice.precision == precision).plan(module, dtypes)
        refuse_load(module, plan, dtypes, "model", is_mapped=False)

    free = peaks["fp32"]
    refuse("fp32")
    free = peaks["bf16"]
    refuse("bf16")
    with pytest.raises(
        LackOfMemory, match=r"model: to load it needs about .* free: .*precision bf16 \(.*\) or int8 \("
    ):
        refuse("fp32")
    free = peaks["int8"] - 1
    with pytest.raises(LackOfMemory, match="no precision fits"):
        refuse("int8")


def test_a_prompt_whose_cache_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = hf_models.endless_model(tmp_path / "endless")
    model = ch.load(folder, device="cpu")
    monkeypatch.setattr("clearhead.generate.continuation.free_memory", lambda device: 10_000)
    monkeypatch.setattr(type(model.module.decoder), "forward", None)  # Nothing is read.
    with pytest.raises(InputError, match=r"the KV cache of prompt 2 \([0-9,]+ tokens\) needs about .*: shorten it"):
        model.generate(["a", "a b c " * 200], max_new_tokens=1)
    assert main(["generate", str(folder), "--prompt", "a b c " * 200]) == 2
    assert "shorten it" in capfd.readouterr().err


def test_an_allocation_that_fails_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for fail in (lambda ref: torch.empty(2**60), lambda ref: bytearray(2**62)):
        monkeypatch.setattr("clearhead.apps.cli.inspect.read_reference", fail)
        assert main(["inspect", "x"]) == 1
        message = capfd.readouterr().err
        assert message.startswith("clearhead: out of memory: use a precision of fewer bits")
        assert message.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a limit on the address space")
def test_a_limit_on_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    used = int(machine.psutil.Process().memory_info().vms)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + 12_000_000, -1))
    assert 10_000_000 < machine.free_memory() <= 12_000_000
