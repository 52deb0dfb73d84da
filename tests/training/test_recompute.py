"""Activation checkpointing: layers run twice, and the gradients are the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.core import build
from clearhead.fast.training.tree import training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec


def gradients(is_recomputed: bool) -> tuple[dict[str, Tensor], int]:
    """The gradients of one batch with dropout, and how often a layer ran."""
    torch.manual_seed(5)
    hparams = Hyperparameters(layers=2, width=14, heads=2, feedforward=19, dropout=0.3, attention_dropout=0.2)
    plain = build(build_spec(hparams, source_vocab=23, target_vocab=23))
    module = training_tree(plain, "fp32", recomputes_layers=is_recomputed)
    assert list(module.state_dict()) == list(plain.state_dict())
    runs: list[None] = []
    assert module.encoder is not None
    module.encoder.layers[0].get_submodule("steps.0").register_forward_hook(lambda *_: runs.append(None))
    ids = torch.arange(1, 23).view(2, 11)
    logits = module(ids, ids.flip(1)).logits
    assert logits is not None
    logits.square().mean().backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}, len(
        runs
    )


def test_recomputed_layers_have_the_same_gradients() -> None:
    plain, once = gradients(is_recomputed=False)
    again, twice = gradients(is_recomputed=True)
    assert (once, twice) == (1, 2)
    assert plain.keys() == again.keys() and all(torch.equal(value, again[name]) for name, value in plain.items())
