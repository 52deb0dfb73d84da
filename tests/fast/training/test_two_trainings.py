"""Two trainings in one process give bit by bit what each gives alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from clearhead.core import Transformer, build
from clearhead.data.batches.base import Batch
from clearhead.fast.training.tree import FusedAttention, FusedRMSNorm, training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.tasks.train import token_loss
from clearhead.training.optim.optimizers import build_optimizer, scale_gradients

STEPS = 5


def build_model(seed: int) -> Transformer:
    """A model of its own size; the generator of its weights is one for the whole process."""
    torch.manual_seed(seed)
    hparams = Hyperparameters(
        family="decoder", layers=2, width=32 * seed, heads=2, norm="rms", norm_place="pre", dropout=0.0, tie="none"
    )
    return build(build_spec(hparams, source_vocab=41, target_vocab=41))


def train(module: Transformer, seed: int, precision: str, turns: threading.Barrier | None = None) -> list[Tensor]:
    """Losses and weights of a few steps; at each step the other training waits for this one."""
    generator = torch.Generator().manual_seed(seed)
    tree = training_tree(module, precision)
    assert any(
        isinstance(submodule, FusedAttention if precision == "bf16" else FusedRMSNorm) for submodule in tree.modules()
    )
    rule = build_optimizer(tree, kind="muon", learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9)
    results = []
    for _ in range(STEPS):
        if turns is not None:
            turns.wait(60)
        ids = torch.randint(3, 41, (5, 67), generator=generator)
        batch = Batch(ids, None, ids.roll(-1, 1), ids.numel(), ids.numel(), np.arange(len(ids)))
        rule.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
            loss, labels = token_loss(tree, batch, label_smoothing=0.1)
        loss.backward()
        scale_gradients(list(tree.parameters()), 1.0 / labels, max_norm=1.0)
        rule.step()
        results.append(loss.detach())
    return [*results, *(weight.detach().clone() for weight in module.parameters())]


@pytest.mark.usefixtures("bf16_kernels")
@pytest.mark.parametrize("precisions", [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")])
def test_interleaved_steps_of_two_threads_change_no_bit(precisions: tuple[str, str]) -> None:
    alone = [train(build_model(seed), seed, precision) for seed, precision in enumerate(precisions, start=1)]
    turns, modules = threading.Barrier(2), [build_model(1), build_model(2)]
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(train, module, seed, precision, turns)
            for seed, (module, precision) in enumerate(zip(modules, precisions, strict=True), start=1)
        ]
        together = [future.result() for future in running]
    for expected, actual in zip(alone, together, strict=True):
        assert all(map(torch.equal, actual, expected))
