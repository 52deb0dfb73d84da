"""Self-test of the kernels before their first use: each is compared with plain layers, in a separate process.

A wrong instruction ends that process, and a wrong result fails it; see `native/build.py`.

Legend: M rows, N outputs, K inputs, V vocabulary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.tensors import relative_error
from clearhead.core import Cache, Transformer, build
from clearhead.core.head import Projection
from clearhead.fast.cache import IndexedCache
from clearhead.fast.linear import float_linear, int4_linear, int8_linear, mixed_linear
from clearhead.fast.logits import draw_tokens, top_and_log_total
from clearhead.fast.native.load import open_library, use_only
from clearhead.fast.native.options import INFERENCE
from clearhead.fast.nibbles import quantize_groups, widen_groups
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT8, LARGEST, choose_int4, quantize, store
from clearhead.fast.training.linear import has_products
from clearhead.fast.training.loss import fast_cross_entropy
from clearhead.fast.training.muon import Update, update_matrices
from clearhead.fast.training.stream import dropout
from clearhead.fast.training.tree import training_tree

V: Final = 70
Comparison = tuple[str, float, float]
"""Name of the compared values, their relative error, and the largest error allowed."""
EXACT, IN_BF16, IN_INT8, IN_4_BITS = 1e-5, 0.02, 0.06, 0.2
_FACTORS: Final = 3.4445, -4.7750, 2.0315


def compare_kernels(kernels: str) -> Iterator[Comparison]:
    """Compare the kernels of a folder, through the modules that call them, with plain layers of random weights."""
    torch.manual_seed(1)
    if kernels == INFERENCE:
        yield from compare_products()
        yield from compare_nibble_products()
        yield from _compare_choices()
        for has_memory in (True, False):
            yield from _compare_stacks(has_memory)
    elif has_products():
        yield from _compare_training()
        yield from _compare_dropout()
        yield "Muon's update", _muon(), IN_BF16


def fault_of(kernels: str) -> str | None:
    """Return a sentence about the first difference, or None."""
    for subject, error, most in compare_kernels(kernels):
        if not error <= most:
            return f"on this machine the kernels compute {subject} wrong: error {error:.1g}, expected at most {most:g}"
    return None


@torch.inference_mode()
def compare_products() -> list[Comparison]:
    """Compare the kernels of linear layers with PyTorch in double precision, for few and for many rows."""
    comparisons = []
    for rows in (1, 2, 3, 40, 64):  # with many rows weights are packed, in fp32 from more rows on
        # Sizes that fill whole blocks, and sizes that fill none.
        for outputs, inputs in ((96, 128), (37, 101)):
            x_MK, weight_NK, bias_N = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
            half_MK, half_NK, half_N = x_MK.bfloat16(), weight_NK.bfloat16(), bias_N.bfloat16()
            fp16_NK = weight_NK.half()
            matrix_NK, scale_N = quantize(weight_NK)
            rounded_MK = _round_rows(x_MK)
            wide_NK = (matrix_NK * scale_N[:, None]).double()
            cases = {
                "layers in fp32": (float_linear(weight_NK, bias_N), x_MK, x_MK, weight_NK, bias_N, EXACT),
                "layers in bf16": (float_linear(half_NK, half_N), half_MK, half_MK, half_NK, half_N, IN_BF16),
                "layers of bf16 products": (mixed_linear(half_NK, bias_N), x_MK, half_MK, half_NK, bias_N, EXACT),
                "layers in fp16": (mixed_linear(fp16_NK, bias_N), x_MK, half_MK, fp16_NK.bfloat16(), bias_N, EXACT),
                "layers in 8 bits": (int8_linear(matrix_NK, scale_N, bias_N), x_MK, rounded_MK, wide_NK, bias_N, 1e-3),
            }
            for subject, (run, rows_MK, *exact, most) in cases.items():
                assert run is not None
                comparisons.append(
                    (subject, relative_error(run(rows_MK), F.linear(*(tensor.double() for tensor in exact))), most)
                )
    return comparisons


@torch.inference_mode()
def compare_nibble_products() -> Iterator[Comparison]:
    """Compare the kernels of 4-bit layers with PyTorch in double precision, for few and for many rows."""
    for rows in (1, 2, 3, 7, 9, 10, 40):  # many rows use packed weights
        # Sizes that fill whole panels and vectors, and sizes that fill none.
        for outputs, inputs in ((96, 128), (37, 96)):
            x_MK, weight_NK, bias_N = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
            stored = quantize_groups(weight_NK)
            yield "groups of weights in 4 bits", relative_error(widen_groups(*stored), weight_NK), IN_4_BITS
            exact = F.linear(_round_rows(x_MK).double(), widen_groups(*stored).double(), bias_N.double())
            yield "layers in 4 bits", relative_error(int4_linear(*stored, bias_N)(x_MK), exact), 1e-3


def _round_rows(x_MK: Tensor) -> Tensor:
    """Return rows rounded to 8 bits, as products with quantized weights read them."""
    largest_M1 = x_MK.abs().amax(1, True) / LARGEST
    return (x_MK / largest_M1).round() * largest_M1


def _compare_choices() -> Iterator[Comparison]:
    for dtype in (torch.float32, torch.bfloat16):
        x_MV = (torch.randn(4, 1000) * 3.0).to(dtype)
        exact_MV = x_MV.double()
        banned = exact_MV[0].topk(2).indices
        allowed_MV = exact_MV.index_fill(1, banned, -torch.inf)
        values, places, totals = top_and_log_total(x_MV, 3, banned)
        yield "the highest numbers", relative_error(values, allowed_MV.topk(3).values), EXACT
        yield "the indices of the highest numbers", relative_error(places, allowed_MV.topk(3).indices), 0.0
        yield "sums of exponentials", relative_error(totals, exact_MV.logsumexp(1)), EXACT
        shares_MV, chosen = (exact_MV / 2.0).softmax(1), torch.tensor([0, 17, 500, 999])
        # A random number in the middle of each token's share.
        middle_M = (shares_MV.cumsum(1) - shares_MV / 2.0).gather(1, chosen[:, None])[:, 0]
        none = torch.empty(0, dtype=torch.int64)
        drawn = draw_tokens(x_MV, middle_M, none, divisor=2.0, top_k=0, top_p=1.0, min_p=0.0)
        assert drawn is not None
        yield "drawn tokens", relative_error(drawn, chosen), 0.0


def _compare_stacks(has_memory: bool) -> Iterator[Comparison]:
    plain = build(_model(has_memory)).eval()
    transposed = copy.deepcopy(plain)
    for submodule in transposed.modules():
        if isinstance(submodule, nn.Linear):  # like GPT-2's files
            submodule.weight.data = submodule.weight.data.t().contiguous().t()
    cases = {
        "fp32": (plain, EXACT),
        "fp32 with transposed weights": (transposed, EXACT),
        "bf16 products": (plain, IN_BF16),
        "8 bits": (store(copy.deepcopy(plain), INT8), IN_INT8),
        "4 bits": (store(copy.deepcopy(plain), choose_int4(plain)), IN_INT8),
    }
    for kind, (module, most) in cases.items():
        runner = Runner(module, in_bf16=kind == "bf16 products")
        for rows in (1, 3):
            with torch.inference_mode():
                actual, expected = _decode(runner.tree(), IndexedCache(), rows), _decode(module, Cache(), rows)
            yield f"a stack in {kind}", relative_error(actual, expected), most


def _decode(module: Transformer, cache: Cache, rows: int) -> Tensor:
    """Return the logits of a prompt and of two tokens after it."""
    ids, lengths = torch.arange(rows * 24).view(rows, 24) % V, torch.arange(24, 0, -1)[:rows]
    mask = torch.arange(24) < lengths[:, None]
    memory = None if module.encoder is None else module.encode(ids, mask=mask).memory
    chunks = ids[:, :22], ids[:, 22:23], ids[:, 23:]
    memory_mask = None if memory is None else mask
    logits = [module.decode(piece, memory=memory, memory_mask=memory_mask, cache=cache).logits for piece in chunks]
    return torch.cat([chunk_logits for chunk_logits in logits if chunk_logits is not None], 1)


def _model(has_memory: bool) -> spec.Model:
    attention = spec.Attention(num_heads=2, num_kv_heads=2, head_size=32, position=spec.Rotary())
    causal = attention.model_copy(update={"mask": spec.Causal()})
    # A bias of keys moves all scores of a query equally, so its gradient would be only rounding.
    bias = spec.Biases(key=False)
    memory = spec.Attention(source="memory", num_heads=2, num_kv_heads=2, head_size=32, bias=bias)
    feed_forward = spec.FeedForward(size=128, activation="silu", gated=True, bias_in=False, bias_out=False)

    def stack(*functions: spec.Attention | spec.FeedForward) -> spec.Stack:
        steps = [spec.Step(branches=(spec.Branch(function=function, pre=spec.RMSNorm()),)) for function in functions]
        layers = (spec.Layer(steps=tuple(steps)),)
        embedding = spec.Embedding(table=spec.Table(rows=V))
        return spec.Stack(width=64, embedding=embedding, layers=layers, final_norm=spec.LayerNorm())

    decoder = stack(causal, *[memory] * has_memory, feed_forward)
    head = spec.Head(layers=(spec.Linear(size=V, bias=False),))
    return spec.Model(encoder=stack(attention, feed_forward) if has_memory else None, decoder=decoder, head=head)


def _compare_training() -> Iterator[Comparison]:
    model = build(_model(True)).train()
    expected, actual = _gradients(model, _plain_loss), _gradients(training_tree(model, "bf16"), _fast_loss)
    for name, gradient in actual.items():
        subject = "the loss of a training step" if not name else "gradients of a training step"
        yield subject, relative_error(gradient, expected[name]), 0.05


def _gradients(model: Transformer, loss_of: Callable[[Tensor, Projection, Tensor], Tensor]) -> dict[str, Tensor]:
    ids = torch.arange(3 * 40).view(3, 40) % V
    with torch.autocast("cpu", torch.bfloat16, loss_of is _fast_loss):
        hidden = model(ids, ids.flip(1)).hidden
        assert model.head is not None
        loss = loss_of(hidden.flatten(0, 1), model.head.projection(), ids.flatten())
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True)) | {"": loss.detach()}


def _plain_loss(states: Tensor, projection: Projection, labels: Tensor) -> Tensor:
    return F.cross_entropy(projection.outputs(states), labels, reduction="sum")


def _fast_loss(states: Tensor, projection: Projection, labels: Tensor) -> Tensor:
    return fast_cross_entropy(states, projection, labels, label_smoothing=0.0, plain=_plain_loss)


def _compare_dropout() -> Iterator[Comparison]:
    x, share = torch.randn(64, 1024), 0.75
    output = dropout(x, 1 - share)
    is_kept = output != 0.0
    yield "elements that dropout keeps", relative_error(output, torch.where(is_kept, x / share, 0.0)), EXACT
    yield "the share that dropout keeps", relative_error(is_kept.double().mean(), torch.tensor(share)), 0.05


def _muon() -> float:
    weight, momentum = torch.randn(64, 96), torch.randn(64, 96)
    gradient = weight.grad = torch.randn(64, 96)
    moved = momentum.lerp(gradient, 0.05)
    x = gradient.lerp(moved, 0.95)
    x = x / x.norm()
    for _ in range(2):
        gram = x @ x.T
        x = _FACTORS[0] * x + (_FACTORS[1] * gram + _FACTORS[2] * gram @ gram) @ x
    expected = torch.cat([weight * 0.9 - 0.5 * x, moved])
    update_matrices([weight], [momentum], [0.5], Update(_FACTORS, 2, 0.95, 0.9))
    return relative_error(torch.cat([weight, momentum]), expected)


def main(file: str, kernels: str) -> None:
    """Write a description of a library's fault to stdout, or nothing if the library may be used."""
    torch.set_num_threads(2)
    try:
        use_only(kernels, open_library(Path(file)))
        fault = fault_of(kernels)
    except OSError as error:
        fault = str(error)
    os.write(1, (fault or "").encode())
