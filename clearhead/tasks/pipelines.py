"""What the pipelines of all tasks share: the answers of a server in Hugging Face's task schema.

A task has a pipeline if its folder has a module `pipeline`, with the name of the schema (`NAME`), its `Parameters`, and
`run(model, inputs, parameters)`, which returns one JSON value for each input.

Source: the inference schemas of huggingface.co/docs/inference-providers, by task.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from clearhead.base.errors import InputError


class PipelineParameters(BaseModel):
    """The parameters of a pipeline; one that is not honoured is refused by name."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


def texts_of(inputs: list[Any]) -> list[str]:
    """Return inputs that are texts.

    Args:
        inputs: as a client sent them.

    Raises:
        InputError: one is not a text.
    """
    for text in inputs:
        if not isinstance(text, str):
            raise InputError(f"inputs must be a text or a list of texts, not {type(text).__name__}")
    return inputs
