"""Pipeline "text-classification" of the server: returns the labels of texts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from clearhead.base.errors import InputError
from clearhead.tasks.pipelines import PipelineParameters

NAME = "text-classification"
IS_NESTED = True


class Parameters(PipelineParameters):
    """Parameters that a request may set."""

    top_k: int | None = Field(default=None, ge=1)


def run(model: Any, inputs: list[Any], parameters: Parameters) -> list[Any]:
    """Return the labels of each text with their probabilities, most probable first.

    Args:
        model: a classifier.
        inputs: the texts, or {"text", "text_pair"} for a model that reads pairs.
        parameters: the parameters that the client sent with the inputs.
    """
    answers = []
    for predicted in model.classify([_text(item) for item in inputs]):
        named = {_only_label(model): predicted.value} if predicted.value is not None else predicted.probabilities
        scores = [{"label": label, "score": score} for label, score in named.items()]
        answers.append(sorted(scores, key=lambda score: -score["score"])[: parameters.top_k])
    return answers


def _only_label(model: Any) -> str:
    """Return the label name for the output of a regression model, as Hugging Face pipelines report it."""
    loaded = None if model.hf_checkpoint is None else model.hf_checkpoint.loaded
    names = {} if loaded is None else loaded.config.get("id2label") or {}
    return str(names.get("0", "LABEL_0"))


def _text(item: Any) -> str | tuple[str, str]:
    if isinstance(item, dict) and {"text", "text_pair"} == set(item):
        return f"{item['text']}", f"{item['text_pair']}"
    if not isinstance(item, str):
        raise InputError('inputs must be texts, or {"text": ..., "text_pair": ...} for pairs')
    return item
