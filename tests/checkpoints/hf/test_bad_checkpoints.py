"""Every fault of a checkpoint ends in one report and exit code 2, in every command."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead.apps.cli.main import main
from tests import hf_models

TENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST = "transformer.h.0.mlp.c_fc.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.language_model(tmp_path_factory.mktemp("lm") / "model")


@pytest.mark.parametrize("key", ["pad_token_id", "forced_bos_token_id"])
def test_an_id_outside_the_vocabulary_is_refused(
    key: str, original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(original, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({key: 99999}))
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    message = capfd.readouterr().err
    assert f"{key} = 99999 is outside the vocabulary, which has" in message and message.count("\n") == 1


@pytest.mark.parametrize(("key", "value"), [("top_p", 0), ("length_penalty", -10.5), ("num_beams", 1024)])
def test_an_option_out_of_range_is_refused_where_it_stands(
    key: str, value: float, original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check that the report does not name an option, which the caller did not use."""
    folder = shutil.copytree(original, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({key: value, "do_sample": key == "top_p"}))
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    message = capfd.readouterr().err
    assert f"generation_config.json: {key}: expected " in message and message.count("\n") == 1
    assert f"got {value}" in message and "--" not in message.replace(str(folder), "")


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        settings = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in settings.items() if value is not ...}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        weights = load_file(folder / TENSORS)
        change(weights)
        save_file(weights, folder / TENSORS)

    return change_file


def shards(change: Callable[[Path, dict[str, str]], Any]) -> Callable[[Path], None]:
    """Split the weights into two files, write the index, and damage it."""

    def change_folder(folder: Path) -> None:
        weights = load_file(folder / TENSORS)
        (folder / TENSORS).unlink()
        names, table = sorted(weights), {}
        for number, shard in enumerate((names[:9], names[9:])):
            save_file({name: weights[name] for name in shard}, folder / f"part-{number}.safetensors")
            table |= dict.fromkeys(shard, f"part-{number}.safetensors")
        change(folder, table)
        (folder / INDEX).write_text(json.dumps({"weight_map": table}))

    return change_folder


def header(change: Callable[[dict[str, Any], bytes], bytes]) -> Callable[[Path], None]:
    """Rewrite the file with a wrong header."""

    def rewrite(folder: Path) -> None:
        content = (folder / TENSORS).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        fields = json.loads(content[8 : 8 + length])
        data = change(fields, content[8 + length :])
        written = json.dumps(fields).encode()
        (folder / TENSORS).write_bytes(struct.pack("<Q", len(written)) + written + data)

    return rewrite


def longer(fields: dict[str, Any], data: bytes) -> bytes:
    fields[FIRST]["shape"] = [2**40, 2**40]
    return data


def overlapping(fields: dict[str, Any], data: bytes) -> bytes:
    fields[FIRST]["data_offsets"] = [0, 8]
    return data


def beyond(fields: dict[str, Any], data: bytes) -> bytes:
    start, _ = fields[FIRST]["data_offsets"]
    fields[FIRST]["data_offsets"] = [start, 2**50]
    return data


def cut(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(path.read_bytes()[:-64])


def disagree(folder: Path, table: dict[str, str]) -> None:
    first, second = (load_file(folder / f"part-{number}.safetensors") for number in (0, 1))
    save_file(second | {name: tensor + 1 for name, tensor in first.items()}, folder / "part-1.safetensors")


def move_outside(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / f"outside-{name}")
        (folder / name).symlink_to(folder.parent / f"outside-{name}")

    return change


def many_shards(folder: Path, table: dict[str, str]) -> None:
    table.update({f"t{number}": f"part-{number}.safetensors" for number in range(100_000)})


def long_name(fields: dict[str, Any], data: bytes) -> bytes:
    fields["n" * 2**20] = fields.pop(FIRST)
    return data


def with_holes(folder: Path) -> None:
    """Make the file 4 TB long and sparse, so that it takes almost no space on the disk."""
    path, size = folder / TENSORS, 2**42

    def longer(fields: dict[str, Any], data: bytes) -> bytes:
        fields["extra"] = {"dtype": "U8", "shape": [size], "data_offsets": [len(data), len(data) + size]}
        return data

    header(longer)(folder)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + size)


def add_packed_tensors(weights: dict[str, Tensor]) -> None:
    weights[FIRST.replace(".weight", ".qweight")] = torch.zeros(3, 5, dtype=torch.int32)
    weights[FIRST.replace(".weight", ".g_idx")] = torch.zeros(5, dtype=torch.int32)


def add_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    changed = json.loads(path.read_text()) | {"added_tokens_decoder": {str(rows): {"content": "<new>"}}}
    path.write_text(json.dumps(changed))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tensors": (lambda folder: (folder / TENSORS).unlink(), "has no weights"),
    "truncated": (cut, "damaged or not a safetensors file"),
    "empty file": (lambda folder: (folder / TENSORS).write_bytes(b""), "damaged or not a safetensors file"),
    "not tensors": (lambda folder: (folder / TENSORS).write_bytes(b"<html>" * 99), "damaged or not a safetensors file"),
    "a directory": (lambda folder: ((folder / TENSORS).unlink(), (folder / TENSORS).mkdir()), "has no weights"),
    "header too long": (
        lambda folder: (folder / TENSORS).write_bytes(struct.pack("<Q", 2**60) + b"{}"), "damaged or not a safetensors",
    ),
    "shape that lies": (header(longer), "damaged or not a safetensors file"),
    "overlap": (header(overlapping), "damaged or not a safetensors file"),
    "beyond the file": (header(beyond), "damaged or not a safetensors file"),
    "config not JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "config deep": (lambda folder: (folder / "config.json").write_text("[" * 10**5), "config.json"),
    "no model_type": (config(model_type=...), "config.json has no model_type"),
    "unknown architecture": (config(model_type="gpt3"), "model_type 'gpt3' is not known (did you mean 'gpt"),
    "unknown class": (config(architectures=["GPT2DoubleHeads"]), "'GPT2DoubleHeads' of gpt2 is not supported"),
    "GPTQ": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized as GPTQ"),
    "AWQ": (config(quantization_config={"quant_method": "awq"}), "quantized as AWQ"),
    "bitsandbytes": (config(quantization_config={"quant_method": "bitsandbytes"}), "quantized as bitsandbytes"),
    "FP8": (config(quantization_config={"quant_method": "fp8"}), "quantized as FP8"),
    "MXFP4": (config(quantization_config={"quant_method": "mxfp4"}), "quantized as MXFP4"),
    "other method": (config(quantization_config={"quant_method": "newest"}), "quantized as newest"),
    "GPTQ by tensors": (tensors(add_packed_tensors), "quantized as GPTQ"),
    "FP8 by tensors": (
        tensors(lambda weights: weights.update({FIRST: weights[FIRST].to(torch.float8_e4m3fn)})), "quantized as FP8",
    ),
    "bitsandbytes by tensors": (
        tensors(lambda weights: weights.update({f"{FIRST}.absmax": torch.zeros(3, dtype=torch.uint8)})),
        "quantized as bitsandbytes (4 bits)",
    ),
    "MXFP4 by tensors": (
        tensors(lambda weights: weights.update({"up_blocks": torch.zeros(3, dtype=torch.uint8)})), "quantized as MXFP4",
    ),
    "wrong dtype": (
        tensors(lambda weights: weights.update({FIRST: weights[FIRST].to(torch.int8)})),
        f"'{FIRST}' holds I8, not floating-point numbers",
    ),
    "wrong shape": (
        tensors(lambda weights: weights.update({FIRST: weights[FIRST][:-1].contiguous()})),
        f"'{FIRST}' has the shape [25, 104], the config needs [26, 104]",
    ),
    "tensor missing": (tensors(lambda weights: weights.pop(FIRST)), f"'{FIRST}' is missing"),
    "tensor unknown": (
        tensors(lambda weights: weights.update({"extra": torch.zeros(2)})), "'extra' is not a tensor of GPT2",
    ),
    "key unknown": (config(n_hed=2), "gpt2 has no key 'n_hed', so it is not supported (did you mean 'n_head'?)"),
    "layers absurd": (config(n_layer=10**9), "config.json: n_layer = 1000000000 is out of range; expected 0 to 1024"),
    "rows absurd": (config(vocab_size=10**15), "config.json: vocab_size = 1000000000000000 is out of range"),
    "width negative": (config(n_embd=-26), "config.json: n_embd = -26 is out of range"),
    "heads of zero": (config(n_head=0), "config.json"),
    "shards disagree": (shards(disagree), "is in both"),
    "shard absent": (
        shards(lambda folder, table: (folder / "part-1.safetensors").unlink()),
        f"{INDEX} names part-1.safetensors, which is missing",
    ),
    "shard empty of it": (
        shards(lambda folder, table: table.update({"transformer.wpe.weight": "part-0.safetensors"})),
        "'transformer.wpe.weight' should be in part-0.safetensors, which lacks it",
    ),
    "very many shards": (
        shards(many_shards), f"{INDEX} names 100,000 files; expected at most 1,024",
    ),
    "very long name": (header(long_name), f"'{'n' * 77}...' is not a tensor of GPT2"),
    "holes": (with_holes, "cannot be mapped into memory: it has 4.4 TB"),
    "index climbs": (
        shards(lambda folder, table: table.update({FIRST: "../part-0.safetensors"})),
        "'../part-0.safetensors' is not the name of a file in this folder",
    ),
    "index names a root": (
        shards(lambda folder, table: table.update({FIRST: "/etc/passwd"})), "'/etc/passwd' is not the name of a file",
    ),
    "index of nothing": (shards(lambda folder, table: table.clear()), "weight_map must name a file for each tensor"),
    "tensors linked out": (move_outside(TENSORS), "a link out of the folder is not followed"),
    "config linked out": (move_outside("config.json"), "a link out of the folder is not followed"),
    "tokenizer linked out": (move_outside("vocab.json"), "a link out of the folder is not followed"),
    "tokenizer too large": (add_token, "restore the tokenizer that the model was trained with"),
    ".bin alone": (lambda folder: (folder / TENSORS).rename(folder / "pytorch_model.bin"), "--from-bin"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_is_one_report_of_both_commands(
    name: str, original: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(original, tmp_path / "model")
    damage, words = FAULTS[name]
    damage(folder)
    for command in (["inspect", str(folder)], ["generate", str(folder), "--prompt", "the cat"]):
        assert main(command) == 2
        captured = capfd.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        assert words in captured.err and len(captured.err) < 4000, captured.err


def test_without_a_network_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect", "someone/nothing"], ["generate", "someone/nothing", "--prompt", "a"]):
        assert main(command) == 2
        assert "is switched off by HF_HUB_OFFLINE, and no copy is cached" in capfd.readouterr().err
