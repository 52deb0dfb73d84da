"""Weights in four bits: dequantized bit by bit as in transformers, used as any others, and saved as they are held."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.files.quantization import dequantize
from clearhead.checkpoints.hf.loading import load_module
from clearhead.checkpoints.hf.saving import save_module
from clearhead.fast.stored import WeightForm
from tests.laws.tiny import difference

EXPERTS, WIDTH, INNER = 3, 64, 32
SIZES = {
    "vocab_size": 37, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model twice: its experts packed, and as transformers unpacks them."""
    # Its imports take seconds, which not every worker has to spend.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain, packed = (tmp_path_factory.mktemp("mxfp4") / name for name in ("plain", "packed"))
    torch.manual_seed(3)
    model: Any = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES))
    model.save_pretrained(plain)
    shutil.copytree(plain, packed)
    tensors, unpacked_ones = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked_ones[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).float().contiguous()
    save_file(unpacked_ones, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    rewrite(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return plain, packed


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def copy_with_tensor(folder: Path, copy: Path, name: str, tensor: Tensor | None) -> Path:
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), copy / "model.safetensors")
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_what_transformers_unpacks(folders: tuple[Path, Path], dtype: torch.dtype) -> None:
    first, other = (load_module(folder, form=WeightForm(dtype)).module.state_dict() for folder in folders)
    assert first.keys() == other.keys()
    assert not [name for name in first if not torch.equal(first[name], other[name])]


def test_it_computes_what_transformers_computes(folders: tuple[Path, Path]) -> None:
    theirs: Any = transformers.GptOssForCausalLM.from_pretrained(folders[0], attn_implementation="eager").eval()
    ids = torch.randint(37, (2, 11))
    with torch.no_grad():
        assert difference(load_module(folders[1]).module(ids).logits, theirs(ids).logits) <= 1e-5


def test_it_is_written_as_it_is_held(folders: tuple[Path, Path], tmp_path: Path) -> None:
    loaded = load_module(folders[1])
    save_module(loaded.module, tmp_path / "saved", loaded=loaded)
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[0], tmp_path / "saved"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_all_numbers_of_four_bits() -> None:
    """By the definition: a sign, two bits of exponent with bias 1, one of fraction, and no hidden one below."""
    codes = torch.arange(16, dtype=torch.uint8)
    sign, exponent, fraction = 1 - 2 * (codes >> 3).float(), ((codes >> 1) & 3).int(), (codes & 1).float()
    size = torch.where(exponent > 0, torch.ldexp(1 + fraction / 2, exponent - 1), fraction / 2)
    pairs = (codes[0::2] | (codes[1::2] << 4)).repeat(2)[None, None]
    for power in (0, 7, 127, 200):
        values = dequantize(pairs, torch.tensor([[power]], dtype=torch.uint8))[0, :16]
        assert torch.equal(values, torch.ldexp(sign * size, torch.tensor(power - 127)))


def test_what_cannot_be_dequantized_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    scales = torch.zeros(EXPERTS, WIDTH, 2, dtype=torch.uint8)
    for number, (tensor_name, tensor, words) in enumerate(
        [
            (f"{name}_scales", None, f"'{name}_blocks' has no '{name}_scales'"),
            (f"{name}_scales", scales, "expected [E, O, G, 16] and [E, O, G]"),
            (f"{name}_scales", torch.zeros(EXPERTS, WIDTH, 1), "hold U8 and F32; expected bytes"),
        ]
    ):
        with pytest.raises(InputError) as report:
            load_module(copy_with_tensor(folders[1], tmp_path / str(number), tensor_name, tensor))
        assert words in str(report.value)
