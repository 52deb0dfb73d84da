"""Predictions and metrics of denoising."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.data.objectives.build import build_objective
from clearhead.generate.scoring.result import Measures
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.use import corpus_of, measure_hidden_tokens, noise_of


def predict(model: Any, texts: Sequence[str], *, batch_size: int | None = None) -> list[str]:
    """Return the text that the decoder generates for each text; see `Model.translate`."""
    return list(model.translate(list(texts), batch_size=batch_size))


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> Measures:
    """Return the loss of the tokens that are hidden when the text is corrupted as in training."""
    objective = build_objective(noise_of(model), model.tokenizers.source)
    return measure_hidden_tokens(model, corpus_of(model, data), objective, options.batch_size)
