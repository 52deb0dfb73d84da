"""Shared code of pipelines: answers of the server in the task schemas of Hugging Face.

A task has a pipeline if its folder has a module `pipeline`. The module defines the name of the schema (`NAME`), its
`Parameters`, and `run(model, inputs, parameters)`, which returns one JSON value per input.

Source: the inference schemas of huggingface.co/docs/inference-providers, by task.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from clearhead.base.errors import InputError


class PipelineParameters(BaseModel):
    """Base class of the parameters of a pipeline; an unsupported parameter is refused by name."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


def texts_of(inputs: list[Any]) -> list[str]:
    """Return the inputs of a pipeline request after checking that all are texts.

    Args:
        inputs: the inputs that the client sent.

    Raises:
        InputError: an input is not a text.
    """
    for text in inputs:
        if not isinstance(text, str):
            raise InputError(f"inputs must be a text or a list of texts, got {type(text).__name__}")
    return inputs
