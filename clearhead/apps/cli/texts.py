"""Commands that apply a model to texts: `clearhead classify`, `tag`, `fill`, `embed`, `answer` and `predict`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import print_either
from clearhead.apps.cli.lines import InputLine, TextInput, answer_lines, is_standard_input, one_line
from clearhead.apps.cli.options import (
    ComputeOptions,
    JsonLines,
    LineFile,
    Paired,
    Ref,
    takes_compute_options,
)  # fmt: skip
from clearhead.apps.cli.outputs import STANDARD_INPUT, OutputOptions, VectorFile, explain_rounding
from clearhead.apps.cli.progress import pause_idle_time, show_counts
from clearhead.base.errors import InputError, nth_text

if TYPE_CHECKING:
    from numpy import ndarray

    from clearhead import Model
    from clearhead.tasks.answer.use import Answer
    from clearhead.tasks.classify.use import Classification
    from clearhead.tasks.fill.use import Filled
    from clearhead.tasks.tag.use import Entity

ARRAY = ".npy"
Shown = tuple[dict[str, object], str]
"""The JSON values and the output line of one answer."""


@dataclass(frozen=True)
class LineCall:
    """Arguments of a command with one answer per line of input: model, texts and form of the output.

    Attributes:
        ref: the reference of the model.
        lines: the input texts.
        as_json: True to write each answer as JSON.
        compute: the options for running the model.
        pair: True if each line holds two texts with a tab between them.
    """

    ref: str
    lines: TextInput
    as_json: bool
    compute: ComputeOptions
    pair: bool = False

    def load_model(self) -> Model:
        """Load the model, and refuse single texts for a model trained on pairs.

        Raises:
            InputError: the model cannot be loaded, or it was trained on pairs and `pair` is False.
        """
        model = self.compute.load_model(self.ref)
        if model.task.is_paired and not self.pair:
            raise InputError(
                "this model was trained on pairs: add --pair, and put a tab between the two texts of a line"
            )
        explain_rounding(model, self.lines.output)
        return model

    def write_answers(
        self, model: Model, answer: Callable[[list[Any]], Iterable[Any]], show: Callable[[Any], Shown]
    ) -> None:
        """Compute an answer for every input line, and write it.

        Args:
            model: the model.
            answer: function that answers a list of texts or pairs.
            show: function that returns the JSON values and the line of an answer; None for an empty line.
        """

        def write(line: InputLine, value: Any) -> None:
            record, text = show(value)
            print_either(self.as_json, {**line.record(), **record}, text)

        self.answer_lines(model, answer, write)

    def answer_lines(
        self,
        model: Model,
        answer: Callable[[list[Any]], Iterable[Any]],
        show: Callable[[InputLine, Any], None],
    ) -> None:
        """Compute an answer for every input line, and show it with its line; see `answer_lines`."""
        from clearhead.tasks.outputs import texts_together

        largest, size = texts_together(model.module), self.compute.batch_size
        answer_lines(self.lines, answer, show, batch_size=size, paired=self.pair, largest=largest)


@takes_compute_options
def classify(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    as_json: JsonLines = False,
    *,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Classify texts, one line in, one line out.

    \b
    Example:
      clearhead classify runs/reviews reviews.txt > labels.txt
      echo "a warm and funny film" | clearhead classify runs/reviews
      clearhead classify runs/paraphrases pairs.tsv --pair --json

    A line of output is the most probable label and, after a tab, its probability. A model that may give several labels
    writes all labels of probability 0.5 or more, with commas between them. A regression model writes its number. An
    empty line gives an empty line. --json writes {"index", "text", "label", "labels", "probability", "probabilities",
    "is_cut"}, or "value" instead of labels. "is_cut" is true if the text was truncated.
    """
    call = LineCall(ref, TextInput.of(file, answers), as_json, compute, pair)
    model = call.load_model()
    call.write_answers(model, lambda texts: model.classify(texts, batch_size=compute.batch_size), _show_classification)


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
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Tag texts, one line in, one line out.

    \b
    Example:
      clearhead tag runs/names news.txt
      echo "Anna flew from Oslo to Rome." | clearhead tag runs/names --json

    A line of output holds the entities of the text with tabs between them, each as "label start-end text". The
    characters count from 0, and the end is the index after the last one. A text without entities, and an empty line,
    give an empty line. With --json, a line is {"index", "text", "entities"}; an entity is {"label", "text", "start",
    "end", "probability"}.
    """
    call = LineCall(ref, TextInput.of(file, answers), as_json, compute)
    model = call.load_model()
    call.write_answers(model, lambda texts: model.tag(texts, batch_size=compute.batch_size), _show_entities)


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
        Path | None, typer.Option("--file", metavar="FILE|-", help="A file of texts, one per line, instead of TEXT.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="The number of candidates per blank.")] = 5,
    as_json: JsonLines = False,
    *,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Fill the blanks of a text with the most probable words, one line in, one line out.

    \b
    Example:
      clearhead fill runs/captions "A dog ___ through the snow."
      clearhead fill runs/captions --file captions.txt --top-k 1 | cut -f 1

    A blank is filled with one entry of the model's vocabulary. A line of output holds the filled text and then, after a
    tab for each blank, its candidates with their probabilities. An empty line gives an empty line. --json writes
    {"index", "text", "filled", "blanks"}. A blank is a list of {"text", "token", "probability", "start", "end",
    "filled"}, best first; start and end count the characters of the given text.
    """
    _check_source(text, file, answers, compute.batch_size)
    lines = TextInput.of(file or STANDARD_INPUT, answers) if text == "-" else TextInput(None, [[text]], 1)
    call = LineCall(ref, lines, as_json, compute)
    model = call.load_model()
    call.write_answers(model, lambda texts: model.fill(texts, top_k=top_k, batch_size=compute.batch_size), _show_blanks)


def _show_blanks(answer: list[list[Filled]] | None) -> Shown:
    blanks = answer or []
    filled = blanks[0][0].filled if blanks else ""
    columns = ["  ".join(f"{one_line(word.text)} {word.probability:.4f}" for word in blank) for blank in blanks]
    record: dict[str, object] = {
        "filled": filled,
        "blanks": [[asdict(candidate) for candidate in blank] for blank in blanks],
    }
    return record, "\t".join([one_line(filled), *columns])


def _check_source(text: str, file: Path | None, answers: OutputOptions, batch_size: int | None) -> None:
    if text == "-":
        return
    answers.refuse_unused("on a single TEXT; give a file of texts with --file")
    if file is not None:
        raise InputError("TEXT and --file both give the text: use one of them")
    if batch_size is not None:
        raise InputError("--batch-size has no effect on a single TEXT; leave it out, or give a file with --file")
    if "\n" in text:
        raise InputError("TEXT must be a single line; give several lines in a file with --file")


@takes_compute_options
def embed(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Write the cosine of two texts per line, separated by a tab.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object per line of input; with -o only one.")
    ] = False,
    *,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Compute a vector for each text, one line in, one line out.

    \b
    Example:
      clearhead embed runs/captions captions.txt -o captions.npy
      clearhead embed runs/captions pairs.tsv --similarity
      echo "two dogs in the snow" | clearhead embed runs/captions --json

    The model defines pooling and normalization. Without -o, a line of output is the vector as a JSON list. With -o, the
    output is a .npy file of float32 with one row per line; each share is such a file. With --pair, the two texts of a
    line are read together and have one vector. With --similarity, each text has its vector, and the output is their
    cosine, from -1 to 1, as text even with -o.

    An empty line has no vector: its line of output is empty, or null in JSON, and a .npy file refuses it. With --json,
    a line is {"index", "text", "vector"}, with "pair" for two texts, or "similarity" instead of "vector". With -o, the
    last line is {"file", "texts", "width"}.
    """
    _check_embed_options(answers.output, pair, similarity)
    as_rows = answers.output is not None and not similarity
    lines = TextInput.of(file, answers, VectorFile) if as_rows else TextInput.of(file, answers)
    call = LineCall(ref, lines, as_json, compute, pair or similarity)
    model = call.load_model()
    if similarity:
        call.write_answers(model, lambda pairs: _cosines(model, pairs, compute.batch_size), _show_similarity)
    elif isinstance(lines.output, VectorFile):
        _write_vectors(model, call, lines.output)
    else:
        call.write_answers(model, lambda texts: model.embed(texts, batch_size=compute.batch_size), _show_vector)


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


def _write_vectors(model: Model, call: LineCall, output: VectorFile) -> None:
    """Write the vectors of all lines to a .npy file.

    Raises:
        InputError: a line is empty.
    """
    from clearhead.tasks.embed.use import vector_width

    def add(line: InputLine, vector: ndarray | None) -> None:
        if vector is None:
            raise InputError(
                f"{call.lines.name}:{line.number}: the line is empty and has no vector for {output.path}; remove it"
            )
        output.add(vector)

    output.width, size = vector_width(model.tree), call.compute.batch_size
    call.answer_lines(model, lambda texts: model.embed(texts, batch_size=size), add)


def _check_embed_options(output: Path | None, pair: bool, similarity: bool) -> None:
    if similarity and pair:
        raise InputError("--pair makes one vector of both texts, --similarity compares two vectors: leave one out")
    if output is not None and (output.suffix == ARRAY) == similarity:
        form = f"lines of text with --similarity, got {output}: give a name that does not end"
        if not similarity:
            form = f"a {ARRAY} file, got {output}: give a name that ends"
        raise InputError(f"-o writes {form} in {ARRAY}")


ContextText = Annotated[
    str, typer.Option("--context", metavar="TEXT", help="The text with the answer; by default standard input.")
]
ContextFile = Annotated[Path, typer.Option("--context-file", metavar="FILE|-", help="A file with the text.")]
QuestionFile = Annotated[
    Path, typer.Option("--file", metavar="FILE|-", help="Questions and contexts with a tab between them, one per line.")
]


@takes_compute_options
def answer(
    ref: Ref,
    question: Annotated[str | None, typer.Option("--question", metavar="TEXT", help="The question.")] = None,
    context: ContextText | None = None,
    context_file: ContextFile | None = None,
    file: QuestionFile | None = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="The number of answers.")] = 1,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="Allow an empty answer, if the text has none.")
    ] = False,
    doc_stride: Annotated[
        int | None,
        typer.Option("--doc-stride", min=0, help="The tokens that neighbouring windows share; at most 128 by default."),
    ] = None,
    align_to_words: Annotated[
        bool, typer.Option("--align-to-words", help="Extend answers to whole words, and add scores of equal texts.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Make the last line of stdout one JSON object; with --file every line."),
    ] = False,
    *,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Find the answer to a question in a text, or the answers to a file of questions.

    \b
    Example:
      clearhead answer ./model --question "Who slept?" --context "Ada slept."
      clearhead answer ./model --question "Who?" --context-file a.txt --top-k 3
      clearhead answer ./model --file questions.tsv -o answers.tsv

    A line of output is an answer and, after a tab, its probability, best first. A long text is read in overlapping
    windows. With --json, the output is {"question", "answers"}; an answer is {"text", "score", "start", "end"}, and
    start and end count the characters of the text. With --file, all answers to a question are in one line, with tabs
    between them. Each line of --json is then {"index", "text", "pair", "answers"}, where "text" is the question.
    """

    options: dict[str, Any] = {
        "top_k": top_k, "allow_no_answer": no_answer, "doc_stride": doc_stride, "align_to_words": align_to_words,
        "batch_size": compute.batch_size,
    }  # fmt: skip
    if file is not None:
        if question is not None or context is not None or context_file is not None:
            raise InputError("--file has questions and contexts: leave out --question, --context and --context-file")
        call = LineCall(ref, TextInput.of(file, answers), as_json, compute, pair=True)
        model = call.load_model()
        call.write_answers(model, partial(_answer_each, model, options), _show_answers)
        return
    answers.refuse_unused("without --file")
    if question is None:
        raise InputError("the question is missing: give --question and a context, or --file with both")
    text = _read_context(context, context_file)
    model = compute.load_model(ref)
    with show_counts("windows"):
        spans = model.answer(question, text, **options)
    lines = (_show_answers([span])[1] for span in spans)
    print_either(as_json, {"question": question, **_show_answers(spans)[0]}, *lines)


def _answer_each(model: Model, options: dict[str, Any], pairs: list[tuple[str, str]]) -> list[list[Answer]]:
    """Return the answers to each question of a list of (question, context) pairs.

    Raises:
        InputError: a question or context is empty; the message names the pair.
    """
    from clearhead.tasks.answer.use import answer_pairs

    for number, pair in enumerate(pairs, start=1):
        for name, text in zip(("question", "context"), pair, strict=True):
            if not text.strip():
                raise InputError(nth_text(number, name) + " is empty")
    return answer_pairs(model.tree, model.tokenizer, model.task, pairs, **options)


def _show_answers(answers: list[Answer] | None) -> Shown:
    columns = (f"{one_line(answer.text)}\t{answer.score:.4f}" for answer in answers or [])
    return {"answers": [asdict(answer) for answer in answers or []]}, "\t".join(columns)


def _read_context(context: str | None, file: Path | None) -> str:
    """Return the context: the given text, or the content of a file or of standard input."""
    from clearhead.base.files import decode_text, read_text_file

    if context is not None and file is not None:
        raise InputError("--context and --context-file both give the text: use one of them")
    if context is not None:
        return context
    if file is None or is_standard_input(file):
        with pause_idle_time():
            return decode_text(sys.stdin.buffer.read(), "standard input")
    return read_text_file(file, "file")


@takes_compute_options
def predict(
    ref: Ref,
    file: LineFile = STANDARD_INPUT,
    pair: Paired = False,
    as_json: JsonLines = False,
    *,
    answers: OutputOptions,
    compute: ComputeOptions,
) -> None:
    """Use a model for the task it was trained on, one line in, one line out.

    \b
    Example:
      clearhead predict runs/grades essays.txt > grades.txt
      echo "a warm and funny film" | clearhead predict runs/reviews --json

    This command serves tasks of other installed packages. The tasks of clearhead also have separate commands with more
    options: translate, generate, fill, classify, tag, embed and answer. A line of output is the text, label or number;
    several are separated by tabs. An empty line gives an empty line. --json writes {"index", "text", "prediction"}.
    """
    call = LineCall(ref, TextInput.of(file, answers), as_json, compute, pair)
    model = call.load_model()
    call.write_answers(model, lambda texts: model.predict(texts, batch_size=compute.batch_size), _show_prediction)


def _show_prediction(answer: Any) -> Shown:
    value = _json_value(answer)
    return {"prediction": value}, _value_text(value)


def _json_value(value: Any) -> Any:
    """Return a prediction as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _value_text(value: Any) -> str:
    """Return the JSON value of a prediction as text; an object is shown by its first field."""
    if isinstance(value, list):
        return "\t".join(map(_value_text, value))
    if isinstance(value, dict):
        return _value_text(next(iter(value.values())))
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else one_line(str(value))
