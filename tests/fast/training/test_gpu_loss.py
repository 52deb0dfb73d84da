"""The loss of a GPU equals PyTorch's cross-entropy, wastes nothing on its padding, and never waits for the device.

Everything runs on a CPU, and on tensors of `meta`, which have no values that a host could read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.core.head import Projection
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.batches.base import Batch, find_label_rows
from clearhead.data.objectives.masking import MaskedLM
from clearhead.fast.replica import replica
from clearhead.fast.training import gpu_loss as loss_file
from clearhead.fast.training.compiled import compile_tree
from clearhead.fast.training.gpu_loss import ALIGNMENT, gpu_cross_entropy, softmax_gradient
from clearhead.generate.scoring.token_accuracy import score_batch
from clearhead.tasks.train import token_loss
from tests.conftest import ROOT
from tests.data.objectives.noisy import pieces, stream, tokenizer
from tests.laws.host_reads import refuse_host_reads
from tests.laws.tiny import tiny, token_batch

WIDTH, VOCABULARY = 7, 53
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected).abs().max() / expected.abs().max()).detach())


def leaves(rows: int, dtype: torch.dtype, *, has_bias: bool = True, size: float = 1.0) -> list[Tensor]:
    """Return states, a weight and perhaps a bias."""
    torch.manual_seed(rows)
    shapes = [(rows, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if has_bias else [])]
    return [(torch.randn(shape) * size).to(dtype).requires_grad_() for shape in shapes]


def some_labels(rows: int) -> Tensor:
    """Return labels of which every fifth is missing."""
    labels = torch.randint(VOCABULARY, (rows,))
    labels[::5] = NO_LABEL
    return labels


def projection_of(tensors: list[Tensor], scale: float = 1.0, cap: float | None = None) -> Projection:
    return Projection(tensors[1], tensors[2] if len(tensors) > 2 else None, scale, cap)


def with_gradients(loss: Tensor, inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return a loss, and its gradients times three."""
    return [loss.detach(), *torch.autograd.grad(3.0 * loss, list(inputs))]


@pytest.fixture(params=[1, 512 << 20], ids=["several chunks", "one chunk"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_file, "_CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("has_bias", "scale", "cap"), [(False, 1.0, None), (True, 0.25, None), (True, 1.0, 3.0)])
def test_values_are_those_of_pytorch(
    dtype: torch.dtype, smoothing: float, has_bias: bool, scale: float, cap: float | None
) -> None:
    inputs, labels = leaves(203, dtype, has_bias=has_bias), some_labels(203)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = projection_of(exact, scale, cap).outputs(exact[0])
    expected = with_gradients(F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing), exact)
    loss = gpu_cross_entropy(inputs[0], projection_of(inputs, scale, cap), labels, label_smoothing=smoothing)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    actual = with_gradients(loss, inputs)
    assert all(gradient.dtype == dtype for gradient in actual[1:])
    assert all(relative_error(*pair) <= ROUNDING[dtype] for pair in zip(actual, expected, strict=True))
    with torch.no_grad():
        alone = gpu_cross_entropy(inputs[0], projection_of(inputs, scale, cap), labels, label_smoothing=smoothing)
    assert torch.equal(alone, loss)


def test_large_logits_stay_finite() -> None:
    inputs, labels = leaves(67, torch.float32, size=300.0), some_labels(67)
    expected = F.cross_entropy(F.linear(*inputs), labels, reduction="sum")
    actual = with_gradients(gpu_cross_entropy(inputs[0], projection_of(inputs), labels), inputs)
    assert relative_error(actual[0], expected.double()) < 1e-5 and all(tensor.isfinite().all() for tensor in actual)


def test_under_autocast_products_are_rounded_and_gradients_have_the_dtype_of_the_weights() -> None:
    inputs, labels = leaves(131, torch.float32), some_labels(131)
    exact = with_gradients(gpu_cross_entropy(inputs[0], projection_of(inputs), labels), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = gpu_cross_entropy(inputs[0], projection_of(inputs), labels)
    rounded = with_gradients(loss, inputs)
    assert all(tensor.dtype == torch.float32 for tensor in rounded)
    assert all(0.0 < relative_error(a, b.double()) <= 2e-2 for a, b in zip(rounded, exact, strict=True))


def test_a_tied_weight_adds_up_both_gradients() -> None:
    inputs, labels = leaves(71, torch.float64), some_labels(71)
    ids = torch.randint(VOCABULARY, (71,))
    states = [F.embedding(ids, inputs[1]) + inputs[0] for _ in range(2)]
    actual = with_gradients(gpu_cross_entropy(states[0], projection_of(inputs), labels), inputs)
    expected = with_gradients(F.cross_entropy(F.linear(states[1], *inputs[1:]), labels, reduction="sum"), inputs)
    assert all(relative_error(*pair) < 1e-12 for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_columns_of_padding_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_bias: bool) -> None:
    """The logits get 64 columns in place of 53; the gradient of a bias may round differently."""
    inputs, labels = leaves(2 * ALIGNMENT, dtype, has_bias=has_bias), some_labels(2 * ALIGNMENT)
    strides: list[int] = []
    multiply = torch.mm

    def record(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        strides.extend(tensor.stride(0) for tensor in options.values())
        return multiply(left, right, **options)

    monkeypatch.setattr(torch, "mm", record)
    results = []
    for multiple in (ALIGNMENT, 1):
        monkeypatch.setattr(loss_file, "ALIGNMENT", multiple)
        loss = gpu_cross_entropy(inputs[0], projection_of(inputs), labels, label_smoothing=0.1)
        results.append(with_gradients(loss, inputs))
    assert strides == [64, VOCABULARY]
    padded, unpadded = results
    assert all(map(torch.equal, padded[:3], unpadded[:3]))
    assert all(
        relative_error(*pair) < 1e-6 for pair in zip(padded[3:], [x.double() for x in unpadded[3:]], strict=True)
    )


def test_rows_without_a_label_influence_nothing() -> None:
    inputs, labels = leaves(67, torch.float32), some_labels(67)
    expected = with_gradients(gpu_cross_entropy(inputs[0], projection_of(inputs), labels), inputs)
    poisoned = inputs[0].detach().clone()
    poisoned[labels == NO_LABEL] = torch.nan
    inputs[0] = poisoned.requires_grad_()
    actual = with_gradients(gpu_cross_entropy(inputs[0], projection_of(inputs), labels), inputs)
    assert all(map(torch.equal, actual, expected))
    assert not actual[1][labels == NO_LABEL].any()


@pytest.mark.parametrize("rows", [0, 5])
def test_a_batch_without_labels_has_no_loss(rows: int) -> None:
    inputs = leaves(rows, torch.float32)
    loss = gpu_cross_entropy(inputs[0], projection_of(inputs), torch.full((rows,), NO_LABEL), label_smoothing=0.1)
    assert not any(tensor.any() for tensor in with_gradients(loss, inputs))


def test_chunks_are_equal_and_hold_a_limited_number_of_bytes() -> None:
    """16,384 rows of GPT-2's logits, in bf16: 1.65 GB."""
    assert loss_file._chunk_rows(16_384, 50_304 * 2) == 4096
    for rows in (1, 63, 64, 65, 5_000, 100_003):
        size = loss_file._chunk_rows(rows, 50_304 * 2)
        assert size % 64 == 0 and size * 50_304 * 2 <= 512 << 20
        assert -(-rows // size) * size - rows < 64 * -(-rows // size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_loss_on_meta_reads_nothing(dtype: torch.dtype, cap: float | None) -> None:
    inputs = [tensor.detach().to("meta").requires_grad_() for tensor in leaves(203, dtype)]
    labels = some_labels(203).to("meta")
    with refuse_host_reads():
        loss = gpu_cross_entropy(inputs[0], projection_of(inputs, 0.5, cap), labels, label_smoothing=0.1)
        loss.backward()
    assert [tensor.grad.dtype for tensor in inputs if tensor.grad is not None] == [dtype] * 3


def masked_batch(share: float = 0.3) -> Batch:
    return MaskedLM(tokenizer("word"), share)(pieces("word", 7), stream(3))


def test_rows_of_labels_come_first_and_fill_a_multiple_of_64() -> None:
    for labels in (torch.randint(9, (13, 11)), torch.full((13, 11), NO_LABEL), masked_batch().labels):
        labels[0, ::2] = NO_LABEL
        rows, (labelled,) = find_label_rows(labels), np.nonzero(labels.flatten().numpy() != NO_LABEL)
        assert rows[: len(labelled)].tolist() == labelled.tolist() and len(rows.unique()) == len(rows)
        assert len(rows) == min(-(-len(labelled) // 64) * 64, labels.numel())


def test_a_masked_batch_knows_its_labelled_rows() -> None:
    batch = masked_batch()
    for some in (batch, batch.take_rows(slice(1, None, 3))):
        assert some.label_rows is not None and torch.equal(some.label_rows, find_label_rows(some.labels))
        assert int((some.labels.flatten()[some.label_rows] != NO_LABEL).sum()) == some.num_labels


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("has_rows", [False, True])
def test_a_step_on_meta_reads_nothing(family: str, has_rows: bool) -> None:
    model, batch = tiny(f"{family}/post/rotary", dropout=0.1).train().to("meta"), token_batch(f"{family}/")
    batch = batch if has_rows else replace(batch, label_rows=None)
    on_device = batch.to("meta")
    with refuse_host_reads():
        loss, labels = token_loss(model, on_device, label_smoothing=0.1)
        loss.backward()
    assert labels == batch.num_labels
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_head_of_a_compiled_tree_compiles_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def record(*arguments: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return softmax_gradient(*arguments)

    monkeypatch.setattr(loss_file, "_compile_softmax_gradient", lambda: record)
    model, batch = replica(tiny("decoder/post/rotary").to("meta"), is_training=True), token_batch("decoder/").to("meta")
    for is_compiled in (False, True):
        if is_compiled:
            compile_tree(model, full=None, by_layer=False, recomputes_layers=False)
            assert model.decoder is not None
            model.decoder.run.is_on = False  # the stack itself runs plain
        token_loss(model, batch, label_smoothing=0.0)[0].backward()
        with torch.no_grad():
            token_loss(model, batch, label_smoothing=0.0)
        assert len(calls) == is_compiled


def test_a_batch_of_a_validation_on_meta_reads_nothing() -> None:
    model, batch = tiny("encoder/post/rotary").to("meta"), token_batch("encoder/").to("meta")
    with refuse_host_reads(), torch.no_grad():
        loss, hits = score_batch(model, batch)
    assert loss.shape == hits.shape == ()


@pytest.mark.slow
def test_compiled_is_eager_with_one_graph_for_all_numbers_of_rows() -> None:
    """In a subprocess: the import hook of the tests and `torch.compile` do not mix."""
    quick = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_DEBUG_COMPILE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fast.training.gpu_loss_job"],
        cwd=ROOT, env=os.environ | quick, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert max(report["differences"]) <= 1e-5
    assert report["graphs"] == [1, 1, 1, 2, 2]
