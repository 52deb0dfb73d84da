"""Untrusted weights in clearhead's layout: tensors that would be misread are refused by name at every precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.checkpoints.runs.manifest import MANIFEST
from clearhead.checkpoints.weights.lora import adapt, merge_low_rank
from clearhead.fast.stored import INT8, store
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.init_from import find_initial_model

SIZES = Hyperparameters(
    family="decoder", layers=1, width=14, heads=2, feedforward=19, norm="rms", norm_place="pre", positions="learned",
    max_positions=31, tie="none",
)  # fmt: skip
MATRIX, SCALE = "decoder.layers.0.steps.0.branches.0.function.out.weight_int8", "head.layers.0.weight_scale"
PRECISIONS = ("fp32", "int8", "auto")


def save(folder: Path, *, in_int8: bool) -> Path:
    tokenizer = train_tokenizer("word", ["a b c d", "b c d e"], vocab_size=50)
    torch.manual_seed(3)
    rows = tokenizer.vocab_size
    module = ch.build(build_spec(SIZES, source_vocab=rows, target_vocab=rows)).eval()
    pair = TokenizerPair(tokenizer, tokenizer, joint=True)
    record = TaskRecord(kind="generate", max_length=17)
    ch.Model(store(module, INT8) if in_int8 else module, pair, record).save(folder)
    (folder / MANIFEST).unlink()  # it tells careless edits alone
    return folder


@pytest.fixture(scope="module")
def in_8_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("int8") / "model", in_int8=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fp32") / "model", in_int8=False)


def refusals(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Replace the weights by tensors, and return the message with which every precision refuses them."""
    file = folder / "weights.safetensors"
    original = file.read_bytes()
    save_file(tensors, file)
    messages = set()
    try:
        for precision in PRECISIONS:
            with pytest.raises(InputError) as caught:
                ch.load(folder, device="cpu", precision=precision)
            messages.add(str(caught.value))
    finally:
        file.write_bytes(original)
    (message,) = messages
    return message


def reshape(tensor: Tensor) -> Iterator[Tensor]:
    yield from (tensor[:-1], tensor[:0], tensor[None], torch.cat([tensor, tensor]), tensor.flatten()[0])
    if tensor.dim() == 2:
        yield tensor.flatten()
        if tensor.shape[0] != tensor.shape[1]:
            yield tensor.T


def test_every_other_dtype_of_8_bit_weights_is_named(in_8_bits: Path) -> None:
    tensors, tried = load_file(in_8_bits / "weights.safetensors"), set()
    wrong = (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.bool, torch.float8_e4m3fn,
        torch.int8, torch.uint8,
    )  # fmt: skip
    for name, tensor in tensors.items():
        for dtype in wrong:
            if dtype != tensor.dtype:
                message = refusals(in_8_bits, tensors | {name: tensor.to(dtype)})
                tried.add(dtype)
                assert f"'{name}' must hold " in message and f", got {dtype}".replace("torch.", "") in message
                assert "\n" not in message
    assert tried == {*wrong}


def test_every_other_shape_of_8_bit_weights_is_named(in_8_bits: Path) -> None:
    tensors = load_file(in_8_bits / "weights.safetensors")
    for name, tensor in tensors.items():
        stem = name.removesuffix("_int8").removesuffix("_scale")
        for other in reshape(tensor):
            assert stem in refusals(in_8_bits, tensors | {name: other.contiguous()})
        assert stem in refusals(in_8_bits, {key: value for key, value in tensors.items() if key != name})


def test_a_scale_that_is_no_number_is_named(in_8_bits: Path) -> None:
    tensors = load_file(in_8_bits / "weights.safetensors")
    for value in (float("nan"), float("inf")):
        file, changed = in_8_bits / "weights.safetensors", tensors[SCALE].clone()
        changed[3] = value
        original = file.read_bytes()
        save_file(tensors | {SCALE: changed}, file)
        for precision in PRECISIONS:
            with pytest.raises(InputError, match="are NaN or infinite"):
                ch.load(in_8_bits, device="cpu", precision=precision)
        file.write_bytes(original)


def test_every_command_refuses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "model", in_int8=True)
    tensors = load_file(folder / "weights.safetensors")
    changes = {
        SCALE: tensors[SCALE].half(),
        MATRIX: tensors[MATRIX].float(),
        SCALE[:-5] + "int8": tensors[MATRIX].clone(),
    }
    reference = str(folder)
    for name, tensor in changes.items():
        save_file(tensors | {name: tensor}, folder / "weights.safetensors")
        for command in (
            ["generate", reference, "--prompt", "a b"],
            ["convert", reference, str(tmp_path / "out"), "--to", "hf"],
            ["view", reference, "a b", "-o", str(tmp_path / "out.html")],
            ["check", reference, "--against", "transformers"],
        ):
            assert main(command) == 2, command
            assert name.removesuffix("_int8") in capsys.readouterr().err
        initial = find_initial_model(reference, None, None)
        assert initial is not None
        with pytest.raises(InputError, match=name.removesuffix("_int8")):
            initial.tensors()
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.html").exists()


def test_whole_numbers_and_truth_values_are_no_weights(whole: Path) -> None:
    tensors = load_file(whole / "weights.safetensors")
    for (name, tensor), dtype in zip(
        tensors.items(), itertools.cycle((torch.int64, torch.bool, torch.int8, torch.float8_e5m2)), strict=False
    ):
        message = refusals(whole, tensors | {name: tensor.to(dtype)})
        assert f"'{name}' must hold " in message and f", got {dtype}".replace("torch.", "") in message
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        file = whole / "weights.safetensors"
        original = file.read_bytes()
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, file)
        ch.load(whole, device="cpu", precision="fp32").generate("a b", max_new_tokens=2)
        file.write_bytes(original)


@pytest.mark.parametrize("leaf", ["lora_down", "lora_up", "lora_scale", "weight"])
def test_low_rank_matrices_that_do_not_fit_are_named(whole: Path, leaf: str) -> None:
    module = ch.load(whole, device="cpu", precision="fp32").module
    (address, *_) = adapt(module, rank=3)
    tensors = module.state_dict()
    name = f"{address}.{leaf}"
    with pytest.raises(InputError, match=f"'{address}' has low-rank matrices"):
        merge_low_rank({key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(InputError, match=f"'{address}' has low-rank matrices"):
        merge_low_rank(tensors | {name: torch.ones(5, 2)})
