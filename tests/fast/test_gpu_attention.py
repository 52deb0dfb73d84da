"""The attention of a training on a GPU: the results of the plain one, by kernels that need no weights in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import clearhead as ch
from clearhead.core import Transformer, build
from clearhead.core.attention import Attention
from clearhead.core.kernels import attention
from clearhead.core.kernels.attention import fused_attention
from clearhead.core.rare.score_bias import BiasedAttention
from clearhead.fast.replica import plain_type, replica
from clearhead.fast.training.gpu_attention import GPUAttention, fuse_attention
from clearhead.fast.training.tree import training_tree
from tests.laws.tiny import MODELS, difference, hparams, pad_rows, random_rows, resolve_spec

SHAPES = {
    "one query": (3, 6, 2, 1, 11, (3, 1, 1, 11)),
    "one query, heads apart": (3, 6, 2, 1, 11, (3, 6, 1, 11)),
    "equal masks": (3, 6, 2, 7, 11, (3, 1, 1, 11)),
    "equal masks, heads apart": (3, 6, 2, 7, 11, (3, 6, 1, 11)),
    "masks": (3, 6, 2, 7, 11, (1, 1, 7, 11)),
    "no mask": (3, 6, 2, 7, 11, None),
    "causal": (3, 6, 2, 7, 7, None),
}
Call = tuple[Tensor | None, bool]


def fused(module: Transformer) -> Transformer:
    """Return a replica in training mode whose attention is that of a GPU."""
    tree = replica(module, is_training=True)
    fuse_attention(tree)
    return tree


def batch(module: Transformer) -> dict[str, Tensor]:
    """Return a batch with padding on both sides."""
    torch.manual_seed(3)
    ids, mask = pad_rows(random_rows(module.num_source_ids), "left", 11)
    tensors = {"ids": ids, "mask": mask}
    if module.encoder is not None and module.decoder is not None:
        tensors["target_ids"], tensors["target_mask"] = pad_rows(random_rows(module.num_target_ids), "right", 11)
    return tensors


def gradients(module: Transformer) -> list[Tensor]:
    module.zero_grad()
    tensors = batch(module)
    module(**tensors).hidden[tensors.get("target_mask", tensors["mask"])].square().sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Return a list of the masks and of the shared heads in calls of PyTorch's kernel."""
    masks, original = list[Call](), F.scaled_dot_product_attention

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        masks.append((mask, query.shape[1] != key.shape[1]))
        return original(query, key, value, mask, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    return masks


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_model(name: str, calls: list[Call]) -> None:
    module = build(resolve_spec(hparams(name)))
    expected = gradients(module.train())
    calls.clear()
    actual = gradients(fused(module))
    assert len(calls) == sum(isinstance(each, Attention) for each in module.modules())
    largest = max(gradient.abs().max() for gradient in expected)
    assert len(actual) == len(expected) > 10
    assert all((a - e).abs().max() <= 1e-5 * largest for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_never_falls_to_the_math_kernel(name: str, calls: list[Call]) -> None:
    """A memory-efficient kernel takes masks with keys side by side, and no shared heads; it stores no weights."""
    module = build(resolve_spec(replace(hparams(name), dropout=0.1)), device="meta")
    tensors = {key: tensor.to("meta") for key, tensor in batch(module).items()}
    for tree in (training_tree(module, "bf16"), module.eval()):
        calls.clear()
        with torch.set_grad_enabled(tree is not module):
            tree(**tensors)
        assert len(calls) == sum(isinstance(each, Attention) for each in module.modules())
        assert all(mask is None or (mask.stride(-1) == 1 and not is_grouped) for mask, is_grouped in calls)


@pytest.mark.parametrize("case", SHAPES)
def test_heads_without_groups_are_grouped_heads(case: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    rows, heads, kv_heads, queries, keys, shape = SHAPES[case]
    query = torch.randn(rows, heads, queries, 5, requires_grad=True)
    key, value = (torch.randn(rows, kv_heads, keys, 5, requires_grad=True) for _ in range(2))
    # Every query may attend to the first key.
    mask = None if shape is None else (torch.randn(shape) > -0.5).index_fill(-1, torch.tensor(0), value=True)
    is_causal = case == "causal"
    expected = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=True)
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "device", torch.device("cuda"))  # only the choice of the inputs reads it
        actual = fused_attention(query, key, value, mask, scale=5**-0.5, is_causal=is_causal)
    assert calls and not any(is_grouped for _, is_grouped in calls)
    assert difference(actual, expected) <= 1e-6
    on_meta = [tensor.detach().to("meta") for tensor in (query, key, value)]
    allowed = None if mask is None else mask.to("meta")
    assert fused_attention(*on_meta, allowed, scale=1.0, is_causal=is_causal).shape == expected.shape


def test_dropout_keeps_the_mean_and_drops_weights() -> None:
    torch.manual_seed(4)
    query, key, value = (torch.randn(1, 1, 1, 8).expand(2000, 2, 3, 8) for _ in range(3))
    dropped = fused_attention(query, key, value, None, scale=1.0, dropout=0.25)
    shares = (dropped / value)[..., 0]  # each of three equal weights is 0 or 4/9
    assert torch.allclose(shares.mean(), torch.tensor(1.0), atol=0.02)
    assert torch.allclose(shares.var(), torch.tensor(1 / 9), atol=0.01)


def test_dropout_is_for_training_alone(calls: list[Call]) -> None:
    module = build(resolve_spec(replace(hparams("decoder/post/buckets"), dropout=0.5)))
    tree, tensors = fused(module), batch(module)
    assert not torch.equal(tree(**tensors).hidden, tree(**tensors).hidden)
    expected, real = module.eval()(**tensors).hidden, tensors["mask"]
    assert difference(tree.eval()(**tensors).hidden, expected, real) <= 1e-5


def test_weights_that_someone_sees_are_computed(calls: list[Call]) -> None:
    module = build(resolve_spec(hparams("decoder/post/rotary")))
    tree, tensors = fused(module), batch(module)
    with ch.capture(tree, "**.weights") as seen:
        tree(**tensors)
    assert len(seen) == 2 and not calls
    tree(**tensors)
    assert len(calls) == 2


def test_custom_steps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnWeights(BiasedAttention):
        def weights(self, *arguments: Any) -> Tensor:
            return super().weights(*arguments)

    module = build(resolve_spec(hparams("decoder/post/buckets")))
    first, second = (each for each in module.modules() if isinstance(each, Attention))
    first.__class__ = OwnWeights
    changed = [each for each in fused(module).modules() if isinstance(each, GPUAttention)]
    assert [plain_type(each) for each in changed] == [type(second)]


def test_the_kernel_asks_for_the_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are compared on a GPU would be guards of a compiled graph."""
    monkeypatch.setattr(attention, "SHORT_ON_CPU", None)
    tensor = torch.empty(1, 2, 3, 4, device="meta")
    assert not attention.eager_is_better(tensor, tensor, None)
    with pytest.raises(TypeError):
        attention.eager_is_better(torch.empty(1, 2, 3, 4), torch.empty(1, 2, 3, 4), None)
