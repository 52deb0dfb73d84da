"""The forecast of the time that the translations of a validation take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from clearhead.tasks.translate import train
from clearhead.text.pair import TokenizerPair


@pytest.mark.parametrize("scale", [0.001, 0.1, 10.0])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_few_sentences_stand_for_all(monkeypatch: pytest.MonkeyPatch, count: int, scale: float) -> None:
    """The forecast is exact where time grows with sentences and steps, and takes a small part of a slow score."""
    clock = [0.0]

    def translations(self: Any, module: nn.Module, sources: list[list[int]], *, max_length: int) -> list[str]:
        clock[0] += scale * len(sources) * (1.0 + 0.5 * max_length)
        return []

    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(train._Translator, "translations", translations)
    tokenizers = object.__new__(TokenizerPair)
    translator = train._Translator(tokenizers, sources=[[1]] * count, references=[], steps=30.0)
    whole = scale * count * (1.0 + 0.5 * 30.0)
    assert translator.seconds(nn.Identity()) == pytest.approx(whole)
    assert clock[0] <= max(3.0, 10 * scale)
