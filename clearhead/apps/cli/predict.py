"""`clearhead predict`: what a model was trained to predict, whatever its task is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.lines import STANDARD_INPUT, Input, Line, answer_lines, one_line
from clearhead.apps.cli.options import ComputeOptions, JsonLines, LineFile, Paired, Ref, takes_compute_options
from clearhead.base.errors import InputError


@takes_compute_options
def predict(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    as_json: JsonLines = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Predict what a model was trained to predict, one line in, one line out.

    \b
    Example:
      clearhead predict runs/grades essays.txt > grades.txt
      echo "a warm and funny film" | clearhead predict runs/reviews --json

    This is how a task of an installed package is used. The tasks of clearhead have commands of their own as well, with
    more options: translate, generate, fill, classify, tag, embed and answer. A line of output is the text, the label or
    the number; several have tabs between them. An empty line is answered by an empty line. --json writes {"index",
    "text", "prediction"}.
    """
    lines = Input.of(file)
    model = compute.load_model(ref)
    if model.task.is_paired and not pair:
        raise InputError("this model was trained on pairs: add --pair, and put a tab between the two texts of a line")

    def show(line: Line, answer: Any) -> None:
        value = _json_value(answer)
        print_either(as_json, {**line.record(), "prediction": value}, _text(value))

    size = compute.batch_size
    answer_lines(lines, lambda texts: model.predict(texts, batch_size=size), show, paired=pair, batch_size=size)


def _json_value(value: Any) -> Any:
    """Return a prediction as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _text(value: Any) -> str:
    """Return the JSON value of a prediction for a person: of an object its first field, which says what it is."""
    if isinstance(value, list):
        return "\t".join(map(_text, value))
    if isinstance(value, dict):
        return _text(next(iter(value.values())))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else one_line(str(value))
