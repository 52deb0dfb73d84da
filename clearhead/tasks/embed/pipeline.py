"""Pipeline "feature-extraction" of the server: returns the vectors of texts."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from clearhead.base.errors import InputError
from clearhead.tasks.pipelines import PipelineParameters, texts_of

NAME = "feature-extraction"


class Parameters(PipelineParameters):
    """Parameters that a request may set; long texts are always truncated at their end."""

    normalize: bool = False
    truncate: Literal[True] = True
    dimensions: int | None = Field(default=None, ge=1)


def run(model: Any, inputs: list[Any], parameters: Parameters) -> list[Any]:
    """Return the vector of each text.

    Args:
        model: an embedding model.
        inputs: the texts.
        parameters: the parameters that the client sent with the inputs.
    """
    vectors = model.embed(texts_of(inputs))
    width = vectors.shape[1]
    if parameters.dimensions is not None and parameters.dimensions > width:
        raise InputError(f"dimensions is {parameters.dimensions}; expected at most {width}, the size of the vectors")
    vectors = vectors[:, : parameters.dimensions]
    if parameters.normalize or parameters.dimensions is not None:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    answers: list[Any] = vectors.tolist()
    return answers
