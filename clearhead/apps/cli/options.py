"""Command-line options that several commands share."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.apps.cli.outputs import OutputOptions
from clearhead.base.arguments import check_device, check_precision
from clearhead.base.errors import InputError
from clearhead.generate.options import (
    DECLARED,
    DecodingOptions,
    GenerateKwargs,
    GenerateOptions,
    SearchKwargs,
    SearchOptions,
    number_type,
)

if TYPE_CHECKING:
    from clearhead import Model


def _limit_callback(most: int) -> Callable[[Any, Any, int | None], int | None]:
    """Return an option callback that refuses numbers above a limit, and keeps the limit out of the help."""

    def check(ctx: typer.Context, param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value > most:
            raise InputError(f"{param.opts[0]} must be at most {most:,}, got {value}")
        return value

    return check


def _check_callback(check: Callable[[str], None]) -> Callable[[str], str]:
    """Return an option callback that runs a check before the command starts."""

    def callback(value: str) -> str:
        check(value)
        return value

    return callback


def decoding_option(kind: type[DecodingOptions], name: str, *, ranged: bool = False) -> Any:
    """Return the command-line option for an option of generation or search, with its declared help and default.

    Args:
        kind: the class of the options.
        name: the name of a numeric option.
        ranged: True to refuse values below the range before the command starts; otherwise the command checks them.
    """
    option, default = DECLARED[kind][name][1], kind.usual.get(name, getattr(kind, name))
    # These defaults turn an option off, so the help leaves them out.
    by_default = "" if default in (None, (), 0, 1) else f"; by default {default:g}"
    least = option.least if ranged else None
    return typer.Option(f"--{name.replace('_', '-')}", min=least, help=f"{option.help}{by_default}.")


def _decoding_parameter(kind: type[DecodingOptions], name: str) -> inspect.Parameter:
    """Return the command parameter for an option; its default None means the checkpoint or the usual value."""
    declared = DECLARED[kind][name][0]
    value_type: Any = bool if declared is bool else number_type(declared) or list[str]
    annotation = Annotated[value_type | None, decoding_option(kind, name)]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


Ref = Annotated[
    str, typer.Argument(metavar="REF", help="A run directory, optionally with @best, @last, @averaged, @step-N.")
]
LineFile = Annotated[Path, typer.Argument(metavar="FILE|-", help="Text, one sentence per line; - is standard input.")]
Paired = Annotated[bool, typer.Option("--pair", help="Each line holds two texts with a tab between them.")]
Device = Annotated[
    str, typer.Option("--device", callback=_check_callback(check_device), help="auto, cpu, cuda, cuda:N or mps.")
]
Precision = Annotated[
    str, typer.Option("--precision", callback=_check_callback(check_precision), help="auto, fp32, bf16, int8 or int4.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default PyTorch chooses.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, callback=_limit_callback(2**31 - 1), help="The most texts computed together."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, callback=_limit_callback(2**63 - 1), help="Seed of every random choice.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Make the last line of stdout one JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write one JSON object for each line of input.")]
BeamSize = Annotated[int | None, decoding_option(SearchOptions, "beam_size", ranged=True)]
Pattern = Annotated[
    str | None, typer.Option("--pattern", metavar="P", help='The files of a folder to read, such as "*.txt".')
]
FromLanguage = Annotated[
    str | None, typer.Option("--from", metavar="L", help="The language of the text, for a multilingual model.")
]
ToLanguage = Annotated[
    str | None, typer.Option("--to", metavar="L", help="The language to translate into, for a multilingual model.")
]
LengthPenalty = Annotated[float | None, decoding_option(SearchOptions, "length_penalty")]


@dataclass(frozen=True)
class ComputeOptions:
    """Options for running a model: device, precision, threads, batch size and seed."""

    device: Device = "auto"
    precision: Precision = "auto"
    threads: Threads = None
    batch_size: BatchSize = None
    seed: Seed = None

    def load_model(self, ref: str) -> Model:
        """Set threads and seeds, then load a model."""
        import clearhead

        resolved_ref = locate_model(ref)
        set_threads_and_seed(self.threads, self.seed)
        return clearhead.load(resolved_ref, device=_local_device(self.device), precision=self.precision)

    def load_exact(self, ref: str) -> Model:
        """Set threads and seeds, then load a model; in fp32 on a CPU, weights stay in the precision of their file."""
        from clearhead.model.loading import load_exact

        resolved_ref = locate_model(ref)
        set_threads_and_seed(self.threads, self.seed)
        return load_exact(resolved_ref, device=_local_device(self.device), precision=self.precision)


def _local_device(name: str) -> str:
    """Return the device name; under torchrun, each process on this machine gets a different GPU."""
    import torch

    rank, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    return f"cuda:{int(rank) % count}" if name in ("auto", "cuda") and rank.isdecimal() and count > 1 else name


def locate_model(ref: str) -> str:
    """Return a reference in which a name on the hub is replaced by the downloaded folder, and report the download.

    A model that does not exist is refused before torch is imported.

    Raises:
        InputError: the reference is empty, or the model is neither here nor on the hub.
    """
    from clearhead.apps.cli.console import print_message
    from clearhead.base.files import MODEL, refuse_absent
    from clearhead.checkpoints.reference import ModelReference

    reference = ModelReference.locate(ref)
    if reference == ModelReference.parse(ref):
        refuse_absent(reference.folder, expected=MODEL)
        return ref
    print_message(f"{ref}: the checkpoint of that name on the Hugging Face hub, commit {reference.folder.name[:12]}")
    return str(reference.folder)


def refuse_absent_runs(runs: Sequence[Path]) -> None:
    """Refuse missing run directories before torch is imported; the command itself checks arguments RUN@LABEL.

    Raises:
        InputError: a run directory does not exist.
    """
    from clearhead.base.files import refuse_absent

    for run in runs:
        if "@" not in run.name:
            refuse_absent(run, "run directory")


# The option classes by the type of the parameter `decoding`.
_DECODING: Mapping[type, type[DecodingOptions]] = MappingProxyType(
    {GenerateKwargs: GenerateOptions, SearchKwargs: SearchOptions}
)


def takes_compute_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `ComputeOptions` to a command, which gets them as the parameter `compute`.

    A parameter `answers` adds the options of `OutputOptions`. A parameter `decoding` adds the options of generation or
    search; the command gets those that the user sets.
    """
    shared = inspect.signature(ComputeOptions, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    command_parameters = dict(signature.parameters)
    del command_parameters["compute"]
    files: dict[str, inspect.Parameter] = {}
    if command_parameters.pop("answers", None) is not None:
        files = dict(inspect.signature(OutputOptions, eval_str=True).parameters)
        del files["settings"]
    keywords: Any = command_parameters.pop("decoding").annotation if "decoding" in command_parameters else None
    names = [] if keywords is None else list(keywords.__annotations__)
    options = [_decoding_parameter(_DECODING[keywords], name) for name in names if name not in shared]

    @wraps(command)
    def run(**values: Any) -> None:
        arguments = {name: values[name] for name in command_parameters}
        if keywords is not None:
            arguments["decoding"] = {name: values[name] for name in names if values[name] not in (None, [])}
        if files:
            settings = {name: value for name, value in values.items() if name not in files}
            arguments["answers"] = OutputOptions(**{name: values[name] for name in files}, settings=settings)
        command(**arguments, compute=ComputeOptions(**{name: values[name] for name in shared}))

    parameters = [*command_parameters.values(), *options, *files.values(), *shared.values()]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection inside a with block, and exclude the objects made there from later collections.

    The import of PyTorch makes hundreds of thousands of objects that are never freed. Scanning them repeatedly takes a
    tenth of the time until a model answers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def set_threads_and_seed(threads: int | None, seed: int | None) -> None:
    """Set the number of CPU threads and seed all random generators; None leaves either unchanged.

    Raises:
        InputError: this machine has far fewer processors than threads.
    """
    import random

    import numpy as np

    with _pause_garbage_collection():
        import torch

    if threads is not None:
        from clearhead.base.machine import too_many_threads

        fault = too_many_threads(threads)
        if fault is not None:
            raise InputError(f"--threads {fault}")
        torch.set_num_threads(threads)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
