"""Commands that answer texts: `clearhead classify`, `tag`, `fill`, `embed`, `answer` and `predict`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_either, print_message
from clearhead.apps.cli.lines import STANDARD_INPUT, Input, Line, answer_lines, is_standard_input, one_line
from clearhead.apps.cli.options import (
    ComputeOptions,
    Force,
    Json,
    JsonLines,
    LineFile,
    Paired,
    Ref,
    takes_compute_options,
)  # fmt: skip
from clearhead.apps.cli.progress import at_rest, counting
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from numpy import ndarray

    from clearhead import Model
    from clearhead.tasks.classify.use import Classification
    from clearhead.tasks.fill.use import Filled
    from clearhead.tasks.tag.use import Entity

ARRAY = ".npy"
Shown = tuple[dict[str, object], str]
"""An answer as JSON values and as a line of text."""


@dataclass(frozen=True)
class LineCall:
    """One call of a command that answers lines: the model, the texts and the form of the output.

    Attributes:
        ref: the reference of the model.
        lines: the texts.
        as_json: whether each answer is written as JSON.
        compute: how the model runs.
        pair: whether a line holds two texts with a tab between them.
    """

    ref: str
    lines: Input
    as_json: bool
    compute: ComputeOptions
    pair: bool = False

    def load_model(self) -> Model:
        """Load the model, and refuse single texts for a model of pairs.

        Raises:
            InputError: the model cannot be loaded, or it was trained on pairs and `pair` is False.
        """
        model = self.compute.load_model(self.ref)
        if model.task.is_paired and not self.pair:
            raise InputError(
                "this model was trained on pairs: add --pair, and put a tab between the two texts of a line"
            )
        return model

    def write_answers(self, answer: Callable[[list[Any]], Iterable[Any]], show: Callable[[Any], Shown]) -> None:
        """Answer every line and write each answer.

        Args:
            answer: the method of the model that answers several texts.
            show: the form of one answer; an empty line has the answer None.
        """

        def write(line: Line, value: Any) -> None:
            record, text = show(value)
            print_either(self.as_json, {**line.record(), **record}, text)

        answer_lines(self.lines, answer, write, batch_size=self.compute.batch_size, paired=self.pair)


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
    call = LineCall(ref, Input.of(file), as_json, compute, pair)
    model = call.load_model()
    call.write_answers(lambda texts: model.classify(texts, batch_size=compute.batch_size), _show_classification)


def _show_classification(answer: Classification | None) -> Shown:
    if answer is None:
        return {"label": None, "probability": None}, ""
    if answer.value is not None:
        record: dict[str, object] = {"value": answer.value, "is_cut": answer.is_cut}
    else:
        record = {
            "label": answer.label, "labels": list(answer.labels), "probability": answer.probability,
            "probabilities": dict(answer.probabilities), "is_cut": answer.is_cut,
        }  # fmt: skip
    probability = "" if answer.probability is None else f"\t{answer.probability:.4f}"
    return record, f"{one_line(answer.label)}{probability}"


@takes_compute_options
def tag(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    as_json: JsonLines = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Tag texts, one line in, one line out.

    \b
    Example:
      clearhead tag runs/names news.txt
      echo "Anna flew from Oslo to Rome." | clearhead tag runs/names --json

    A line of output holds the entities of the text with tabs between them, each as "label start-end text"; start and
    end count characters from 0, and the end is behind the last one. A text without entities, and an empty line, are
    answered by an empty line. --json writes {"index", "text", "entities"}; an entity is {"label", "text", "start",
    "end", "probability"}.
    """
    call = LineCall(ref, Input.of(file), as_json, compute)
    model = compute.load_model(ref)
    call.write_answers(lambda texts: model.tag(texts, batch_size=compute.batch_size), _show_entities)


def _show_entities(answer: list[Entity] | None) -> Shown:
    entities = answer or []
    texts = (one_line(f"{entity.label} {entity.start}-{entity.end} {entity.text}".lstrip()) for entity in entities)
    return {"entities": [asdict(entity) for entity in entities]}, "\t".join(texts)


@takes_compute_options
def fill(
    ref: Ref,
    text: Annotated[
        str,
        typer.Argument(metavar="TEXT|-", help="Text with blanks: ___ or the mask token; - is standard input."),
    ] = "-",
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE|-", help="A file of texts, one in a line, instead of TEXT.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Candidates for each blank.")] = 5,
    as_json: JsonLines = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Fill the blanks of a text with the most probable words, one line in, one line out.

    \b
    Example:
      clearhead fill runs/captions "A dog ___ through the snow."
      clearhead fill runs/captions --file captions.txt --top-k 1 | cut -f 1

    A blank is one entry of the model's vocabulary. A line of output holds the text with the best candidates and then,
    for each blank and after a tab, its candidates with their probabilities. An empty line is answered by an empty line.
    --json writes {"index", "text", "filled", "blanks"}; a blank is a list of {"text", "token", "probability", "start",
    "end", "filled"}, best first, and start and end count the characters of the given text.
    """
    _check_source(text, file, compute.batch_size)
    lines = Input.of(file or STANDARD_INPUT) if text == "-" else Input(None, [[text]], 1)
    model = compute.load_model(ref)
    LineCall(ref, lines, as_json, compute).write_answers(
        lambda texts: model.fill(texts, top_k=top_k, batch_size=compute.batch_size), _show_blanks
    )


def _show_blanks(answer: list[list[Filled]] | None) -> Shown:
    blanks = answer or []
    filled = blanks[0][0].filled if blanks else ""
    columns = ["  ".join(f"{one_line(word.text)} {word.probability:.4f}" for word in blank) for blank in blanks]
    record: dict[str, object] = {
        "filled": filled,
        "blanks": [[asdict(candidate) for candidate in blank] for blank in blanks],
    }
    return record, "\t".join([one_line(filled), *columns])


def _check_source(text: str, file: Path | None, batch_size: int | None) -> None:
    if text == "-":
        return
    if file is not None:
        raise InputError("TEXT and --file are two ways to give the text: give one of them")
    if batch_size is not None:
        raise InputError("--batch-size has no effect on a single TEXT; remove it, or give a file of texts with --file")
    if "\n" in text:
        raise InputError("TEXT is a single line; give several in a file with --file")


@takes_compute_options
def embed(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="The cosine of the two texts in a line, with a tab between them.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .npy file for the vectors, float32, a row for each line.")
    ] = None,
    force: Force = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object for each line of input; with -o one in all.")
    ] = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Make a vector of each text, one line in, one line out.

    \b
    Example:
      clearhead embed runs/captions captions.txt -o captions.npy
      clearhead embed runs/captions pairs.tsv --similarity
      echo "two dogs in the snow" | clearhead embed runs/captions --json

    Vectors are pooled and normalized as the model says. Without -o a line of output is the vector as a JSON list. With
    --pair the two texts of a line are read together and have one vector; with --similarity each has its own, and the
    output is their cosine, from -1 to 1. An empty line has no vector: its line of output is empty, or null in JSON, and
    -o refuses it, and writes its file when all is done. --json writes {"index", "text", "vector"}, for two texts "pair"
    too, or "similarity"; with -o it ends with {"file", "texts", "width"}.
    """
    _check_output(output, force, pair, similarity)
    call = LineCall(ref, Input.of(file), as_json, compute, pair or similarity)
    model = compute.load_model(ref)
    if similarity:
        call.write_answers(lambda pairs: _cosines(model, pairs, compute.batch_size), _show_similarity)
    elif output is None:
        call.write_answers(lambda texts: model.embed(texts, batch_size=compute.batch_size), _show_vector)
    else:
        _save(output, _embed_all(model, call, output), call)


def _show_vector(vector: ndarray | None) -> Shown:
    numbers = None if vector is None else [float(number) for number in vector]
    return {"vector": numbers}, "" if numbers is None else json.dumps(numbers)


def _show_similarity(cosine: float | None) -> Shown:
    return {"similarity": cosine}, "" if cosine is None else f"{cosine:.6f}"


def _cosines(model: Model, pairs: list[tuple[str, str]], batch_size: int | None) -> list[float]:
    """Return the cosine of each pair of texts."""
    from clearhead.tasks.embed.use import similarity

    firsts, seconds = (list(texts) for texts in zip(*pairs, strict=True))
    cosines = similarity(
        model.tree, model.tokenizer, firsts, seconds, max_length=model.task.max_length, batch_size=batch_size
    )
    return [float(cosine) for cosine in cosines]


def _embed_all(model: Model, call: LineCall, output: Path) -> list[ndarray]:
    """Return the vectors of all lines.

    Raises:
        InputError: a line is empty.
    """
    rows: list[ndarray] = []

    def keep(line: Line, vector: ndarray | None) -> None:
        if vector is None:
            raise InputError(
                f"{call.lines.name}:{line.number}: the line is empty, and every row of {output} is a vector"
            )
        rows.append(vector)

    size = call.compute.batch_size
    answer_lines(
        call.lines, lambda texts: model.embed(texts, batch_size=size), keep, batch_size=size, paired=call.pair,
        output=output,
    )  # fmt: skip
    return rows


def _check_output(output: Path | None, force: bool, pair: bool, similarity: bool) -> None:
    from clearhead.base.files import absent, refuse_unwritable

    if similarity and (pair or output is not None):
        other = "--pair reads both texts as one" if pair else "-o keeps vectors"
        raise InputError(f"{other}, and --similarity compares two vectors: leave out one of them")
    if output is not None and output.suffix != ARRAY:
        raise InputError(f"-o writes a {ARRAY} file, but names {output}: give a name that ends in {ARRAY}")
    if force and output is None:
        raise InputError("--force has no effect without -o")
    if output is not None:
        refuse_unwritable(output, force=force)
        if not output.parent.is_dir():
            raise InputError(f"{output} cannot be written: {absent(output.parent, 'folder')}")


def _save(output: Path, rows: Sequence[ndarray], call: LineCall) -> None:
    """Write the vectors of all lines; the file appears when it is complete."""
    import numpy as np

    from clearhead.base.files import replacing

    if not rows:
        raise InputError(f"{call.lines.name}: there is no text to embed; expected at least one line")
    vectors = np.stack(rows)
    try:
        with replacing(output) as temporary, temporary.open("wb") as file:
            np.save(file, vectors, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}") from None
    print_message(f"{len(vectors)} vectors of width {vectors.shape[1]}")
    print_either(call.as_json, {"file": str(output), "texts": len(vectors), "width": vectors.shape[1]}, str(output))


@takes_compute_options
def answer(
    ref: Ref,
    question: Annotated[str, typer.Option("--question", metavar="TEXT", help="The question.")],
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="TEXT", help="The text with the answer; by default standard input."),
    ] = None,
    context_file: Annotated[
        Path | None, typer.Option("--context-file", metavar="FILE|-", help="A file with that text.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers.")] = 1,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="The text may hold no answer; then the answer is empty.")
    ] = False,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Find the answer to a question in a text.

    \b
    Example:
      clearhead answer ./model --question "Who slept?" --context "Ada slept."
      clearhead answer ./model --question "Who?" --context-file a.txt --top-k 3

    A line of output is an answer and, after a tab, its probability, best first. A long text is read in windows that
    overlap. --json writes {"question", "answers"}; an answer is {"text", "score", "start", "end"}, and start and end
    count the characters of the text.
    """
    text = _read_context(context, context_file)
    model = compute.load_model(ref)
    with counting("windows"):
        answers = model.answer(question, text, top_k=top_k, allow_no_answer=no_answer, batch_size=compute.batch_size)
    record = {"question": question, "answers": [asdict(answer) for answer in answers]}
    print_either(as_json, record, *(f"{one_line(answer.text)}\t{answer.score:.4f}" for answer in answers))


def _read_context(context: str | None, file: Path | None) -> str:
    """Return the given text, or the unchanged text of a file or of standard input."""
    from clearhead.base.files import decoded, read_text_file

    if context is not None and file is not None:
        raise InputError("--context and --context-file are two ways to give the text: give one of them")
    if context is not None:
        return context
    if file is None or is_standard_input(file):
        with at_rest():
            return decoded(sys.stdin.buffer.read(), "standard input")
    return read_text_file(file, "file")


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
    call = LineCall(ref, Input.of(file), as_json, compute, pair)
    model = call.load_model()
    call.write_answers(lambda texts: model.predict(texts, batch_size=compute.batch_size), _show_prediction)


def _show_prediction(answer: Any) -> Shown:
    value = _json_value(answer)
    return {"prediction": value}, _text_of(value)


def _json_value(value: Any) -> Any:
    """Return a prediction as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _text_of(value: Any) -> str:
    """Return the JSON value of a prediction for a person: of an object its first field, which says what it is."""
    if isinstance(value, list):
        return "\t".join(map(_text_of, value))
    if isinstance(value, dict):
        return _text_of(next(iter(value.values())))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else one_line(str(value))
