"""Laws of GPUs of every kind: a device computes the same results as the CPU.

They run on the CPU too, so that the laws themselves are tested where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.core import Cache
from clearhead.fast.slots import graph
from clearhead.generate.continuation import GenerateRequest, RequestStarter
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.slots.batch import SlotBatch, SlotSize
from clearhead.generate.slots.beams import BeamBatch
from tests.apps.cli.tiny_run import PAIRS
from tests.generate.tiny import EOS, PAD, some_prompts, some_sources
from tests.laws.tiny import MODELS, difference, pad_rows, random_rows, tiny

AVAILABLE = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
NAMES = [name for name in MODELS if name.split("/")[2] in ("rotary", "buckets")]
NEAR = 2e-4
"""Sums in fp32 in another order, over two layers."""


@pytest.fixture(params=[*AVAILABLE])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return a device of each kind; skip the test if this machine has none."""
    if not AVAILABLE[request.param]:
        pytest.skip(f"needs a GPU: there is no {request.param} here")
    return torch.device(request.param)


def inputs(module: ch.Transformer, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a padded batch with the inputs of each stack."""
    ids, mask = pad_rows(random_rows(module.num_source_ids), "left", 11)
    batch = {"ids": ids, "mask": mask}
    if module.encoder is not None and module.decoder is not None:
        batch["target_ids"], batch["target_mask"] = pad_rows(random_rows(module.num_target_ids), "right", 11)
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    module = tiny(name)
    arguments = inputs(module, torch.device("cpu"))
    real = arguments.get("target_mask", arguments["mask"])
    expected = module(**arguments).hidden
    actual = module.to(device)(**inputs_like(arguments, device)).hidden
    assert actual.device.type == device.type and difference(actual.cpu(), expected, real) <= NEAR


def inputs_like(arguments: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in arguments.items()}


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("decoder/")])
def test_a_cache_changes_nothing(name: str, device: torch.device) -> None:
    module = tiny(name).to(device)
    ids, cache = torch.randint(module.num_target_ids, (3, 8), device=device), Cache()
    pieces = [module(piece, cache=cache).hidden for piece in ids.split([5, 1, 2], dim=1)]
    assert difference(torch.cat(pieces, dim=1).cpu(), module(ids).hidden.cpu()) <= NEAR


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    module = tiny(name)
    arguments = inputs(module, torch.device("cpu"))
    real = arguments.get("target_mask", arguments["mask"])
    gradients = []
    for target in (torch.device("cpu"), device):
        module.to(target).zero_grad()
        module(**inputs_like(arguments, target)).hidden[real.to(target)].square().sum().backward()
        gradients.append(
            {
                key: parameter.grad.cpu().clone()
                for key, parameter in module.named_parameters()
                if parameter.grad is not None
            }
        )
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    assert all(
        float((gradients[1][key] - gradient).abs().max()) <= 10 * NEAR * largest
        for key, gradient in gradients[0].items()
    )


def train_model(folder: Path, device: torch.device, steps: int) -> ch.TrainResult:
    tables = {
        "task": {"kind": "translate"},
        "data": {"valid": 0.1},
        "tokenizer": {"kind": "word"},
        "model": {"layers": 1, "width": 14, "heads": 2, "feedforward": 22, "dropout": 0.1},
        "train": {
            "run": str(folder),
            "steps": steps,
            "batch_tokens": 101,
            "validate_every": 3,
            "schedule": "constant",
            "device": device.type,
            "precision": "fp32",
        },
    }
    return ch.train(tables, data={"train": PAIRS})


@pytest.mark.usefixtures("quick_trainings")
def test_a_run_resumes_exactly_and_serves_every_device(tmp_path: Path, device: torch.device) -> None:
    """Dropout draws from the generator of the device, whose state a checkpoint holds."""
    whole = train_model(tmp_path / "whole", device, 6)
    train_model(tmp_path / "parts", device, 3)
    parts = ch.train(tmp_path / "parts" / "run.toml", overrides={"train.steps": 6}, resume=True)
    files = [tmp_path / name / "metrics.jsonl" for name in ("whole", "parts")]
    losses = [[row.loss for row in read_metrics(file)] for file in files]
    assert losses[0] == losses[1] and whole.step == parts.step == 6
    models = [ch.load(tmp_path / "whole", device=device_name, precision="fp32") for device_name in ("cpu", device.type)]
    states = [model.module.state_dict() for model in models]
    assert all(torch.equal(tensor, states[1][key].cpu()) for key, tensor in states[0].items())
    texts = ["a m u", "b n v"]
    assert models[0].translate(texts, beam_size=3) == models[1].translate(texts, beam_size=3)
    maps = [model.attention("a m u", "u a").weights("decoder.memory", layer=0, head=1) for model in models]
    assert abs(maps[0] - maps[1]).max() <= NEAR


def decode_in_slots(module: ch.Transformer, options: GenerateOptions) -> tuple[list[tuple], SlotBatch, int]:
    """Return ids and log-probabilities of rows that decode in slots, their batch and its number of replays."""
    device = next(module.parameters()).device
    sources = some_sources(5, longest=7) if module.encoder is not None else None
    request = GenerateRequest(some_prompts(5, longest=9), options, EOS, PAD, (PAD, EOS), sources)
    starter = RequestStarter(module, request, [options.max_new_tokens] * 5, with_text=False)
    batch = SlotBatch(module, SlotSize(8, 64, 32 if sources else 0))
    with torch.inference_mode():
        start = starter.start(range(5))
        rows = list(start.member.sequences)
        batch.join([start])
        for _ in range(4):
            batch.step()
        assert batch.slots is not None and batch.slots.cache.lengths_R.device == device
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                batch.step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        while batch.members:
            batch.step()
    return [(row.ids, row.log_probabilities) for row in rows], batch, batch.slots.graphs.num_replays


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("encoder/")])
def test_a_replayed_step_has_the_bits_of_an_eager_one(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU replays CUDA graphs, in which nothing waits for the device; other devices replay lists of operations."""
    module = tiny(name, max_positions=99).to(device)
    for options in (
        GenerateOptions(max_new_tokens=12, min_new_tokens=12),
        GenerateOptions(
            max_new_tokens=12, min_new_tokens=12, temperature=1.1, top_k=7, top_p=0.9, repetition_penalty=1.2, seed=3
        ),
    ):
        results = []
        for least in (2, 99):
            monkeypatch.setattr(graph, "LEAST_STEPS", least)
            results.append(decode_in_slots(module, options))
        assert results[0][0] == results[1][0]
        assert results[0][2] > 3 and results[1][2] == 0


def search_in_slots(module: ch.Transformer, options: SearchOptions, device: torch.device) -> tuple[list, int]:
    """Return the hypotheses of beam searches in slots, and the number of replays."""
    sources = some_sources(5, longest=7) if module.encoder is not None else None
    request = GenerateRequest([[1]] * 5, options, EOS, PAD, (PAD,), sources)
    starter, batch = RequestStarter(module, request, [12] * 5, with_text=False), BeamBatch(module, SlotSize(20, 64, 32))
    with torch.inference_mode():
        start = starter.start(range(5))
        sentences = list(start.member.sequences)
        batch.join([start])
        for _ in range(6):
            batch.step()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            batch.step()
            batch.step()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        while batch.members:
            batch.step()
    slots = batch._beam_slots
    assert slots is not None
    found = [[(each.ids, each.log_probability) for each in sentence.candidates] for sentence in sentences]
    return found, slots.graphs.num_replays


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("encoder-decoder/")])
def test_a_replayed_step_of_beams_has_the_bits_of_an_eager_one(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are gathered by parent inside the recorded step; nothing waits for the device."""
    module = tiny(name, max_positions=99).to(device)
    options, results = SearchOptions(beam_size=4, n_best=3, max_length=12, min_length=12, no_repeat_ngram_size=3), []
    for least in (2, 99):
        monkeypatch.setattr(graph, "LEAST_STEPS", least)
        results.append(search_in_slots(module, options, device))
    assert results[0][0] == results[1][0]
    assert results[0][1] > 3 and results[1][1] == 0


def test_joins_and_recordings_leave_no_memory_behind(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: only its allocator counts bytes")
    monkeypatch.setattr(graph, "LEAST_STEPS", 2)
    module = tiny("decoder/pre-grouped/rotary", max_positions=99).to(device)
    request = GenerateRequest([[1, 5, 6]], GenerateOptions(max_new_tokens=3), EOS, PAD, (PAD, EOS))
    starter, batch, used = RequestStarter(module, request, [3], with_text=False), SlotBatch(module, SlotSize(4, 64)), []
    with torch.inference_mode():
        for _ in range(1000):
            batch.join([starter.start([0])])
            while batch.members:
                batch.step()
            used.append(torch.cuda.memory_allocated(device))
    assert used[-1] == used[100]
