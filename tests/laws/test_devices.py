"""The laws of a GPU, for every kind that there is: what a device computes is what the CPU computes.

They run on the CPU too, so that the laws themselves are tested where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.core import Cache
from tests.apps.cli.tiny_run import PAIRS
from tests.laws.tiny import MODELS, difference, padded, ragged, tiny

AVAILABLE = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
NAMES = [name for name in MODELS if name.split("/")[2] in ("rotary", "buckets")]
NEAR = 2e-4
"""Sums in fp32 in another order, over two layers."""


@pytest.fixture(params=[*AVAILABLE])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A kind of device, or a skip where this machine has none."""
    if not AVAILABLE[request.param]:
        pytest.skip(f"needs a GPU: there is no {request.param} here")
    return torch.device(request.param)


def inputs(module: ch.Transformer, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a padded batch of what each stack reads."""
    ids, mask = padded(ragged(module.num_source_ids), "left", 11)
    given = {"ids": ids, "mask": mask}
    if module.encoder is not None and module.decoder is not None:
        given["target_ids"], given["target_mask"] = padded(ragged(module.num_target_ids), "right", 11)
    return {name: tensor.to(device) for name, tensor in given.items()}


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_cpu(name: str, device: torch.device) -> None:
    module = tiny(name)
    given = inputs(module, torch.device("cpu"))
    real = given.get("target_mask", given["mask"])
    expected = module(**given).hidden
    found = module.to(device)(**inputs_like(given, device)).hidden
    assert found.device.type == device.type and difference(found.cpu(), expected, real) <= NEAR


def inputs_like(given: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in given.items()}


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
    given = inputs(module, torch.device("cpu"))
    real = given.get("target_mask", given["mask"])
    found = []
    for place in (torch.device("cpu"), device):
        module.to(place).zero_grad()
        module(**inputs_like(given, place)).hidden[real.to(place)].square().sum().backward()
        found.append({key: one.grad.cpu().clone() for key, one in module.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    largest = max(float(one.abs().max()) for one in found[0].values())
    assert all(float((found[1][key] - one).abs().max()) <= 10 * NEAR * largest for key, one in found[0].items())


def trained(folder: Path, device: torch.device, steps: int) -> ch.TrainResult:
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
    whole = trained(tmp_path / "whole", device, 6)
    trained(tmp_path / "parts", device, 3)
    parts = ch.train(tmp_path / "parts" / "run.toml", overrides={"train.steps": 6}, resume=True)
    files = [tmp_path / name / "metrics.jsonl" for name in ("whole", "parts")]
    losses = [[row.loss for row in read_metrics(file)] for file in files]
    assert losses[0] == losses[1] and whole.step == parts.step == 6
    models = [ch.load(tmp_path / "whole", device=place, precision="fp32") for place in ("cpu", device.type)]
    states = [model.module.state_dict() for model in models]
    assert all(torch.equal(tensor, states[1][key].cpu()) for key, tensor in states[0].items())
    texts = ["a m u", "b n v"]
    assert models[0].translate(texts, beam_size=3) == models[1].translate(texts, beam_size=3)
    maps = [model.attention("a m u", "u a").weights("decoder.memory", layer=0, head=1) for model in models]
    assert abs(maps[0] - maps[1]).max() <= NEAR
