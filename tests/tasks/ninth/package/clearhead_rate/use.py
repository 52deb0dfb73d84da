"""What a trained model is used for: ratings of texts, and how good they are.

Shape suffixes: N texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from clearhead.base.files import convert_json
from clearhead.base.progress import message
from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.generate.scoring.result import Measures, align_columns
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.evaluate.metrics import pearson
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.outputs import Sides, check_finite, encode_sides, max_input_length, pooled_outputs
from clearhead.tasks.use import refuse_pair
from clearhead.text.tokenizer import Tokenizer
from clearhead_rate.data import DATA, Bounds, read_rated


def numbers_of(
    module: Transformer, tokenizer: Tokenizer, record: TaskRecord, texts: Sides, **sizes: int | None
) -> Float64[ndarray, " texts"]:
    """Return the number of each text.

    Args:
        module: the model.
        tokenizer, record: as it was trained.
        texts: their ids, without special ids.
        sizes: batch_size or batch_tokens, as of `pooled_outputs`.
    """
    outputs_N1 = pooled_outputs(module, InputCollator.of(module.spec, tokenizer), texts, width=1, **sizes)
    check_finite(outputs_N1)
    numbers_N = outputs_N1[:, 0].double().numpy() * record.number_scale + record.number_mean
    bounds = convert_json(record.facts, Bounds, name="the facts in the task record of the model")
    bounded_N: Float64[ndarray, " texts"] = np.clip(numbers_N, *bounds.limits)
    return bounded_N


def predict(model: Any, texts: Sequence[Any], *, batch_size: int | None = None) -> list[float]:
    """Return the number of each text; this is what `Model.predict` and `clearhead predict` call."""
    for text in texts:
        refuse_pair([text] if isinstance(text, str) else text, model.task)
    ids, _ = encode_sides(model.tokenizer, texts, max_input_length(model.tree, model.task.max_length))
    numbers_N = numbers_of(model.tree, model.tokenizer, model.task, ids, batch_size=batch_size)
    return [float(number) for number in numbers_N]


@dataclass(frozen=True, repr=False, eq=False)
class RateMeasures(Measures):
    """How good predicted numbers are.

    Args:
        texts: how many there are.
        mean_absolute_error: in the unit of the numbers.
        correlation: -1 to 1.
    """

    texts: int
    mean_absolute_error: float
    correlation: float

    def lines(self) -> list[str]:
        """Return the numbers for a person."""
        error = f"{self.mean_absolute_error:.4g} on average, of {self.texts} texts"
        return align_columns({"error": error, "correlation": f"{self.correlation:.4f}"})


def compare(predicted_N: Float64[ndarray, " texts"], expected_N: Float64[ndarray, " texts"]) -> RateMeasures:
    """Measure predicted numbers by those that were expected."""
    error = float(np.abs(predicted_N - expected_N).mean())
    return RateMeasures(len(expected_N), error, pearson(predicted_N, expected_N))


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> RateMeasures:
    """Measure a model; this is what `Model.evaluate` and `clearhead evaluate` call."""
    rows = read_rated(DATA.source(data))
    message(f"{len(rows)} rated texts")
    predicted = predict(model, rows["text"], batch_size=options.batch_size)
    return compare(np.array(predicted), np.array(rows["number"]))
