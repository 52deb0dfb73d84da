"""Denoising: an encoder reads a corrupted text, and a decoder predicts the missing spans or the whole text."""

from __future__ import annotations

from torch import nn

from clearhead.data.batches.base import Batch
from clearhead.data.batches.text import window_batches, window_epoch
from clearhead.data.objectives.build import build_objective
from clearhead.data.objectives.spans import num_sentinels
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.evaluate.token_accuracy import score_tokens
from clearhead.task import Noise, TaskRecord
from clearhead.tasks.denoise.data import DenoiseTask
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import TaskParts, TaskSetup, one_sided
from clearhead.training.tasks.text import prepare_corpora, text_side, train_text_tokenizer


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare text, tokenizer and model of a denoising run.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    tokenizer = setup.find_tokenizer(lambda: _train_tokenizer(run_file))
    noise = _noise(run_file)
    _check_sentinels(run_file, tokenizer)
    objective = build_objective(noise, tokenizer)
    spec = setup.build_spec(source_vocab=tokenizer.vocab_size)
    if spec.encoder is None or spec.decoder is None:
        raise InputError("the task 'denoise' needs a model with encoder and decoder; this one has a single stack")
    corpora = prepare_corpora(setup, tokenizer)
    length = run_file.data.max_length
    budget = max(train.batch_tokens, length)
    batches = window_batches(corpora.train, objective, length=length, batch_tokens=budget, seed=train.seed)
    widest = batches.peek()

    def validate(module: nn.Module) -> Validation:
        held_out = window_epoch(corpora.valid, objective, length=length)
        return score_tokens(module, held_out, setup.device)

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=setup.token_loss,
        validate=validate,
        sides=[text_side(name, tokenizer, corpora, longest=length) for name in ("source", "target")],
        widest=widest,
        mean_tokens=float(widest.num_tokens),
        valid_share=corpora.valid_share,
        record=TaskRecord(kind="denoise", max_length=length, noise=noise),
        valid_data=corpora.valid.identity,
        score_name="accuracy",
    )


def _train_tokenizer(run_file: RunFile) -> Tokenizer:
    # A tokenizer that is trained here adds two special tokens to a text.
    noise = _noise(run_file).kind
    sentinels = _sentinels_needed(run_file, 2) if noise == "spans" else 0
    return train_text_tokenizer(run_file, mask=noise == "infill", sentinels=sentinels)


def _noise(run_file: RunFile) -> Noise:
    task = run_file.task
    assert isinstance(task, DenoiseTask) and task.noise_share is not None, "the run file fills its defaults"
    return Noise(kind=task.noise, share=task.noise_share, mean_span=task.mean_span)


def _check_sentinels(run_file: RunFile, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with too few sentinels, before any text is read."""
    if _noise(run_file).kind != "spans":
        return
    needed, found = _sentinels_needed(run_file, tokenizer.special_tokens.num_added()), len(tokenizer.sentinel_ids)
    if found < needed:
        raise InputError(
            f"a text of max_length {run_file.data.max_length} can have {needed} spans, but the tokenizer has {found} "
            "sentinels: shorten [data] max_length, raise [task] mean_span, or take a tokenizer with more sentinels"
        )


def _sentinels_needed(run_file: RunFile, extra: int) -> int:
    noise, length = _noise(run_file), max(1, run_file.data.max_length - extra)
    assert noise.mean_span is not None, "spans have a length"
    return num_sentinels(length, share=noise.share, mean_span=noise.mean_span)
