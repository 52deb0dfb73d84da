"""Pipeline "question-answering" of the server: returns spans of contexts that answer questions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from clearhead.base.errors import InputError
from clearhead.tasks.pipelines import PipelineParameters

NAME = "question-answering"


class Parameters(PipelineParameters):
    """Parameters that a request may set."""

    top_k: int = Field(default=1, ge=1, le=1000)
    handle_impossible_answer: bool = False
    doc_stride: int | None = Field(default=None, ge=0)
    align_to_words: bool = True


def run(model: Any, inputs: list[Any], parameters: Parameters) -> list[Any]:
    """Return the best answer to each question, or the best `top_k` answers.

    Args:
        model: a model of the task answer.
        inputs: the questions, as {"question", "context"}.
        parameters: the parameters that the client sent with the inputs.
    """
    results = []
    for item in inputs:
        if not isinstance(item, dict) or {"question", "context"} != set(item):
            raise InputError('inputs must be {"question": ..., "context": ...}')
        answers = model.answer(
            f"{item['question']}",
            f"{item['context']}",
            top_k=parameters.top_k,
            allow_no_answer=parameters.handle_impossible_answer,
            doc_stride=parameters.doc_stride,
            align_to_words=parameters.align_to_words,
        )
        listed = [{"answer": span.text, "score": span.score, "start": span.start, "end": span.end} for span in answers]
        results.append(listed[0] if parameters.top_k == 1 else listed)
    return results
