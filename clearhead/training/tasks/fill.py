"""Masked language modelling: an encoder predicts the masked tokens of a text."""

from __future__ import annotations

from torch import nn

from clearhead.data.batches.base import Batch
from clearhead.data.batches.text import window_batches, window_epoch
from clearhead.data.objectives.build import build_objective
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.evaluate.token_accuracy import score_tokens
from clearhead.task import Noise, TaskRecord
from clearhead.tasks.fill.data import FillTask
from clearhead.training.tasks.base import TaskParts, TaskSetup, one_sided
from clearhead.training.tasks.text import prepare_corpora, text_side, train_text_tokenizer


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare text, tokenizer and model of a masked model.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    assert isinstance(run_file.task, FillTask), "the run file is that of its task"
    share, whole_words = run_file.task.mask_share, run_file.task.whole_words
    tokenizer = setup.find_tokenizer(lambda: train_text_tokenizer(run_file, mask=True))
    noise = Noise(kind="mask", share=share, whole_words=whole_words)
    objective = build_objective(noise, tokenizer)
    spec = setup.build_spec(source_vocab=tokenizer.vocab_size)
    if spec.encoder is None or spec.decoder is not None:
        raise InputError("the task 'fill' needs a model with only an encoder, which attends to both sides of a blank")
    corpora = prepare_corpora(setup, tokenizer)
    length = run_file.data.max_length
    budget = max(train.batch_tokens, length)
    batches = window_batches(corpora.train, objective, length=length, batch_tokens=budget, seed=train.seed)

    def validate(module: nn.Module) -> Validation:
        held_out = window_epoch(corpora.valid, objective, length=length)
        return score_tokens(module, held_out, setup.device)

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=setup.token_loss,
        validate=validate,
        sides=[text_side("source", tokenizer, corpora, longest=length)],
        widest=batches.peek(),
        mean_tokens=corpora.train.num_tokens / batches.batches_per_epoch,
        valid_share=corpora.valid_share,
        record=TaskRecord(kind="fill", max_length=length, noise=noise),
        valid_data=corpora.valid.identity,
        score_name="accuracy",
    )
