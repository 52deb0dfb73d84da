"""Evaluation of a model with the metrics of its task."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from clearhead.base.errors import InputError
from clearhead.base.progress import message
from clearhead.data.sources.run_file_tables import apply_data_format
from clearhead.generate.scoring.result import Measures
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions


def evaluate_model(model: EvaluatedModel, data: object, options: EvaluateOptions) -> Measures:
    """Return the metrics of a model on evaluation data, as its task defines them.

    Args:
        model: the model.
        data: the evaluation data, as in [data] of a run file, or a list of examples as for `clearhead.train`. Files of
            the same kind as the training data are read with the same settings.
        options: the options of the evaluation.

    Returns:
        The metrics; for translations also the `translations`.

    Raises:
        InputError: the data is unusable, an option has no effect on this model, or a metric is not a finite number.
    """
    task = find_task(model.task.kind)
    if task.measured_on_pairs_as and are_pairs(data):
        task = find_task(task.measured_on_pairs_as)
    options.refuse_unused(task.kind)
    read, added = data, list[str]()
    if isinstance(data, Mapping):
        read = apply_data_format(data, model.task.reading)
        added = [f"{key} = {json.dumps(value)}" for key, value in read.items() if key not in data]
    measures: Measures = task.module("use").measure(model, read, options)
    if added:
        message(f"the data were read with settings of the training data: {', '.join(added)}")
    unusable = [name for name, value in measures.items() if isinstance(value, float) and not math.isfinite(value)]
    if unusable:
        raise InputError(
            f"{' and '.join(unusable)} {'is' if len(unusable) == 1 else 'are'} not a finite number: the outputs of the "
            "model overflow; use an earlier checkpoint, or the precision fp32"
        )
    return measures


def are_pairs(data: object) -> bool:
    """Return whether the evaluation data are pairs of texts."""
    if isinstance(data, Mapping):
        return not {"source", "tsv", "jsonl"}.isdisjoint(data)
    return isinstance(data, Sequence) and len(data) > 0 and not isinstance(data[0], str)
