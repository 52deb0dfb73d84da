"""The eager and the fused kernel give the same outputs and gradients; bfloat16 stays close to float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import MultiHeadAttention, Transformer, build
from clearhead.core.kernels import attention
from tests.laws.tiny import MODELS, Reader, difference, hparams, pad_rows, random_rows, resolve_spec, tiny, with_mask

Results = tuple[Tensor, list[Tensor]]


def count_fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each call of the fused kernel."""
    calls: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def count_call(*arguments: object, **options: object) -> Tensor:
        calls.append(1)
        return kernel(*arguments, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", count_call)
    return calls


def both_kernels(
    module: Transformer, monkeypatch: pytest.MonkeyPatch, mask_side: str | None
) -> tuple[Results, Results]:
    torch.manual_seed(5)
    reader = Reader.of(module, 5)
    rows = random_rows(reader.vocab)
    ids, mask = pad_rows(rows, mask_side or "right", 13)
    real = mask if mask_side else torch.ones_like(mask)
    calls, results = count_fused(monkeypatch), []
    for short in (1000, 0):
        monkeypatch.setattr(attention, "SHORT_ON_CPU", short)
        before = len(calls)
        logits = reader(ids, mask if mask_side else None).logits
        assert (len(calls) > before) == (short == 0), "each answer must come from the kernel it is meant to test"
        module.zero_grad()
        logits[real].square().sum().backward()
        results.append((logits.detach()[real], [p.grad for p in module.parameters() if p.grad is not None]))
    return results[0], results[1]


@pytest.mark.parametrize("mask_side", [None, "left"])
@pytest.mark.parametrize("name", [name for name in MODELS if not name.endswith("buckets")])
def test_eager_is_fused(name: str, mask_side: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    (logits, gradients), (fused_logits, fused_gradients) = both_kernels(tiny(name), monkeypatch, mask_side)
    assert difference(fused_logits, logits) <= 1e-5
    assert len(gradients) == len(fused_gradients) > 10
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for left, right in zip(fused_gradients, gradients, strict=True):
        # A bias of the keys moves all scores of a query alike: its gradient is zero but for rounding.
        assert float((left - right).abs().max()) <= 1e-5 * max(float(right.abs().max()), 0.01 * largest)


def test_eager_is_fused_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel reads a bias of another dtype as if it had the dtype of the queries."""
    (logits, _), (fused_logits, _) = both_kernels(tiny("decoder/post/alibi").double(), monkeypatch, "left")
    assert difference(fused_logits, logits) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("buckets")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_eager_is_fused_where_the_bias_is_trained(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a gradient in the eager kernel only, so outputs alone can be compared."""
    reader = Reader.of(tiny(name), 5)
    ids, mask = pad_rows(random_rows(reader.vocab), side, 13)
    calls = count_fused(monkeypatch)
    monkeypatch.setattr(attention, "SHORT_ON_CPU", 1000)
    eager = reader(ids, mask).logits
    assert not calls
    monkeypatch.setattr(attention, "SHORT_ON_CPU", 0)
    assert difference(reader(ids, mask).logits, eager, mask) <= 1e-5
    assert calls


@pytest.mark.parametrize("kernel", ["eager", "fused"])
def test_a_trained_bias_gets_its_gradient_at_any_length(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SHORT_ON_CPU", 0 if kernel == "fused" else 1000)
    module = tiny("encoder/post/buckets")
    module(torch.randint(29, (2, 11))).logits.square().sum().backward()
    assert module.encoder.score_table.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "mask", [spec.Full(), spec.Causal(), spec.Window(before=2, after=0), spec.Window(before=0, after=3)]
)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_kernels_agree_for_every_mask(mask: object, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MultiHeadAttention(17, 6, head_size=5, num_kv_heads=kv_heads, mask=mask, position=spec.Rotary(size=4))
    x, allowed = torch.randn(3, 13, 17), torch.rand(3, 13, 13) > 0.3
    results = []
    for short in (1000, 0):
        monkeypatch.setattr(attention, "SHORT_ON_CPU", short)
        values = module(x, mask=allowed)
        results.append((values, torch.autograd.grad(values.square().sum(), [module.query.weight, module.value.weight])))
    (eager, gradients), (fused, fused_gradients) = results
    assert difference(fused, eager) <= 1e-5
    assert all(difference(left, right) <= 1e-5 for left, right in zip(fused_gradients, gradients, strict=True))


def test_returned_weights_are_those_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing them selects the eager kernel, with the same outputs; in training they are those before dropout."""
    monkeypatch.setattr(attention, "SHORT_ON_CPU", 0)
    module = MultiHeadAttention(14, 2, num_kv_heads=1, dropout=0.5).eval()
    x, memory = torch.randn(3, 5, 14), torch.randn(3, 11, 14)
    values, weights = module(x, memory, return_weights=True)
    assert weights.shape == (3, 2, 5, 11)
    assert difference(module(x, memory), values) <= 1e-5
    heads = weights @ module.value(memory)[:, None]
    assert difference(module.out(heads.transpose(1, 2).flatten(2)), values) <= 1e-5
    _, trained = module.train()(x, memory, return_weights=True)
    assert difference(trained, weights) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if "/post/" in name])
def test_bfloat16_is_close_to_float32(name: str, kernel: str) -> None:
    module = tiny(name)
    reader = Reader.of(module, 5)
    ids, mask = pad_rows(random_rows(reader.vocab), "left", 13)
    expected = reader(ids, mask).logits
    half = Reader(module.bfloat16(), None if reader.memory is None else reader.memory.bfloat16(), reader.memory_mask)
    actual = half(ids, mask).logits
    assert actual.dtype == torch.bfloat16
    assert 1e-5 < difference(actual, expected, mask) < 0.06


def test_window_of_a_whole_model_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_mask(resolve_spec(hparams("encoder/post/alibi")), spec.Window(before=2, after=1), "encoder")
    (logits, _), (fused, _) = both_kernels(build(model).eval(), monkeypatch, "left")
    assert difference(fused, logits) <= 1e-5
