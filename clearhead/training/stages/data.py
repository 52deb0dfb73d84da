"""The second stage: tokenizers and stores are there, and so is the spec of the model, which depends on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.data.batches.base import Batch
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.init_from import InitialModel, find_initial_model, initial_model_of_run
from clearhead.training.parallel.agreement import check_divisible, check_same_data
from clearhead.training.stages.opening import OpenedRun
from clearhead.training.task_parts import TaskParts, TaskSetup, one_sided, parts_of


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, and what follows from it.

    Attributes:
        initial: the trained model that the run starts from; None: from scratch.
        parts: tokenizers, batches, loss, validation and spec, by the task.
    """

    initial: InitialModel | None
    parts: TaskParts[Batch]


def prepare_data(run: OpenedRun) -> PreparedData:
    """Find or train the tokenizers, and prepare the data.

    Raises:
        InputError: the data, the tokenizers, the initial model or the sizes cannot be used, or processes differ.
    """
    task = run.run_file.task
    if run.is_resumed:
        initial = initial_model_of_run(run.path) if task.init else None
    else:
        initial = find_initial_model(task.init, *task.languages)
    setup = TaskSetup(run.run_file, partial(_tokenizers, run, initial), initial, run.progress, run.device)
    with run.processes.turn():
        parts = parts_of(setup)
    if run.processes.size > 1:
        check_divisible(parts, run.run_file.train.batch_tokens, run.processes.size)
        check_same_data(run.processes, parts)
    return PreparedData(initial, parts)


def _tokenizers(run: OpenedRun, initial: InitialModel | None, train: Callable[[], TokenizerPair]) -> TokenizerPair:
    """Train or load the tokenizers, and check that they are those of the checkpoint."""
    path, remembered = run.run_file.tokenizer.path, run.choices.get("tokenizer")
    if initial is not None:
        tokenizers = initial.tokenizers
    elif path is not None:
        tokenizers = named_tokenizers(Path(path))
    elif remembered is not None:
        tokenizers = TokenizerPair.load(run.path)
    else:
        run.progress.message("tokenizer: training it, unless the cache has it")
        tokenizers = train()
    if remembered is not None and tokenizers.fingerprint != remembered:
        where = path or run.run_file.task.init or run.path
        raise InputError(
            f"the tokenizer in {where} has changed since the run in {run.path} began: restore it and resume, or "
            "start anew in another run directory (train.run=...)"
        )
    return tokenizers


def named_tokenizers(path: Path) -> TokenizerPair:
    """Load the tokenizers that a run file names: a file, or a folder with one or two.

    Raises:
        InputError: there are none.
    """
    return TokenizerPair.load(path) if path.is_dir() else one_sided(Tokenizer.load(path))
