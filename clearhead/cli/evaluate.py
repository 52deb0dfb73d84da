"""`clearhead evaluate`: how good a model is on text with known answers, by what it was trained for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import print_json, print_result
from clearhead.cli.options import (
    BeamSize,
    ComputeOptions,
    FromLanguage,
    Json,
    LengthPenalty,
    Ref,
    ToLanguage,
    takes_compute_options,
)
from clearhead.errors import InputError

Source = Annotated[Path | None, typer.Option("--source", help="Text on the source side, one sentence in a line.")]
Target = Annotated[Path | None, typer.Option("--target", help="What belongs to it, line by line.")]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="F", help="Text as [data] names it: a file, a folder, JSON lines.")
]
Labels = Annotated[
    str | None, typer.Option("--labels", metavar="COLUMN|F", help="The column of the labels, or a file of them.")
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="COLUMN", help="The column, or field, of the text; by default text."),
]
PairColumn = Annotated[
    str | None, typer.Option("--pair", metavar="COLUMN|F", help="The column, or the file, of each second text.")
]
Document = Annotated[
    str | None, typer.Option("--document", help="What one text is: file (the default), line or paragraph.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="F.png", help="Draw the confusion matrix.")]
Window = Annotated[
    int | None, typer.Option("--window", min=1, help="Tokens read at once; by default what it was trained on.")
]
Stride = Annotated[
    int | None, typer.Option("--stride", min=1, help="Tokens from one window to the next; by default the window.")
]
Tokenize = Annotated[
    str | None,
    typer.Option("--tokenize", help="sacreBLEU's tokenisation; by default none for segmented text, else 13a."),
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Compare without case.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Keep the translations in this file.")]


@dataclass(frozen=True)
class Form:
    """What the evaluation of one kind of task takes.

    Attributes:
        needed: options that name its data.
        optional: options that it knows besides.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMS = {
    "translate": Form(
        ("--source", "--target"),
        ("--tokenize", "--lowercase", "--beam-size", "--length-penalty", "--from", "--to", "--output", "--batch-size"),
    ),
    "generate": Form(("--text",), ("--text-column", "--document", "--window", "--stride")),
    "fill": Form(("--text",), ("--text-column", "--document")),
    "denoise": Form(("--text",), ("--text-column", "--document")),
    "classify": Form(("--text", "--labels"), ("--text-column", "--pair", "--plot")),
    "tag": Form(("--text",)),
    "embed": Form(("--source", "--target"), ("--labels", "--batch-size")),
}


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        source, target, text, labels, text_column, pair, document: the data.
        plot: the picture of a confusion matrix.
        window, stride: how a text is cut.
        tokenize, lowercase, beam_size, length_penalty, output: how translations are found, compared and kept.
        from_language, to_language: codes, for a model of several languages.
        batch_size: texts computed together.
    """

    source: Path | None = None
    target: Path | None = None
    text: Path | None = None
    labels: str | None = None
    text_column: str | None = None
    pair: str | None = None
    document: str | None = None
    plot: Path | None = None
    window: int | None = None
    stride: int | None = None
    tokenize: str | None = None
    lowercase: bool = False
    beam_size: int | None = None
    length_penalty: float | None = None
    from_language: str | None = None
    to_language: str | None = None
    output: Path | None = None
    batch_size: int | None = None

    @property
    def options(self) -> list[str]:
        """The options that were given."""
        given = [name for name, value in vars(self).items() if value is not None and value is not False]
        return ["--" + name.removesuffix("_language").replace("_", "-") for name in given]


@takes_compute_options
def evaluate(
    ref: Ref,
    source: Source = None,
    target: Target = None,
    text: TextFile = None,
    labels: Labels = None,
    text_column: TextColumn = None,
    pair: PairColumn = None,
    document: Document = None,
    plot: Plot = None,
    window: Window = None,
    stride: Stride = None,
    tokenize: Tokenize = None,
    lowercase: Lowercase = False,
    beam_size: BeamSize = None,
    length_penalty: LengthPenalty = None,
    from_language: FromLanguage = None,
    to_language: ToLanguage = None,
    output: Output = None,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Measure a model on text with known answers, by what it was trained for.

    \b
    Example:
      clearhead evaluate runs/de-en --source test.de --target test.en          BLEU, chrF, loss, perplexity
      clearhead evaluate runs/stories --text test.txt --stride 64              loss, perplexity, bits per byte
      clearhead evaluate runs/reviews --text test.tsv --labels label           accuracy, macro F1, or Spearman
      clearhead evaluate runs/names --text test.conll                          entity-level F1
      clearhead evaluate runs/captions --source test.de --target test.en       recall@1, Spearman with --labels F

    Losses are mean cross-entropies in nats, end tokens counted. Translation is beam search; the score is the sum of
    log-probabilities / length ** A, where A is the length penalty, by default 1.0, and a sentence is finished early
    once no unfinished hypothesis can still beat the best finished one; a published checkpoint's own settings take the
    place of these defaults. With --stride below --window the tokens before a window's new ones are read, not counted
    again. --json ends with one object, for translations {"bleu", "chrf", "signature", "loss", "perplexity", "seconds"}
    and more.
    """
    request = Request(
        source, target, text, labels, text_column, pair, document, plot, window, stride, tokenize, lowercase,
        beam_size, length_penalty, from_language, to_language, output, compute.batch_size,
    )  # fmt: skip
    check_request(ref, request)
    from clearhead.evaluate.tasks import measure

    record, lines = measure(compute.load_model(ref), request)
    if as_json:
        print_json(record)
        return
    for line in lines:
        print_result(line)


def check_request(ref: str, request: Request) -> None:
    """Refuse options that do not suit what a model was trained for.

    Raises:
        InputError: one sentence that names all of them, or the reference leads nowhere.
    """
    from clearhead.hf.checkpoint import task_kind
    from clearhead.hf.files.hub import find_checkpoint
    from clearhead.runs.directory import model_files, read_task

    hf_folder = find_checkpoint(ref)
    kind = read_task(model_files(ref)[0]).kind if hf_folder is None else task_kind(hf_folder)
    # What mends text also answers it: a summary is measured as a translation is.
    kind = "translate" if kind == "denoise" and (request.source or request.target) else kind
    form = FORMS[kind]
    way = f"a model trained to '{kind}' is evaluated with {_with_values(form.needed)}"
    missing = [option for option in form.needed if option not in request.options]
    unused = [option for option in request.options if option not in (*form.needed, *form.optional)]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        raise InputError(f"{', '.join(unused)} {verb} no effect here: {way}")
    if missing:
        raise InputError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: {way}")
    if request.plot is not None and request.plot.suffix.lower() != ".png":
        raise InputError(f"the picture is a PNG, but --plot names {request.plot}: give a name that ends in .png")


def _with_values(options: Sequence[str]) -> str:
    values = {"--labels": "COLUMN|F"}
    return " ".join(f"{option} {values.get(option, 'F')}" for option in options)
