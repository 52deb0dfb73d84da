"""The choice of the kernels for training, for what different processors can do."""

from __future__ import annotations

import ctypes

import pytest
from torch import nn

from clearhead.core import build
from clearhead.core.attention import Attention
from clearhead.core.feedforward import FeedForward
from clearhead.fast.probe import processor
from clearhead.fast.training import tree as tree_module
from clearhead.fast.training.linear import has_products
from clearhead.fast.training.tree import FusedAttention, FusedFeedForward, FusedLinear, training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec


def test_where_no_kernel_multiplies_bf16_products_are_those_of_pytorch(
    kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(tree_module, "has_fast_bf16", lambda device: True)
    has_bf16 = "AVX2" not in request.node.name and "avx512_bf16" in processor().isa
    assert has_products() == has_bf16
    hparams = Hyperparameters(layers=1, width=32, heads=2, dropout=0.0)
    model = build(build_spec(hparams, source_vocab=11, target_vocab=11)).train()
    tree = training_tree(model, "bf16")
    used = [submodule for submodule in tree.modules() if isinstance(submodule, Attention | FeedForward | nn.Linear)]
    assert {isinstance(submodule, FusedAttention | FusedFeedForward | FusedLinear) for submodule in used} == {has_bf16}
