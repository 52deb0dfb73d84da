"""Options that several commands share, each declared once."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.arguments import check_device, check_precision
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead import Model


def _at_most(most: int) -> Callable[[Any, Any, int | None], int | None]:
    """Return a check of a number; a range of typer's would stand in the help with all its digits."""

    def check(ctx: typer.Context, param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value > most:
            raise InputError(f"{param.opts[0]} must be at most {most:,}, received {value}")
        return value

    return check


def _checked_by(check: Callable[[str], None]) -> Callable[[str], str]:
    """Return the callback of an option that refuses it before the command begins."""

    def callback(value: str) -> str:
        check(value)
        return value

    return callback


Ref = Annotated[
    str, typer.Argument(metavar="REF", help="A run directory, optionally with @best, @last, @averaged, @step-N.")
]
LineFile = Annotated[Path, typer.Argument(metavar="FILE|-", help="Text, one sentence in a line; - is standard input.")]
Paired = Annotated[bool, typer.Option("--pair", help="A line holds two texts, with a tab between them.")]
Device = Annotated[
    str, typer.Option("--device", callback=_checked_by(check_device), help="auto, cpu, cuda, cuda:N or mps.")
]
Precision = Annotated[
    str, typer.Option("--precision", callback=_checked_by(check_precision), help="auto, fp32, bf16 or int8.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default what torch chooses.")]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, callback=_at_most(2**31 - 1), help="Sentences computed together."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, callback=_at_most(2**63 - 1), help="Seed of every random choice.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Make the last line of stdout one JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write one JSON object for each line of input.")]
BeamSize = Annotated[int | None, typer.Option("--beam-size", min=1, help="Hypotheses kept; 1 is greedy; by default 5.")]
Pattern = Annotated[
    str | None, typer.Option("--pattern", metavar="P", help='Which files of a folder to read, such as "*.txt".')
]
FromLanguage = Annotated[
    str | None, typer.Option("--from", metavar="L", help="The language of the text, for a multilingual model.")
]
ToLanguage = Annotated[
    str | None, typer.Option("--to", metavar="L", help="The language to translate into, for a multilingual model.")
]
LengthPenalty = Annotated[
    float | None, typer.Option("--length-penalty", help="Exponent A of the length in the score; by default 1.0.")
]


@dataclass(frozen=True)
class ComputeOptions:
    """How a command runs a model: the options that all such commands share."""

    device: Device = "auto"
    precision: Precision = "auto"
    threads: Threads = None
    batch_size: BatchSize = None
    seed: Seed = None

    def load_model(self, ref: str) -> Model:
        """Set threads and seeds, then load a model."""
        import clearhead

        place = located(ref)
        set_threads_and_seed(self.threads, self.seed)
        return clearhead.load(place, device=self.device, precision=self.precision)


def located(ref: str) -> str:
    """Return a reference with the folder in place of a name on the hub, and say that the hub was asked.

    What leads nowhere is found out without torch.

    Raises:
        InputError: it is empty, or the name of a model that is neither here nor on the hub.
    """
    from clearhead.cli.console import print_message
    from clearhead.files import MODEL, refuse_absent
    from clearhead.hf.files.hub import find_checkpoint

    folder = find_checkpoint(ref)
    if folder is None:
        refuse_absent(Path(ref if Path(ref).exists() else ref.rpartition("@")[0] or ref), expected=MODEL)
    if folder is None or Path(ref).exists():
        return ref
    print_message(f"{ref}: the checkpoint of that name on the Hugging Face hub, commit {folder.name[:12]}")
    return str(folder)


def refuse_absent_runs(runs: Sequence[Path]) -> None:
    """Refuse the first run directory that is not there, without torch; those with a label are left to the command.

    Raises:
        InputError: there is one.
    """
    from clearhead.files import refuse_absent

    for run in runs:
        if "@" not in run.name:
            refuse_absent(run, "run directory")


def takes_compute_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `ComputeOptions` behind its own; it receives them as the parameter `compute`."""
    shared = inspect.signature(ComputeOptions, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    own = {name: parameter for name, parameter in signature.parameters.items() if name != "compute"}

    @wraps(command)
    def run(**values: Any) -> None:
        compute = ComputeOptions(**{name: values[name] for name in shared})
        command(**{name: values[name] for name in own}, compute=compute)

    run.__signature__ = signature.replace(parameters=[*own.values(), *shared.values()])  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Leave the objects made within to the end of the process, and look for no garbage among them.

    PyTorch makes hundreds of thousands while it is imported, none of which goes; looking through them again and again
    takes a tenth of the time until a model answers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def set_threads_and_seed(threads: int | None, seed: int | None) -> None:
    """Set the number of CPU threads and seed all random generators, where given.

    Raises:
        InputError: there are far fewer processors.
    """
    import random

    import numpy as np

    with _no_collection():
        import torch

    if threads is not None:
        from clearhead.machine import too_many_threads

        fault = too_many_threads(threads)
        if fault is not None:
            raise InputError(f"--threads {fault}")
        torch.set_num_threads(threads)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
