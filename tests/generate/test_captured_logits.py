"""Captured logits do not show the changes that a search makes to logits."""

from __future__ import annotations

from pathlib import Path

import torch

import clearhead
from tests import hf_models


def test_captured_logits_are_those_that_the_model_computed(tmp_path: Path) -> None:
    """Banned ids, such as the end token before the minimum length, keep their logits."""
    model = clearhead.load(hf_models.language_model(tmp_path / "model"), device="cpu")
    with model.capture(["logits", "head"]) as seen:
        model.generate("the", max_new_tokens=4, min_new_tokens=4, beam_size=2)
    for records in seen.values():
        assert records and all(torch.isfinite(record.tensor).all() for record in records)
