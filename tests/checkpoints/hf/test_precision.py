"""Half precision: what is stored so stays so, in its mapped file, and its outputs are near those of float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.main import main
from tests import hf_models
from tests.checkpoints.hf.test_memory import find_mapped_ranges, inside
from tests.laws.tiny import difference


def save_in_dtype(folder: Path, dtype: torch.dtype) -> Path:
    """A language model whose file is in half precision."""
    hf_models.language_model(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).to(dtype)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_file_is_computed_in_bf16_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_in_dtype(tmp_path / "model", dtype)
    whole = ch.load(folder, device="cpu", precision="fp32")
    half = ch.load(folder, device="cpu", precision="bf16")
    assert {tensor.dtype for tensor in whole.module.state_dict().values()} == {torch.float32}
    assert {tensor.dtype for tensor in half.module.state_dict().values()} == {torch.bfloat16}
    # The other half type has numbers of its own, so that it is converted and nothing of its file stays.
    assert set(inside(half.module.state_dict(), find_mapped_ranges(folder))) == {dtype == torch.bfloat16}
    ids = torch.randint(whole.module.num_source_ids, (2, 13))
    with torch.no_grad():
        expected, actual = whole.module(ids).logits, half.module(ids).logits
    assert 1e-6 < difference(actual, expected) < 5e-2
    (text,) = half.generate("the cat", max_new_tokens=5)
    assert text.tokens


def test_what_was_loaded_in_half_precision_is_saved_in_it(tmp_path: Path) -> None:
    folder = save_in_dtype(tmp_path / "model", torch.bfloat16)
    ch.load(folder, device="cpu", precision="bf16").save(tmp_path / "out", format="hf")
    before = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype="auto").state_dict()
    after = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_converting_keeps_the_type_and_cuts_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """A half file once came out as float32, twice as large."""
    folder, out = save_in_dtype(tmp_path / "model", dtype), tmp_path / "out"
    most = 10 * dtype.itemsize
    assert main(["convert", str(folder), str(out), "--to", "hf", "--max-shard-size", f"{most}KB"]) == 0
    shards = sorted(out.glob("*.safetensors"))
    header = 4000
    assert len(shards) > 1 and all(path.stat().st_size < 1000 * most + header for path in shards)
    before = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype="auto").state_dict()
    after = transformers.GPT2LMHeadModel.from_pretrained(out, dtype="auto").state_dict()
    assert before.keys() == after.keys()
    assert all(after[name].dtype == dtype and torch.equal(before[name], after[name]) for name in before)
