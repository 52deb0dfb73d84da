"""`clearhead classify`: the label of each text, with its probability."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.lines import STANDARD_INPUT, Input, Line, answer_lines, one_line
from clearhead.apps.cli.options import ComputeOptions, JsonLines, LineFile, Paired, Ref, takes_compute_options
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from clearhead.tasks.classify.use import Classification


@takes_compute_options
def classify(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    as_json: JsonLines = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Classify texts, one line in, one line out.

    \b
    Example:
      clearhead classify runs/reviews reviews.txt > labels.txt
      echo "a warm and funny film" | clearhead classify runs/reviews
      clearhead classify runs/paraphrases pairs.tsv --pair --json

    A line of output is the most probable label and, after a tab, its probability. Where several labels may be right it
    is those with a probability of at least one half, with commas between them, and where the model gives a number it is
    that number. An empty line is answered by an empty line. --json writes {"index", "text", "label", "labels",
    "probability", "probabilities", "is_cut"}, or "value" instead of labels; is_cut: the text was truncated.
    """
    lines = Input.of(file)
    model = compute.load_model(ref)
    if model.task.is_paired and not pair:
        raise InputError("this model was trained on pairs: add --pair, and put a tab between the two texts of a line")

    def show(line: Line, answer: Classification | None) -> None:
        text = "" if answer is None else one_line(answer.label)
        if answer is not None and answer.probability is not None:
            text = f"{text}\t{answer.probability:.4f}"
        print_either(as_json, {**line.record(), **_record(answer)}, text)

    size = compute.batch_size
    answer_lines(lines, lambda texts: model.classify(texts, batch_size=size), show, paired=pair, batch_size=size)


def _record(answer: Classification | None) -> dict[str, object]:
    """Return a classification as JSON values: of a class, of several, or of a number."""
    if answer is None:
        return {"label": None, "probability": None}
    if answer.value is not None:
        return {"value": answer.value, "is_cut": answer.is_cut}
    return {
        "label": answer.label,
        "labels": list(answer.labels),
        "probability": answer.probability,
        "probabilities": dict(answer.probabilities),
        "is_cut": answer.is_cut,
    }
