"""Pickled weights: only plain numbers with names are written, and a file cannot take all memory."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.files import from_bin
from clearhead.checkpoints.hf.files.from_bin import convert_bin

BIN = "pytorch_model.bin"
# Of a kind of tensor that is deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|nested tensors|TypedStorage)")]


def refusal_of(folder: Path) -> str:
    (folder / "out").mkdir()
    with pytest.raises(InputError) as caught:
        convert_bin(folder, folder / "out")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            lambda: torch.zeros(3, dtype=torch.complex64),
            "'w' is a tensor of the kind complex64; expected plain numbers",
        ),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "of the kind complex64"),
        (lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), "of the kind quantized"),
        (lambda: torch.empty(3, device="meta"), "of the kind meta"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "of the kind nested"),
        (lambda: torch.eye(3).to_sparse(), "of the kind sparse"),
        (lambda: torch.zeros(3, dtype=torch.uint16), "of the kind uint16"),
        (lambda: {"v": torch.zeros(3)}, "is a dict, not a tensor"),
        (lambda: torch.zeros(1).expand(10**6), "far more than the file"),
    ],
)
def test_an_entry_that_is_no_weight(entry: Callable[[], Any], words: str, tmp_path: Path) -> None:
    torch.save({"w": entry()}, tmp_path / BIN)
    assert words in refusal_of(tmp_path)


@pytest.mark.parametrize("name", ["a\ud800b", "__metadata__", "a\x1b[31m"])
def test_a_name_that_no_tensor_has(name: str, tmp_path: Path) -> None:
    torch.save({name: torch.zeros(3)}, tmp_path / BIN)
    assert "is no name of a tensor" in refusal_of(tmp_path)


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    torch.save({"n" * 2**20: 3}, tmp_path / BIN)
    assert "nnn...' is a int, not a tensor" in refusal_of(tmp_path)


def test_more_than_a_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(3)
    torch.save({f"{number}": tensor for number in range(9)}, tmp_path / BIN)
    monkeypatch.setattr(from_bin, "MOST_TENSORS", 8)
    assert "9 tensors are too many for a model (at most 8)" in refusal_of(tmp_path)


def test_a_pickle_of_millions_of_objects(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(tmp_path / BIN, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".pkl"):
                content = b"\x80\x02}(X\x01\x00\x00\x00w(" + b"]" * (from_bin.LARGEST_PICKLE + 1) + b"tu."
            new.writestr(entry.filename, content)
    assert "what names its tensors has more than 4,194,304 bytes" in refusal_of(tmp_path)


def test_a_file_from_before_archives_with_holes(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / BIN, _use_new_zipfile_serialization=False)
    with (tmp_path / BIN).open("ab") as file:
        file.truncate(2**42)
    assert "to load it needs about 4.4 TB of memory" in refusal_of(tmp_path)


def test_an_index_of_very_many_files(tmp_path: Path) -> None:
    table = ",".join(f'"{number}": "{number}.bin"' for number in range(100_000))
    (tmp_path / f"{BIN}.index.json").write_text(f'{{"weight_map": {{{table}}}}}')
    assert "names 100,000 files, which are too many for a model (at most 1,024)" in refusal_of(tmp_path)


def test_a_negated_view_is_written_as_its_numbers(tmp_path: Path) -> None:
    weight = torch.randn(3, 5)
    torch.save({"w": torch._neg_view(weight), "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / BIN)
    (tmp_path / "out").mkdir()
    convert_bin(tmp_path, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["w"], -weight) and tensors["mask"].all()
