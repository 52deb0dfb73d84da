"""Pipeline "token-classification" of the server: returns the entities of texts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from clearhead.tasks.pipelines import PipelineParameters, texts_of

NAME = "token-classification"


class Parameters(PipelineParameters):
    """Parameters that a request may set; words of an entity are always joined."""

    aggregation_strategy: Literal["simple", "first", "average", "max"] = "simple"
    ignore_labels: list[str] = Field(default_factory=list)


def run(model: Any, inputs: list[Any], parameters: Parameters) -> list[Any]:
    """Return the entities of each text with their character offsets.

    Args:
        model: a tagger.
        inputs: the texts.
        parameters: the parameters that the client sent with the inputs.
    """
    return [
        [
            {
                "entity_group": entity.label,
                "score": entity.probability,
                "word": entity.text,
                "start": entity.start,
                "end": entity.end,
            }
            for entity in entities
            if entity.label not in parameters.ignore_labels
        ]
        for entities in model.tag(texts_of(inputs))
    ]
