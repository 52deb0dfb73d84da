"""Recomputed attention equals the eager kernel: bit for bit for a layer, within 1e-6 for some heads or queries."""

from __future__ import annotations

import pytest
import torch

from clearhead import spec
from clearhead.core import Sequence, Transformer
from clearhead.interpret.maps.hook_points import capture
from clearhead.interpret.maps.recording import AttentionRecord, recording
from tests.laws.hf_parts import HF_PARTS, hf_part
from tests.laws.tiny import MODELS, difference, tiny, with_mask

SOURCE, TARGET = 13, 11
WINDOWED = {
    "window": lambda: with_mask(tiny("encoder/post/rotary").spec, spec.Window(before=3, after=2), "encoder"),
    "causal window": lambda: with_mask(tiny("decoder/post/alibi").spec, spec.Window(before=3, after=0), "decoder"),
}


def module_of(name: str) -> Transformer:
    if name in WINDOWED:
        return Transformer(WINDOWED[name]()).eval()
    return hf_part(name) if name in HF_PARTS else tiny(name)


def inputs(module: Transformer, rows: int = 1) -> tuple[Sequence, Sequence | None]:
    """Return the inputs of both stacks; with several rows, the last rows are padded."""
    mask = None if rows == 1 else torch.arange(SOURCE) < SOURCE - 2 * torch.arange(rows)[:, None]
    source = Sequence(torch.randint(module.num_source_ids, (rows, SOURCE)), mask)
    if module.encoder is None or module.decoder is None:
        return source, None
    return source, Sequence(torch.randint(module.num_target_ids, (rows, TARGET)))


@torch.no_grad()
def record_once(module: Transformer, source: Sequence, target: Sequence | None) -> list[AttentionRecord]:
    with recording(module) as records:
        module(source, target, head=False)
    return records


@torch.no_grad()
@pytest.mark.parametrize("name", [*HF_PARTS, *MODELS, *WINDOWED])
def test_weights_are_those_of_the_eager_kernel(name: str) -> None:
    module = module_of(name)
    for rows in (3, 1):
        source, target = inputs(module, rows)
        records = record_once(module, source, target)
        with capture(module, "**.weights") as seen:
            module(source, target, head=False)
        assert len(records) == sum(map(len, seen.values()))
        for record in records:
            (expected,) = [
                seen_record.tensor
                for seen_record in seen[f"{record.address}.weights"]
                if seen_record.depth == record.layer
            ]
            whole = record.weights()
            assert whole.dtype == torch.float32 and torch.equal(whole, expected)
            if record.layer or rows > 1:
                continue
            last = record.num_heads - 1
            for heads, queries in ((None, slice(2, 7)), ([last], slice(3, 4)), ([last, 0], slice(TARGET - 1, None))):
                expected_part = whole[:, :, queries] if heads is None else whole[:, heads, queries]
                assert difference(record.weights(heads, queries), expected_part) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize("name", ["decoder/post/rotary", "encoder/post/alibi", "encoder-decoder/pre-grouped/learned"])
def test_the_model_runs_with_the_fused_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording changes nothing of the run, and its weights are those of an eager run up to rounding."""
    module = module_of(name)
    source, target = inputs(module)
    with capture(module, "**.weights") as seen:
        module(source, target, head=False)
    monkeypatch.setattr("clearhead.core.kernels.attention.SHORT_ON_CPU", 0)
    calls: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "clearhead.core.kernels.attention.F.scaled_dot_product_attention",
        lambda *args, **options: calls.append(1) or kernel(*args, **options),
    )
    records = record_once(module, source, target)
    assert len(calls) == len(records) > 0
    for record in records:
        assert difference(record.weights(), seen.tensor(f"{record.address}.weights")) <= 1e-5


@torch.no_grad()
def test_a_record_keeps_no_copies_and_no_masks() -> None:
    module = module_of("window")
    source, target = inputs(module)
    with capture(module, ["**.queries", "**.keys", "**.values"]) as seen:
        records = record_once(module, source, target)
    for record in records:
        tensors = {"queries": record.query_BHTE, "keys": record.key_BKSE, "values": record.value_BKSE}
        for point, tensor in tensors.items():
            assert tensor.data_ptr() == seen.tensor(f"{record.address}.{point}").data_ptr()
        before = record.weights()
        assert record.context.shared == {}
        assert record.mask(slice(2, 5)).shape == (1, 1, 3, SOURCE)
        assert torch.equal(record.weights(), before)


def test_stacks_come_in_order_and_layers_by_depth() -> None:
    module = hf_part("shared layers with a memory")
    records = record_once(module, *inputs(module))
    places = [(record.stack, record.layer) for record in records]
    assert places == [
        *(("encoder.self", layer) for layer in range(len(module.encoder.order))),
        *(("decoder.self", layer) for layer in range(5)),
        *(("decoder.memory", layer) for layer in range(5)),
    ]
