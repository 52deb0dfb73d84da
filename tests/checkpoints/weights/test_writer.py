"""A file that is written tensor by tensor equals the one that safetensors writes at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clearhead.checkpoints.weights.writer import DTYPE_NAMES, TensorWriter


def content(path: Path) -> tuple[list[tuple[str, object]], bytes]:
    """Return the header in the order of the file, and the bytes of the tensors."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    # The library writes its metadata in a random order.
    return [(name, sorted(entry.items())) for name, entry in entries.items()], whole[8 + length :]


def test_the_file_is_that_of_the_library(tmp_path: Path) -> None:
    tensors = {f"{number % 3}.{dtype}": torch.ones(number + 1, 5).to(dtype) for number, dtype in enumerate(DTYPE_NAMES)}
    tensors |= {"é\t": torch.randn(7, 3).T, "none": torch.zeros(0, 3), "number": torch.tensor(0.5)}
    metadata = {"format": "pt", "aliases": '{"a": "b"}'}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "whole", metadata=metadata)
    outlines = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with TensorWriter(tmp_path / "streamed", outlines, metadata) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    assert content(tmp_path / "streamed") == content(tmp_path / "whole")


def test_a_tensor_that_is_missing_or_has_another_size_is_refused(tmp_path: Path) -> None:
    outlines = {"a": torch.ones(3, device="meta"), "b": torch.ones(5, device="meta")}
    with (
        pytest.raises(AssertionError, match="a has 16 bytes, but the header of the file declares 12"),
        TensorWriter(tmp_path / "x", outlines, {}) as writer,
    ):
        writer.write("a", torch.ones(4))
    with (
        pytest.raises(AssertionError, match="1 tensors were not written"),
        TensorWriter(tmp_path / "x", outlines, {}) as writer,
    ):
        writer.write("a", torch.ones(3))
