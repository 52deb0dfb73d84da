"""Laws of GPUs of every kind: a device computes the same results as the CPU.

They run on the CPU too, so that the laws themselves are tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.core import Cache
from clearhead.data.batches.base import Batch
from clearhead.fast.training.tree import training_tree
from clearhead.tasks.train import token_loss
from clearhead.training.pending import Pending
from clearhead.training.random_state import deterministic_algorithms
from clearhead.training.step import StepResult, TrainingSteps
from tests.apps.cli.tiny_run import PAIRS
from tests.laws.tiny import MODELS, difference, pad_rows, random_rows, tiny, token_batch

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


@pytest.mark.parametrize("name", NAMES)
def test_a_training_tree_computes_the_gradients_of_the_cpu(name: str, device: torch.device) -> None:
    """On a GPU its attention is fused: with trained biases, masks, grouped keys, and rows without a key."""
    module = tiny(name)
    arguments = inputs(module, torch.device("cpu"))
    real = arguments.get("target_mask", arguments["mask"])
    gradients = []
    for target in (torch.device("cpu"), device):
        module.to(target).zero_grad()
        tree = training_tree(module, "fp32") if gradients else module
        tree(**inputs_like(arguments, target)).hidden[real.to(target)].square().sum().backward()
        gradients.append([each.grad.cpu() for each in module.parameters() if each.grad is not None])
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(difference_to(*pair) <= 10 * NEAR * largest for pair in zip(*gradients, strict=True))


def difference_to(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference of two gradients."""
    return float((gradient - other).abs().max())


@pytest.mark.skipif(not AVAILABLE["cuda"], reason="needs a GPU: there is no cuda here")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_of_a_gpu_waits_for_nothing_and_stores_no_weights(name: str) -> None:
    """Only the kernels that never store the attention weights are allowed, and a host read is an error."""
    device = torch.device("cuda")
    module = tiny(name, head_size=16, dropout=0.1).to(device)
    tree, arguments = training_tree(module, "bf16"), inputs_like(inputs(module, torch.device("cpu")), device)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    try:
        for mode in ("default", "error"):  # tables are copied to the device in the first step
            torch.cuda.set_sync_debug_mode(mode)
            with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(kernels), deterministic_algorithms():
                tree(**arguments).hidden.square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(each.grad).all() for each in module.parameters() if each.grad is not None)


def test_the_loss_of_tokens_is_that_of_the_cpu_and_waits_for_nothing(name: str, device: torch.device) -> None:
    """The first step on a GPU may still wait: libraries allocate their memory in it."""
    module, batch = tiny(name), token_batch(name)
    expected = loss_and_gradients(module, batch)
    module, batch = module.to(device), batch.to(device)
    loss_and_gradients(module, batch)
    with forbid_waiting(device):
        actual = loss_and_gradients(module, batch)
    largest = max(float(gradient.abs().max()) for gradient in expected[1:])
    assert abs(float(actual[0]) / float(expected[0]) - 1.0) <= NEAR
    assert all(
        float((a.cpu() - b).abs().max()) <= 10 * NEAR * largest for a, b in zip(actual[1:], expected[1:], strict=True)
    )


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
    return [loss.detach(), *(weight.grad.clone() for weight in module.parameters() if weight.grad is not None)]


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
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            return take(training, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            steps.append(step)

    monkeypatch.setattr(TrainingSteps, "take", take_without_waiting)
    train_model(tmp_path, cuda, 6)
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("quick_trainings")
def test_late_reads_change_no_bit_on_a_gpu(tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    train_model(tmp_path / "late", cuda, 6)
    ready: Callable[..., Any] = Pending.ready
    monkeypatch.setattr(Pending, "ready", lambda self, *, waits: ready(self, waits=True))
    train_model(tmp_path / "at-once", cuda, 6)
    runs = [tmp_path / name for name in ("late", "at-once")]
    losses = [[(row.loss, row.valid_loss) for row in read_metrics(run / "metrics.jsonl")] for run in runs]
    states = [ch.load(run, device="cpu", precision="fp32").module.state_dict() for run in runs]
    assert losses[0] == losses[1] and all(torch.equal(value, states[1][key]) for key, value in states[0].items())
