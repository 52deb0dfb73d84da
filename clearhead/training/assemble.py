"""From a run file to a training run: the stages of a training, each of which makes a record from those before it."""

from __future__ import annotations

from clearhead.training.progress.console import progress_for
from clearhead.training.progress.reports import Progress
from clearhead.training.runfile.sections import RunFile
from clearhead.training.settings import RunResult
from clearhead.training.stages.data import prepare_data
from clearhead.training.stages.model import build_model, describe_model
from clearhead.training.stages.opening import OpenedRun, opened
from clearhead.training.stages.trainer import build_trainer, forecast, warn_of_new_schedule


def train_run(run_file: RunFile, *, resume: bool = False, progress: Progress | None = None) -> RunResult:
    """Train what a run file describes.

    Args:
        run_file: the checked run file.
        resume: whether to continue from the newest undamaged checkpoint of its run directory.
        progress: receives the reports; None: a live panel or lines on stderr.

    Raises:
        InputError: the data, the sizes or the run directory cannot be used; no files remain.
        RunFailure: training failed; the last checkpoint is complete.
        Interrupted: stopped by a signal; everything is saved.
    """
    with opened(run_file, resume=resume, progress=progress or progress_for()) as run:
        return _train(run)


def _train(run: OpenedRun) -> RunResult:
    """Train in an open run directory.

    When this returns nobody holds the engine: if it outlived the processes' group, PyTorch would end the group's thread
    while it holds Python's lock, for which that thread may wait.
    """
    # A resumed run has the same bits only in this order: tokenizers, stores, seed, model.
    data = prepare_data(run)
    model = build_model(run, data)
    describe_model(run, data, model)
    trainer = build_trainer(run, data, model)
    if run.is_resumed:
        warn_of_new_schedule(run, trainer)
    else:
        trainer.validation_seconds = forecast(run, data, model, trainer).cost.validation_seconds
    return trainer.run(resume=run.is_resumed)
