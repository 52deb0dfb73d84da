"""Pipeline "fill-mask" of the server: returns candidates for the blanks of texts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from clearhead.tasks.pipelines import PipelineParameters, texts_of

NAME = "fill-mask"


class Parameters(PipelineParameters):
    """Parameters that a request may set."""

    top_k: int = Field(default=5, ge=1, le=1000)


def run(model: Any, inputs: list[Any], parameters: Parameters) -> list[Any]:
    """Return the candidates for the blank of each text; for several blanks, one list per blank.

    Args:
        model: a masked language model.
        inputs: the texts.
        parameters: the parameters that the client sent with the inputs.
    """
    answers = []
    for blanks in model.fill(texts_of(inputs), top_k=parameters.top_k):
        lists = [
            [
                {
                    "score": filled.probability,
                    "token": model.tokenizer.entries().index(filled.token),
                    "token_str": filled.text,
                    "sequence": filled.filled,
                }
                for filled in blank
            ]
            for blank in blanks
        ]
        answers.append(lists[0] if len(lists) == 1 else lists)
    return answers
