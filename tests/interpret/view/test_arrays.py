"""The explorer shows arrays of any library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch

TOKENS, TARGETS = list("abcde"), list("xyz")


def weights(queries: int = 5, keys: int = 5) -> torch.Tensor:
    return torch.rand(2, 3, queries, keys).softmax(-1)


@pytest.mark.parametrize("kind", ["torch", "numpy", "layers"])
def test_one_stack(tmp_path: Path, kind: str) -> None:
    stack = weights()
    forms = {"torch": stack, "numpy": stack.numpy(), "layers": [layer[None] for layer in stack]}
    page = ch.view_attention(forms[kind], TOKENS)
    page.save_html(tmp_path / "page.html")
    assert "encoder.self" in (tmp_path / "page.html").read_text()
    assert "<iframe" in page._repr_html_()


def test_causal_and_cross_attention(tmp_path: Path) -> None:
    causal = weights().tril()
    ch.view_attention(causal / causal.sum(-1, keepdim=True), TOKENS).save_html(tmp_path / "causal.html")
    assert "decoder.self" in (tmp_path / "causal.html").read_text()
    ch.view_attention(weights(3, 5), TOKENS, TARGETS).save_html(tmp_path / "cross.html")
    assert "decoder.memory" in (tmp_path / "cross.html").read_text()


@pytest.mark.parametrize(
    ("weight_input", "tokens", "sentence"),
    [
        (weights() * 2, TOKENS, "sum to one"), (weights().mT, TOKENS, "swap the last two axes"),
        (weights(), TOKENS[:4], "the tokens are 4 and 4"), (weights()[0], TOKENS, "layers, heads, queries, keys"),
        (weights() - 1, TOKENS, "negative"), (torch.full((1, 1, 5, 5), torch.nan), TOKENS, "NaN"),
        ([np.ones((1, 2, 2)), np.ones((1, 3, 3))], TOKENS, "same shape"), ("words", TOKENS, "tensor of numbers"),
    ],
)  # fmt: skip
def test_wrong_arrays(weight_input: object, tokens: list[str], sentence: str) -> None:
    with pytest.raises(ch.InputError, match=sentence):
        ch.view_attention(weight_input, tokens)
