"""`clearhead evaluate`: measure a model on data with known answers."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.console import make_printable, print_either, print_json, print_message, print_result
from clearhead.apps.cli.lines import read_numbers
from clearhead.apps.cli.options import (
    BeamSize,
    ComputeOptions,
    Force,
    FromLanguage,
    Json,
    LengthPenalty,
    Pattern,
    Ref,
    ToLanguage,
    locate_model,
    takes_compute_options,
)
from clearhead.apps.cli.progress import show_counts
from clearhead.base.errors import InputError
from clearhead.spec.tasks.base import Task
from clearhead.spec.tasks.registry import find_task, list_tasks

if TYPE_CHECKING:
    from clearhead import Model

Source = Annotated[Path | None, typer.Option("--source", help="Source text, one sentence per line.")]
Target = Annotated[Path | None, typer.Option("--target", help="The translation or partner of each source line.")]
TextFile = Annotated[
    Path | None, typer.Option("--text", metavar="F", help="Text: a file, a folder or JSON lines, as in [data].")
]
Labels = Annotated[
    str | None, typer.Option("--labels", metavar="COLUMN|F", help="The column of the labels, or a file of them.")
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="COLUMN", help="The column or field of the text; by default as in training."),
]
PairColumn = Annotated[
    str | None, typer.Option("--pair", metavar="COLUMN|F", help="The column or the file of the second texts.")
]
Document = Annotated[
    str | None, typer.Option("--document", help="One document: file, line or paragraph; by default as in training.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="F.png", help="Draw the confusion matrix.")]
Window = Annotated[int | None, typer.Option("--window", min=1, help="Tokens per window; by default as in training.")]
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
_NAMES = ("source", "target", "text", "text_column", "labels")
_NO_OTHERS: Mapping[str, str] = MappingProxyType({})


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
    others: Mapping[str, str] = _NO_OTHERS,
    *,
    compute: ComputeOptions,
) -> None:
    """Measure a model on data with known answers, by the metrics of its task.

    \b
    Example:
      clearhead evaluate runs/de-en
      clearhead evaluate runs/de-en --source test.de --target test.en
      clearhead evaluate runs/stories --text test.txt --stride 64
      clearhead evaluate runs/reviews --text test.tsv --labels label

    \b
    Without data options, the validation data of the run file is used.

    \b
    Metrics by task:
    {measures}

    Losses are mean cross-entropies in nats, including end tokens. Translation uses beam search. The score of a
    hypothesis is its log-probability / length ** A, where A is the length penalty, by default 1.0. The search for a
    sentence stops once no unfinished hypothesis can still beat the best finished one. Settings of the checkpoint
    replace these defaults. With --stride below --window, windows overlap, and each token is counted once. With --json,
    the last line is one object, for translations {"bleu", "chrf", "signature", "loss", "perplexity", "seconds"} and
    more.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("others", "compute")} | dict(others)
    _run({name: value for name, value in arguments.items() if value is not None and value is not False}, compute)


def add_task_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the data options that only some tasks have; the command gets them as the parameter `others`."""
    signature = inspect.signature(command)
    names = {name for task in list_tasks() for name in task.evaluate.names} - signature.parameters.keys()
    helps = {name: text for task in list_tasks() for name, text in task.options.items() if name in names}

    @wraps(command)
    def run(**values: Any) -> None:
        command(**values, others={name: values.pop(name) for name in helps})

    parameters = {name: parameter for name, parameter in signature.parameters.items() if name != "others"}
    for name, text in helps.items():
        annotation = Annotated[str, typer.Option(_flag(name), metavar="VALUE", help=text)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters[name] = inspect.Parameter(name, kind, default=None, annotation=annotation)
    run.__signature__ = signature.replace(parameters=[*parameters.values()])  # type: ignore[attr-defined]
    return run


def _run(arguments: Mapping[str, Any], compute: ComputeOptions) -> None:
    """Evaluate the model with the given options, and print the result."""
    if compute.batch_size is not None:
        arguments = {**arguments, "batch_size": compute.batch_size}
    ref = locate_model(arguments["ref"])
    valid = _validation_data(ref, arguments)
    named = [name for name in arguments if name not in ("ref", "as_json", "force")]
    task = _check_options(ref, named, is_named=valid is None)
    plot, force = arguments.get("plot"), "force" in arguments
    if plot is not None and plot.suffix.lower() != ".png":
        raise InputError(f"--plot {plot} is not a PNG: give a name that ends in .png")
    from clearhead.base.files import refuse_unwritable, write_output
    from clearhead.tasks.evaluate.options import EvaluateKwargs

    written = [path for path in (plot, arguments.get("output")) if path is not None]
    if force and not written:
        raise InputError("--force has no effect without --output or --plot; leave it out")
    for path in written:
        refuse_unwritable(path, force=force)
    model = compute.load_model(ref)
    if valid is not None:
        print_message(f"measuring {ref} on its validation data: data.valid = {json.dumps(valid, default=str)}")
    if isinstance(valid, float):
        _validate(model, ref, arguments)
        return
    if plot is not None and model.task.label_kind != "single_label":
        raise InputError("--plot draws a confusion matrix, which needs a model with one label per text; leave it out")
    options = {name: value for name, value in arguments.items() if name in EvaluateKwargs.__annotations__}
    if "similarities" in task.evaluate.optional and "labels" in arguments:
        options["similarities"] = read_numbers(Path(arguments["labels"]))
    with show_counts("windows" if "window" in task.evaluate.optional else "texts"):
        result = model.evaluate(valid or _data_table(task, arguments), **options)
    record = result.record()
    translations = record.pop("translations", None)
    if "output" in arguments:
        write_output(arguments["output"], "".join(f"{make_printable(line)}\n" for line in translations), force=force)
    if plot is not None:
        _draw(record, plot)
    if "as_json" in arguments:
        print_json(record)
        return
    for line in result.lines():
        print_result(line)


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_language").replace("_", "-")


def _validation_data(ref: str, options: Mapping[str, Any]) -> Any:
    """Return `data.valid` of the run file, or None if options name data or the model has no run file."""
    from clearhead.checkpoints.reference import ModelReference
    from clearhead.checkpoints.runs.directory import RUN_FILE, is_run_directory, read_configuration

    run = ModelReference.parse(ref).folder
    names_data = any(name in options for name in itertools.chain(DATA, *(task.options for task in list_tasks())))
    if names_data or not is_run_directory(run) or not (run / RUN_FILE).is_file():
        return None
    match read_configuration(run / RUN_FILE):
        case {"data": {"valid": dict() | float() as valid}}:
            return valid
    return None


def _validate(model: Model, ref: str, options: Mapping[str, Any]) -> None:
    """Print the loss and score of a model on the part of the training data that its run held out."""
    import torch

    from clearhead.checkpoints.reference import ModelReference
    from clearhead.checkpoints.runs.directory import RUN_FILE, read_configuration
    from clearhead.training.init_from import load_resumed_model
    from clearhead.training.progress.reports import TrainingProgress
    from clearhead.training.runfile.read import parse_run_file, toml_text
    from clearhead.training.task_setup import TaskSetup, prepare_task

    unused = [_flag(name) for name in options if name not in ("ref", "as_json")]
    if unused:
        raise InputError(f"{', '.join(unused)}: no effect on held-out training data; name other data")
    run = ModelReference.parse(ref).folder
    tables = read_configuration(run / RUN_FILE)
    if isinstance(tables.get("model"), dict):
        tables["model"].pop("parts", None)  # a run directory imports no code: --parts has done so
    run_file = parse_run_file(toml_text(tables), str(run / RUN_FILE))
    initial = load_resumed_model(run) if run_file.task.init else None
    device = next(model.module.parameters()).device
    parts = prepare_task(TaskSetup(run_file, lambda _: model.tokenizers, initial, TrainingProgress(), device))
    with torch.inference_mode():
        measured = parts.validate(model.exact.module)
    score = "" if measured.score is None else f", {parts.score_name} {measured.score:.2f}"
    print_either("as_json" in options, asdict(measured), f"loss {measured.loss:.4f}{score}")


def _check_options(ref: str, options: Sequence[str], *, is_named: bool) -> Task:
    """Refuse options that have no effect on the task of the model, and return this task.

    Args:
        ref: the reference of the model.
        options: the parameter names of the given options.
        is_named: True if the options must name all data that the task needs.

    Raises:
        InputError: options without effect or missing options, all in one sentence; or the model does not exist.
    """
    from clearhead.checkpoints.hf.checkpoint import task_kind
    from clearhead.checkpoints.reference import ModelReference
    from clearhead.checkpoints.runs.directory import find_files, read_task

    reference = ModelReference.locate(ref)
    hf_folder = reference.checkpoint_folder()
    reading = None
    if hf_folder is not None:
        task = find_task(task_kind(hf_folder))
    else:
        record = read_task(find_files(reference).folder)
        task, reading = find_task(record.kind), record.reading
    if task.measured_on_pairs_as and {"source", "target"} & {*options}:
        task = find_task(task.measured_on_pairs_as)
    required, optional = task.evaluate.data, task.evaluate.optional
    if "labels" in required and reading is not None and "labels" in reading.keys:
        # Without --labels, the column of the training data has the labels.
        required, optional = ("text",), ("labels", *optional)
    values = {"labels": "COLUMN|F"}
    usage = " ".join(f"{_flag(name)} {values.get(name, 'F')}" for name in required)
    usage = f"a model trained to '{task.kind}' is evaluated with {usage}"
    missing = [_flag(name) for name in required if is_named and name not in options]
    unused = [_flag(name) for name in options if name not in (*required, *optional)]
    if unused:
        raise InputError(f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect here: {usage}")
    if missing:
        raise InputError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: {usage}")
    return task


def _data_table(task: Task, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given data as a [data] table of a run file."""
    from clearhead.data.sources.named import pair_table, text_table
    from clearhead.tasks.classify.data import labelled_table

    named = {name: arguments[name] for name in (*DATA, *task.options) if name in arguments}
    if "labels" in task.evaluate.data:
        return labelled_table(**{"labels": None, "text_column": None, "pair": None, **named}, split=None)
    others = {name: str(value) for name, value in named.items() if name not in _NAMES}
    if "source" in named:
        return pair_table(named["source"], named["target"], split=None) | others
    return text_table(named["text"], named.get("text_column"), split=None) | others


def _draw(record: dict[str, Any], path: Path) -> None:
    """Draw the confusion matrix of a record, and add the picture's path to the record."""
    import numpy as np

    from clearhead.interpret.view.confusion import draw_confusion

    draw_confusion(np.array(record["confusion"]), list(record["labels"]), path, title="Expected and predicted labels")
    print_message(f"confusion matrix: {path}")
    record["picture"] = str(path)
