"""`clearhead evaluate`: how good a model is on data with known answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.console import print_json, print_message, print_result, shown
from clearhead.cli.lines import read_numbers
from clearhead.cli.options import (
    BeamSize,
    ComputeOptions,
    Force,
    FromLanguage,
    Json,
    LengthPenalty,
    Pattern,
    Ref,
    ToLanguage,
    located,
    takes_compute_options,
)
from clearhead.cli.progress import Progress
from clearhead.errors import InputError
from clearhead.watching import watching_batches

Source = Annotated[Path | None, typer.Option("--source", help="Text on the source side, one sentence in a line.")]
Target = Annotated[Path | None, typer.Option("--target", help="Its translation or partner, line by line.")]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="F", help="Text: a file, a folder or JSON lines, as under [data].")
]
Labels = Annotated[
    str | None, typer.Option("--labels", metavar="COLUMN|F", help="The column of the labels, or a file of them.")
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="COLUMN", help="The column, or field, of the text; else as in training."),
]
PairColumn = Annotated[
    str | None, typer.Option("--pair", metavar="COLUMN|F", help="The column, or the file, of each second text.")
]
Document = Annotated[
    str | None, typer.Option("--document", help="What one document is: file, line or paragraph; else as in training.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="F.png", help="Draw the confusion matrix.")]
Window = Annotated[int | None, typer.Option("--window", min=1, help="Tokens read at once; by default as in training.")]
Stride = Annotated[
    int | None, typer.Option("--stride", min=1, help="Tokens from one window to the next; by default the window.")
]
Tokenize = Annotated[
    str | None,
    typer.Option("--tokenize", help="sacreBLEU's tokenisation; by default none for segmented text, else 13a."),
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Compare without case.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the translations to this file.")]


# Parameters that name the data.
DATA = ("source", "target", "text", "labels", "text_column", "pair", "document", "pattern")
_SEARCH = ("--tokenize", "--lowercase", "--beam-size", "--length-penalty", "--from", "--to", "--output", "--batch-size")
# For each task the options that name its data, and the others that it takes.
OPTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "translate": (("--source", "--target"), _SEARCH),
    "generate": (("--text",), ("--text-column", "--document", "--pattern", "--window", "--stride", "--batch-size")),
    "fill": (("--text",), ("--text-column", "--document", "--pattern", "--batch-size")),
    "denoise": (("--text",), ("--text-column", "--document", "--pattern", "--batch-size")),
    "classify": (("--text", "--labels"), ("--text-column", "--pair", "--plot", "--batch-size")),
    "tag": (("--text",), ("--batch-size",)),
    "embed": (("--source", "--target"), ("--labels", "--batch-size")),
    "answer": (("--text",), ("--batch-size",)),
}


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
    pattern: Pattern = None,
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
    force: Force = False,
    as_json: Json = False,
    *,
    compute: ComputeOptions,
) -> None:
    """Measure a model on data with known answers, by the task it was trained for.

    \b
    Example:
      clearhead evaluate runs/de-en --source test.de --target test.en
      clearhead evaluate runs/stories --text test.txt --stride 64
      clearhead evaluate runs/reviews --text test.tsv --labels label

    \b
    What is measured:
      translate  BLEU, chrF, loss, perplexity
      generate   loss, perplexity, bits per byte; fill, denoise: loss, accuracy
      classify   accuracy and macro F1, or Spearman
      tag        entity-level F1
      answer     exact match and F1
      embed      recall@1; with --labels F: Spearman

    Losses are mean cross-entropies in nats, end tokens counted. Translation is beam search; the score is the sum of
    log-probabilities / length ** A, where A is the length penalty, by default 1.0, and a sentence is finished early
    once no unfinished hypothesis can still beat the best finished one; a checkpoint's own settings replace these
    defaults. With --stride below --window, windows overlap and each token is counted once. --json ends with one object,
    for translations {"bleu", "chrf", "signature", "loss", "perplexity", "seconds"} and more.
    """
    _run({name: value for name, value in locals().items() if value is not None and value is not False}, compute)


def _run(given: Mapping[str, Any], compute: ComputeOptions) -> None:
    """Evaluate with the options that were given, and print the result."""
    flags = [_flag(name) for name in given if name not in ("ref", "as_json", "force", "compute")]
    ref = located(given["ref"])
    kind = _check_options(ref, [*flags, *(["--batch-size"] if compute.batch_size is not None else [])])
    plot, force = given.get("plot"), "force" in given
    if plot is not None and plot.suffix.lower() != ".png":
        raise InputError(f"the picture is a PNG, but --plot names {plot}: give a name that ends in .png")
    from clearhead.evaluate.tasks import EvaluateKwargs
    from clearhead.files import refuse_unwritable, write_output

    written = [path for path in (plot, given.get("output")) if path is not None]
    if force and not written:
        raise InputError("--force has no effect without --output or --plot")
    for path in written:
        refuse_unwritable(path, force=force)
    model = compute.load_model(ref)
    if plot is not None and model.task.label_kind != "single_label":
        raise InputError("--plot draws which class is taken for which, and this model gives no single class")
    options = {name: value for name, value in given.items() if name in EvaluateKwargs.__annotations__}
    if kind == "embed" and "labels" in given:
        options["similarities"] = read_numbers(Path(given["labels"]))
    if compute.batch_size is not None:
        options["batch_size"] = compute.batch_size
    data = _data(kind, {name: value for name, value in given.items() if name in DATA})
    with (
        Progress("windows" if kind == "generate" else "texts") as progress,
        watching_batches(progress.update),
    ):
        record = model.evaluate(data, notify=print_message, **options)
    translations = record.pop("translations", None)
    if "output" in given:
        write_output(given["output"], "".join(f"{shown(line)}\n" for line in translations), force=force)
    if plot is not None:
        _draw(record, plot)
    if "as_json" in given:
        print_json(record)
        return
    for line in _lines(record):
        print_result(line)


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_language").replace("_", "-")


def _check_options(ref: str, options: Sequence[str]) -> str:
    """Refuse options that have no effect on the model's task, and return the task.

    Raises:
        InputError: one sentence that names all of them, or the reference leads nowhere.
    """
    from clearhead.hf.files.hub import find_checkpoint
    from clearhead.hf.variants import task_kind
    from clearhead.runs.directory import model_files, read_task

    hf_folder = find_checkpoint(ref)
    reading = None
    if hf_folder is not None:
        kind: str = task_kind(hf_folder)
    else:
        record = read_task(model_files(ref)[0])
        kind, reading = record.kind, record.reading
    # A denoising model with sources and targets, such as one for summaries, is measured as a translation model.
    kind = "translate" if kind == "denoise" and {"--source", "--target"} & {*options} else kind
    required, optional = OPTIONS[kind]
    if kind == "classify" and reading is not None and "labels" in reading.keys:
        # The column of the labels is that of the training data.
        required, optional = ("--text",), ("--labels", *optional)
    usage = " ".join(f"{option} {'COLUMN|F' if option == '--labels' else 'F'}" for option in required)
    usage = f"a model trained to '{kind}' is evaluated with {usage}"
    missing = [option for option in required if option not in options]
    unused = [option for option in options if option not in (*required, *optional)]
    if unused:
        raise InputError(f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect here: {usage}")
    if missing:
        raise InputError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: {usage}")
    return kind


def _data(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [data] table of a run file that names the same data."""
    from clearhead.data.sources.labelled import labelled_table

    if kind == "classify":
        labelled = {"labels": None, "text_column": None, "pair": None, **given}
        return labelled_table(**labelled)
    keys = {"text_column": "field"}
    return {keys.get(name, name): str(value) for name, value in given.items() if kind != "embed" or name != "labels"}


def _draw(record: dict[str, Any], path: Path) -> None:
    """Draw the confusion matrix of a record, and name the picture there."""
    import numpy as np

    from clearhead.view.confusion import draw_confusion

    draw_confusion(np.array(record["confusion"]), list(record["labels"]), path, title="Expected and predicted labels")
    print_message(f"confusion matrix: {path}")
    record["picture"] = str(path)


def _lines(record: Mapping[str, Any]) -> list[str]:
    """Return the numbers for a person."""
    perplexity = math.inf if record.get("perplexity") is None else record["perplexity"]
    match record:
        case {"bleu": bleu, "chrf": chrf, "loss": loss, "sentences_per_second": speed}:
            done = f"({record['sentences']} in {record['seconds']:.1f} s)"
            return _aligned(
                {
                    "BLEU": f"{bleu:.2f}   {record['signature']}",
                    "chrF": f"{chrf:.2f}   {record['chrf_signature']}",
                    "loss": f"{loss:.4f} nats per token",
                    "perplexity": f"{perplexity:.3f}",
                    "speed": f"{speed:.1f} sentences per second {done}",
                }
            )
        case {"bits_per_byte": bits, "loss": loss, "tokens": tokens, "seconds": seconds}:
            done = f"({tokens:,} in {seconds:.1f} s)"
            return _aligned(
                {
                    "loss": f"{loss:.4f} nats per token",
                    "perplexity": f"{perplexity:.3f}",
                    "bits per byte": f"{bits:.4f}",
                    "speed": f"{tokens / max(seconds, 1e-9):,.0f} tokens per second {done}",
                }
            )
        case {"confusion": _, "accuracy": accuracy, "macro_f1": macro_f1, "labels": labels}:
            scores = _aligned({"accuracy": _percent(accuracy), "macro F1": _percent(macro_f1)})
            return [*scores, "", *_f1_table("label", labels, "texts")]
        case {"types": types, "tag_accuracy": accuracy, "words": words}:
            whole = {**record, "count": sum(row["count"] for row in types.values())}
            share = f"accuracy of tags  {_percent(accuracy)} of {words} words"
            return [*_f1_table("entities", {"all": whole, **types}, "count"), "", share]
        case {"exact_match": _, "f1": _, "questions": _}:
            return _answer_table(record)
        case {"accuracy": accuracy, "loss": loss}:
            return _aligned(
                {
                    "loss": f"{loss:.4f} nats per hidden token",
                    "perplexity": f"{perplexity:.3f}",
                    "accuracy": f"{_percent(accuracy)} of the hidden tokens come first",
                }
            )
        case {"micro_f1": micro_f1, "macro_f1": macro_f1, "exact": exact}:
            exact = f"{_percent(exact)} of the texts have exactly their labels"
            return _aligned({"micro F1": _percent(micro_f1), "macro F1": _percent(macro_f1), "exact match": exact})
        case {"recall_at_1": recall, "forward": forward, "backward": backward, "pairs": pairs}:
            return _aligned(
                {
                    "recall@1": f"{_percent(forward)} of the sources find their target among {pairs}",
                    "": f"{_percent(backward)} of the targets find their source",
                    "mean": _percent(recall),
                }
            )
    rows = {"Spearman": f"{record['spearman']:.4f}", "Pearson": f"{record['pearson']:.4f}"}
    if "mean_squared_error" in record:
        rows["mean squared error"] = f"{record['mean_squared_error']:.6g}"
    return _aligned(rows)


def _aligned(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _f1_table(title: str, rows: Mapping[str, Mapping[str, float | None]], counted: str) -> list[str]:
    """Return precision, recall, F1 and count of each row as a table."""
    width = max(len(title), *map(len, rows))
    lines = [f"{title:<{width}}  precision  recall      F1   {counted}"]
    for name, row in rows.items():
        shares = (row["precision"], row["recall"], row["f1"])
        columns = ("-" if share is None else f"{100 * share:.2f}" for share in shares)
        lines.append("{:<{}}  {:>9}  {:>6}  {:>6}  {:>6}".format(name, width, *columns, row["count"]))
    return lines


def _answer_table(record: Mapping[str, Any]) -> list[str]:
    """Return exact match and F1 of all questions, and of those with and without an answer where there are both."""
    rows = {
        "all": record,
        **{key.replace("_", " "): record[key] for key in ("has_answer", "no_answer") if key in record},
    }
    width = max(len("questions"), *map(len, rows))
    lines = [f"{'questions':<{width}}  exact match      F1   count"]
    for name, row in rows.items():
        numbers = (f"{100 * row[key]:.2f}" for key in ("exact_match", "f1"))
        lines.append("{:<{}}  {:>11}  {:>6}  {:>6}".format(name, width, *numbers, row["questions"]))
    return lines
