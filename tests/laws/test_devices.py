"""Laws of GPUs of every kind: a device computes the same results as the CPU.

They run on the CPU too, so that the laws themselves are tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.core import Cache
from clearhead.data import feed
from clearhead.data.batches.base import Batch
from clearhead.fast.training.tree import training_tree
from clearhead.generate.continuation import GenerateRequest, RequestStarter
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.slots.batch import SlotBatch, SlotSize
from clearhead.generate.slots.beams import BeamBatch
from clearhead.tasks.train import token_loss
from clearhead.training.random_state import deterministic_algorithms
from clearhead.training.step import StepResult, TrainingSteps
from tests.apps.cli.tiny_run import PAIRS
from tests.data.test_feed import epochs
from tests.generate.recording import record_steps
from tests.generate.tiny import EOS, PAD, some_prompts, some_sources
from tests.laws.tiny import MODELS, difference, pad_rows, random_rows, tiny, token_batch
from tests.tasks.labelled_models import character_tokenizer
from tests.tasks.test_late_predictions import PREDICTIONS, close

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


@pytest.mark.parametrize("prepares", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_cpu(name: str, prepares: bool, device: torch.device) -> None:
    """A training tree on a GPU fuses attention: with trained biases, masks, grouped keys, and rows without a key."""
    module = tiny(name)
    arguments = inputs(module, torch.device("cpu"))
    real = arguments.get("target_mask", arguments["mask"])
    gradients = []
    for target in (torch.device("cpu"), device):
        module.to(target).zero_grad()
        tree = training_tree(module, "fp32") if prepares and gradients else module
        tree(**inputs_like(arguments, target)).hidden[real.to(target)].square().sum().backward()
        gradients.append({key: weight.grad.cpu().clone() for key, weight in weights(module)})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    assert_near([*gradients[1].values()], [*gradients[0].values()])


def weights(module: ch.Transformer) -> list[tuple[str, Any]]:
    """Return the parameters that have a gradient, with their names."""
    return [(key, parameter) for key, parameter in module.named_parameters() if parameter.grad is not None]


def assert_near(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare gradients up to the rounding of sums as large as the largest of them."""
    largest = max(float(gradient.abs().max()) for gradient in expected)
    pairs = zip(actual, expected, strict=True)
    assert all(float((gradient.cpu() - other).abs().max()) <= 10 * NEAR * largest for gradient, other in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_tokens_is_that_of_the_cpu_and_waits_for_nothing(name: str, device: torch.device) -> None:
    """The first step on a GPU may still wait: libraries allocate their memory in it."""
    module, batch = tiny(name), token_batch(name)
    expected = loss_and_gradients(module, batch)
    module, batch = module.to(device), batch.to(device)
    loss_and_gradients(module, batch)
    with forbid_waiting(device):
        actual = loss_and_gradients(module, batch)
    assert abs(float(actual[0]) / float(expected[0]) - 1.0) <= NEAR
    assert_near(actual[1:], expected[1:])


@contextlib.contextmanager
def forbid_waiting(device: torch.device) -> Iterator[None]:
    """Return a context manager in which an operation that makes the host wait for a CUDA device raises an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_and_gradients(module: ch.Transformer, batch: Batch) -> list[torch.Tensor]:
    module.zero_grad()
    loss, labels = token_loss(module, batch, label_smoothing=0.1)
    loss.backward()
    assert labels == batch.num_labels
    return [loss.detach(), *(weight.grad.clone() for _, weight in weights(module))]


@pytest.mark.skipif(not AVAILABLE["cuda"], reason="needs a GPU: there is no cuda here")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_of_a_gpu_waits_for_nothing_and_stores_no_weights(name: str) -> None:
    """Only the kernels that never store the attention weights are allowed, and a host read is an error."""
    device = torch.device("cuda")
    module = tiny(name, head_size=16, dropout=0.1).to(device)
    tree, arguments = training_tree(module, "bf16"), inputs_like(inputs(module, torch.device("cpu")), device)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for watch in (contextlib.nullcontext(), forbid_waiting(device)):  # the first step copies tables to the device
        with watch, torch.autocast("cuda", torch.bfloat16), sdpa_kernel(kernels), deterministic_algorithms():
            tree(**arguments).hidden.square().mean().backward()
    assert all(torch.isfinite(each.grad).all() for each in module.parameters() if each.grad is not None)


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


@pytest.fixture
def cuda() -> torch.device:
    """Return the CUDA device; skip the test if this machine has none."""
    if not AVAILABLE["cuda"]:
        pytest.skip("needs a GPU: there is no cuda here")
    return torch.device("cuda")


@pytest.mark.usefixtures("quick_trainings")
def test_a_training_step_never_waits_for_the_gpu(
    tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, steps = TrainingSteps.take, list[int]()

    def take_without_waiting(training: TrainingSteps[Any], step: int) -> list[StepResult]:
        # The first steps also make the kernels and the optimizer state.
        with forbid_waiting(cuda) if step > 2 else contextlib.nullcontext():
            steps.append(step)
            return take(training, step)

    monkeypatch.setattr(TrainingSteps, "take", take_without_waiting)
    train_model(tmp_path, cuda, 6)
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("quick_trainings")
def test_late_reads_change_no_bit_on_a_gpu(tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    train_model(tmp_path / "late", cuda, 6)
    results: Callable[..., Any] = TrainingSteps.results
    monkeypatch.setattr(TrainingSteps, "results", lambda self, *, waits: results(self, waits=True))
    train_model(tmp_path / "at-once", cuda, 6)
    runs = [tmp_path / name for name in ("late", "at-once")]
    losses = [[(row.loss, row.valid_loss) for row in read_metrics(run / "metrics.jsonl")] for run in runs]
    states = [ch.load(run, device="cpu", precision="fp32").module.state_dict() for run in runs]
    assert losses[0] == losses[1] and all(torch.equal(value, states[1][key]) for key, value in states[0].items())


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
        with forbid_waiting(device):
            for _ in range(4):
                batch.step()
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
            record_steps(monkeypatch, least, device.type)
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
        with forbid_waiting(device):
            batch.step()
            batch.step()
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
        record_steps(monkeypatch, least, device.type)
        results.append(search_in_slots(module, options, device))
    assert results[0][0] == results[1][0]
    assert results[0][1] > 3 and results[1][1] == 0


def test_joins_and_recordings_leave_no_memory_behind(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: only its allocator counts bytes")
    record_steps(monkeypatch, 2, device.type)
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


def test_batches_made_ahead_are_those_of_the_source(device: torch.device) -> None:
    plain, ahead = epochs(), feed.Prepared(epochs(), device)
    for _ in range(20):
        expected, actual = next(plain).tensors(), next(ahead).tensors()
        assert expected.keys() == actual.keys() and {tensor.device.type for tensor in actual.values()} == {device.type}
        assert all(torch.equal(actual[name].cpu(), tensor) for name, tensor in expected.items())
        assert ahead.state() == plain.state()
    ahead.close()


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_predictions_are_those_of_the_cpu_and_no_batch_waits(
    predict: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = feed._launch

    def forbid_waits(batches: Any, run: Any, copies: Any) -> Any:
        def run_without_waits(key: Any, batch: Any) -> Any:
            with forbid_waiting(device):
                return run(key, batch)

        return launch(batches, run_without_waits, copies)

    expected = predict(character_tokenizer(), lambda module: module)
    monkeypatch.setattr(feed, "_launch", forbid_waits)
    assert close(predict(character_tokenizer(), lambda module: copy.deepcopy(module).to(device)), expected, NEAR)
