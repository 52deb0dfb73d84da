"""Each planted mistake differs from PyTorch's own computation on the same weights; each correct part agrees."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.apps.check.planted import attention_correct, attention_masks, attention_wrong
from tests.apps.check.planted.entry import Planted

ATTENTION = [*attention_correct.CORRECT, *attention_wrong.WRONG, *attention_masks.WRONG]
WIDTH, HEADS, BATCH, TIME = 12, 3, 2, 5


def inverse(attend: Tensor, kind: str) -> Tensor | None:
    """The caller's mask of the kind that a part expects."""
    if kind in ("none", "causal"):
        return None
    if "attend" in kind:
        return attend
    if kind == "block":
        return ~attend
    if kind == "additive":
        return torch.zeros(attend.shape).masked_fill(~attend, float("-inf"))
    return attend.float() if kind == "float ones" else attend.long()


def reference(w: dict, q: Tensor, k: Tensor, v: Tensor, attend: Tensor | None) -> Tensor:
    """The computation of PyTorch on the weights of a part."""
    q, k, v = (F.linear(x, w[a], w.get(a + "b")) for a, x in zip("qkv", (q, k, v), strict=True))
    q, k, v = (x.unflatten(-1, (w["heads"], -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attend)
    return F.linear(out.transpose(1, 2).flatten(2), w["o"], w.get("ob"))


def run(entry: Planted, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, bool]:
    """Output of a part, of the reference, and whether the caller's mask was changed."""
    torch.manual_seed(3)
    candidate = entry.make(WIDTH, HEADS)
    heads = 1 if entry.shows == "long" else HEADS
    time = 2 * WIDTH if entry.shows == "long" else TIME
    cross = "q" in entry.inputs.split()
    x = torch.randn(BATCH, time, WIDTH)
    other = torch.randn(BATCH, time, WIDTH) if cross else x
    attend = torch.rand(BATCH, 1, time, time) > 0.4
    attend |= torch.eye(time, dtype=torch.bool)
    if entry.mask == "causal attend":
        attend = attend[:, :, :1] | (torch.arange(time) == 0)
    if entry.shows == "empty_row":
        attend[0, :, 1] = False
    mask = inverse(attend, entry.mask)
    allowed = None if entry.mask == "none" else attend
    if "causal" in entry.mask:
        causal = torch.ones(time, time, dtype=torch.bool).tril()
        allowed = causal if entry.mask == "causal" else causal & attend
    inputs = [x, other, other] if cross else [x.transpose(0, 1) if entry.time_first else x]
    if mask is not None:
        inputs.append(mask.clone())
    if entry.weights is None:
        raw = [torch.randn(WIDTH, WIDTH) * 0.4 for _ in range(4)]
        weights = {a: m.T for a, m in zip("qkvo", raw, strict=True)}
        out = candidate(x, *raw, heads)
    else:
        candidate = candidate.eval().to(dtype)
        inputs = [i.to(dtype) if i.is_floating_point() else i for i in inputs]
        with torch.no_grad():
            out = candidate(*inputs)
        weights = entry.weights(candidate)
    out = out[0] if isinstance(out, tuple) else out
    out = out.transpose(0, 1) if entry.time_first else out
    changed = mask is not None and not torch.equal(inputs[-1], mask.to(inputs[-1].dtype))
    wanted = reference({**weights, "heads": heads}, x.to(dtype), other.to(dtype), other.to(dtype), allowed)
    return out, wanted.detach(), changed


@pytest.mark.parametrize("entry", ATTENTION, ids=lambda e: e.name)
def test_attention(entry: Planted) -> None:
    out, wanted, changed = run(entry, torch.float16 if entry.shows == "half" else torch.float32)
    if entry.shows == "caller":
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        assert changed
    elif entry.shows == "half":
        assert out.dtype == torch.float32 and wanted.dtype == torch.float16
    elif entry.cause is None:
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert out.shape != wanted.shape or not torch.allclose(out, wanted, rtol=1e-3, atol=1e-3)
    if entry.shows == "empty_row":
        wanted, out = (torch.nan_to_num(y)[1] for y in (wanted, out))
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_names_and_sentences() -> None:
    assert len({e.name for e in ATTENTION}) == len(ATTENTION)
    for module in (attention_wrong, attention_masks):
        for _, planted in inspect.getmembers(module, inspect.isclass):
            if planted.__module__ == module.__name__ and planted.__name__ not in ("Linears",):
                assert planted.__doc__
