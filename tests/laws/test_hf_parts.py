"""Parts of Hugging Face checkpoints obey the same laws as the presets: padding, cache, kernels and gradients."""

from __future__ import annotations

import pytest
import torch

from clearhead.core import Attention, Cache, Sequence, Transformer, build
from clearhead.core.kernels import attention
from tests.laws.hf_parts import DEPENDS_ON_LENGTH, HF_PARTS, LENGTH, hf_part
from tests.laws.tiny import Reader, difference, pad_rows, random_rows

LENGTHS = (5, 11, 3, 1, 8)
DECODERS = [name for name in HF_PARTS if HF_PARTS[name]().decoder is not None]


def only_eager(module: Transformer) -> bool:
    parts = [child.spec for child in module.modules() if isinstance(child, Attention)]
    return any(node.sink or node.soft_cap is not None for node in parts)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", HF_PARTS)
def test_rows_of_a_padded_batch_are_the_rows_alone(name: str, side: str) -> None:
    reader = Reader.of(hf_part(name), 5)
    rows = random_rows(reader.vocab, LENGTHS)
    ids, mask = pad_rows(rows, side, 13, filler=3)
    actual = reader(ids, mask)
    for index, row in enumerate(rows):
        alone = reader.row(index)(row[None])
        assert difference(actual.logits[index, mask[index]], alone.logits[0]) <= 1e-5
        assert difference(actual.hidden[index, mask[index]], alone.hidden[0]) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in HF_PARTS if "memory" not in name])
def test_packed_documents_are_the_documents_alone(name: str) -> None:
    reader = Reader.of(hf_part(name), 1)
    rows = random_rows(reader.vocab, LENGTHS)
    documents = torch.cat([torch.full((len(row),), index) for index, row in enumerate(rows)])[None]
    actual = reader(torch.cat(rows)[None], documents=documents).logits[0]
    for piece, row in zip(actual.split([len(row) for row in rows]), rows, strict=True):
        assert difference(piece, reader(row[None]).logits[0]) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_changes_nothing(name: str, side: str | None) -> None:
    """RoPE scaling that depends on the length needs total_length in the call and in the cache."""
    module = hf_part(name)
    reader = Reader.of(module, 5)
    ids, mask = pad_rows(random_rows(reader.vocab, LENGTHS), side or "right", 11)
    real = mask if side else torch.ones_like(mask)
    # Rows on both sides of the length up to which such a rotation is plain.
    declared = torch.tensor([7, 13, 6, 5, 11]) if side else 13
    if name in DEPENDS_ON_LENGTH:
        expected = module(Sequence(ids, mask if side else None, total_length=declared)).logits
    else:
        expected = reader(ids, mask if side else None).logits
    cache, pieces = Cache(total_length=declared), []
    for start, end in [(0, 3), (3, 4), (4, 9), (9, 10), (10, 11)]:
        pieces.append(reader(ids[:, start:end], real[:, start:end] if side else None, cache=cache).logits)
    assert difference(torch.cat(pieces, dim=1), expected, real) <= 1e-5


@pytest.mark.parametrize("name", HF_PARTS)
def test_the_fused_kernel_is_the_eager_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that only the eager kernel can compute runs there at any length."""
    module = hf_part(name)
    reader = Reader.of(module, 5)
    ids, mask = pad_rows(random_rows(reader.vocab, LENGTHS), "left", 13)
    calls: list[int] = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda *args, **options: calls.append(1) or kernel(*args, **options),
    )
    results = []
    for short in (1000, 0):
        monkeypatch.setattr(attention, "SHORT_ON_CPU", short)
        with torch.no_grad():
            results.append(reader(ids, mask).logits)
        assert bool(calls) == (short == 0 and not only_eager(module))
    assert difference(results[1], results[0], mask) <= 1e-5


@pytest.mark.parametrize("name", HF_PARTS)
def test_every_weight_gets_a_gradient(name: str) -> None:
    """The loss has no terms that cancel. A key's bias shifts all scores of a query equally, so its gradient is zero."""
    module = hf_part(name).train()
    reader = Reader.of(module, 5)
    ids, mask = pad_rows(random_rows(reader.vocab, LENGTHS), "right", 13)
    logits = reader(ids, mask).logits[mask]
    (logits * torch.randn_like(logits)).sum().backward()
    assert logits.isfinite().all()
    for path, parameter in module.named_parameters():
        if path.startswith("encoder.") and reader.memory is not None:
            continue  # the memory of a reader is made without gradients
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        if not path.endswith(("key.bias", "key_norm.bias")):
            assert parameter.grad.abs().max() > 0, path


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of a norm's weights under autocast, which kernels may say once
@pytest.mark.parametrize("precision", ["weights", "autocast"])
@pytest.mark.parametrize("name", HF_PARTS)
def test_bfloat16_is_close(name: str, precision: str) -> None:
    """The mean is compared: a token whose best experts are almost equal may change its experts."""
    module = hf_part(name)
    reader = Reader.of(module, 3)
    ids, mask = pad_rows(random_rows(reader.vocab, (7, 13, 3)), "left", 13)
    expected = reader(ids, mask).logits[mask]
    if precision == "weights":
        memory = None if reader.memory is None else reader.memory.bfloat16()
        actual = Reader(module.bfloat16(), memory, reader.memory_mask)(ids, mask).logits[mask]
    else:
        with torch.autocast("cpu", torch.bfloat16):
            actual = reader(ids, mask).logits[mask]
    assert actual.dtype in (torch.bfloat16, torch.float32) and actual.isfinite().all()
    assert (actual.float() - expected).abs().mean() <= 0.1 * expected.abs().mean()


@pytest.mark.parametrize("name", HF_PARTS)
def test_weights_survive_the_state_dict_and_the_meta_device(name: str) -> None:
    module = hf_part(name)
    empty = build(module.spec, device="meta")
    state = module.state_dict()
    assert {key: value.shape for key, value in empty.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert set(state) == {path for path, _ in module.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(DEPENDS_ON_LENGTH))
def test_a_cache_past_the_original_length_must_know_the_length(name: str) -> None:
    module = hf_part(name)
    ids = torch.randint(module.num_source_ids, (2, LENGTH + 1))
    cache = Cache()
    short = module(ids[:, :LENGTH], cache=cache).logits
    assert difference(short, module(ids[:, :LENGTH]).logits) <= 1e-5
    with pytest.raises(ValueError, match=f"of 8 tokens is longer than the {LENGTH}.*total_length"):
        module(ids[:, LENGTH:], cache=cache)
    with pytest.raises(ValueError, match="of 8 tokens is longer than its total length"):
        module(ids, cache=Cache(total_length=7))
    with pytest.raises(ValueError, match="of 8 tokens is longer than its total length"):
        module(Sequence(ids, total_length=torch.tensor([9, 7])))
    with pytest.raises(ValueError, match="belongs to the cache"):
        module(Sequence(ids, total_length=9), cache=Cache())
    assert difference(module(Sequence(ids, total_length=8)).logits, module(ids).logits) <= 1e-6
    assert difference(module(Sequence(ids, total_length=23)).logits, module(ids).logits) > 1e-3 or name.endswith("rope")


@torch.no_grad()
def test_selected_rows_keep_their_total_length() -> None:
    module = hf_part("rotation dynamic")
    ids, declared = torch.randint(module.num_source_ids, (3, 11)), torch.tensor([11, 17, 23])
    expected = module(Sequence(ids, total_length=declared)).logits
    cache, rows = Cache(total_length=declared), torch.tensor([2, 0, 1, 2])
    module(ids[:, :6], cache=cache)
    cache.select(rows)
    assert difference(module(ids[rows, 6:], cache=cache).logits, expected[rows, 6:]) <= 1e-5
