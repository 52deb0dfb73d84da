"""The training tree has the loss and gradients of the module, which stays unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.hooks import watching
from clearhead.core import Transformer, build
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import RMSNorm, build_norm
from clearhead.core.stack import Layer
from clearhead.fast.training import tree as tree_module
from clearhead.fast.training.dropout import SeededDropout
from clearhead.fast.training.linear import has_products, linears
from clearhead.fast.training.stream import FusedStream
from clearhead.fast.training.tree import FusedAttention, FusedRMSNorm, training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec


@pytest.fixture(params=[("pre", "rotary"), ("post", "buckets")])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transformer:
    monkeypatch.setattr(tree_module, "has_fast_bf16", lambda device: True)
    torch.manual_seed(2)
    norm_position, positions = request.param
    hparams = Hyperparameters(
        layers=2, width=32, heads=2, norm="rms", dropout=0.0, tie="none", norm_place=norm_position, positions=positions
    )
    return build(build_spec(hparams, source_vocab=11, target_vocab=13)).train()


def gradients(model: Transformer, precision: str) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids, target_ids = (torch.randint(0, size, (3, 67), generator=generator) for size in (11, 13))
    mask = torch.arange(67) < torch.tensor([[67], [5], [40]])
    with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        logits = model(ids, target_ids, mask=mask).logits
        loss = logits.float().logsumexp(-1).square().sum()
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 0.02)])
def test_a_model_has_the_same_loss_and_the_same_gradients_up_to_rounding(
    model: Transformer, precision: str, bound: float
) -> None:
    plain_loss, theirs = gradients(model, precision)
    loss, ours = gradients(training_tree(model, precision), precision)
    assert float((loss - plain_loss).abs() / plain_loss) < bound
    assert any(not torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    first, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (ours, theirs))
    assert float((first - other).norm() / other.norm()) < bound


def test_the_plain_tree_is_not_changed_and_parts_are_fused_by_precision(model: Transformer) -> None:
    states = [(type(submodule), dict(vars(submodule))) for submodule in model.modules()]
    tree = training_tree(model, "bf16")
    gradients(tree, "bf16")
    fused = [isinstance(submodule, FusedAttention) for submodule in tree.modules() if isinstance(submodule, Attention)]
    assert set(fused) == {has_products()}
    assert all(has_products() == isinstance(stack, FusedStream) for stack in (tree.encoder, tree.decoder))
    assert all(isinstance(submodule, FusedRMSNorm) for submodule in tree.modules() if isinstance(submodule, RMSNorm))
    assert [(type(submodule), dict(vars(submodule))) for submodule in model.modules()] == states
    assert not any(isinstance(submodule, FusedAttention) for submodule in training_tree(model, "fp32").modules())


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_the_norm_is_that_of_the_plain_computation(size: float) -> None:
    torch.manual_seed(5)
    norm = build_norm(17, spec.RMSNorm(eps=1e-6))
    assert isinstance(norm, RMSNorm) and norm.weight is not None
    with torch.no_grad():
        norm.weight.normal_()
    x = (torch.randn(3, 5, 17) * size).requires_grad_()
    exact, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    gradient = torch.randn(3, 5, 17)
    actual = training_tree(norm, "fp32")(x)
    assert type(actual.grad_fn).__name__ == "_RMSNormBackward"
    ours = [actual, *torch.autograd.grad(actual, (x, norm.weight), gradient)]
    theirs = [expected, *torch.autograd.grad(expected, (exact, weight), gradient.double())]
    for first, other in zip(ours, theirs, strict=True):
        assert float(((first - other).abs().max() / other.abs().max()).detach()) < 1e-5


def test_watched_layers_are_computed_by_themselves(model: Transformer) -> None:
    seen = []
    feed_forwards = [submodule for submodule in model.modules() if isinstance(submodule, FeedForward)]
    for network in feed_forwards:
        network.up.register_forward_hook(lambda *_: seen.append(None))
    attentions = [submodule for submodule in model.modules() if isinstance(submodule, Attention)]
    for attention in attentions:
        attention.key.register_forward_hook(lambda *_: seen.append(None))
    layers = [submodule for submodule in model.modules() if isinstance(submodule, Layer)]
    tree = training_tree(model, "bf16")
    with watching({(layer.identity, "after"): [lambda x: seen.append(None) or x] for layer in layers}):
        gradients(tree, "bf16")
    assert len(seen) == len(feed_forwards) + len(attentions) + len(layers)


def test_keys_and_values_of_a_memory_are_projected_together(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[tuple[nn.Linear, ...]] = []

    def record_call(x: Tensor, layers: tuple[nn.Linear, ...]) -> tuple[Tensor, ...]:
        together.append(layers)
        return linears(x, layers)

    monkeypatch.setattr(tree_module, "linears", record_call)
    tree = training_tree(model, "bf16")
    gradients(tree, "bf16")
    memory_attentions = [submodule for submodule in tree.modules() if isinstance(submodule, MemoryAttention)]
    assert all(((submodule.key, submodule.value) in together) == has_products() for submodule in memory_attentions)


@pytest.mark.usefixtures("bf16_kernels")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_dropout_is_computed_by_the_kernel_from_the_seed(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hparams = Hyperparameters(
        layers=2, width=128, heads=4, kv_heads=kv_heads, dropout=0.0, attention_dropout=0.3, tie="none"
    )
    model = build(build_spec(hparams, source_vocab=11, target_vocab=13)).train()
    tree, rates, attend = training_tree(model, "bf16"), list[float](), tree_module.attention

    def count_call(*arguments: Any, dropout: SeededDropout, **named: Any) -> Tensor:
        rates.append(dropout.dropped / 2**32)
        return attend(*arguments, dropout=dropout, **named)

    monkeypatch.setattr(tree_module, "attention", count_call)

    def results(seed: int) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(seed)
        return gradients(tree, "bf16")

    (loss, first), (again, second), (other, _) = results(1), results(1), results(2)
    assert rates == pytest.approx([0.3] * 18)  # three attentions in each of two layers, in three passes
    assert torch.equal(loss, again) and all(map(torch.equal, first, second)) and not torch.equal(loss, other)
    tree.eval()
    gradients(tree, "bf16")
    assert rates[18:] == [0.0] * len(rates[18:])


def test_a_tree_on_a_cpu_keeps_the_memory_that_its_steps_free(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(tree_module, "keep_freed_memory", lambda: calls.append(None))
    training_tree(model, "fp32")
    assert len(calls) == 1
    monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
    training_tree(model, "fp32")
    assert len(calls) == 1


def test_a_gpu_rounds_the_input_of_several_layers_once(model: Transformer) -> None:
    """On meta, the tree of a GPU: in bf16 each branch reads a rounded input; in fp32 nothing is rounded."""
    model.to("meta")
    trees = [training_tree(model, precision) for precision in ("fp32", "bf16")]
    rounding = [[m for m in tree.modules() if isinstance(m, tree_module.RoundedOutput)] for tree in trees]
    assert not rounding[0] and len(rounding[1]) >= 10
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        dtypes = {module(torch.ones(3, 32, device="meta")).dtype for module in rounding[1]}
    finally:
        torch.set_autocast_enabled("cuda", before)
    assert dtypes == {torch.bfloat16}
