"""Extractive question answering: the span of a context that answers a question, or that there is none."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.collate import collate_answers
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import LengthSortedPlan, training_batches
from clearhead.data.sources.answers import answer_texts
from clearhead.data.stores.answers import AnswerStore, prepare_answers
from clearhead.errors import InputError
from clearhead.evaluate.answers import evaluate_answer_store
from clearhead.evaluate.result import Validation
from clearhead.predict.answer import check_no_answer
from clearhead.presets.task_heads import token_head
from clearhead.spec import Model
from clearhead.task import TaskRecord
from clearhead.tasks.answer.data import parse_answer_source
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.losses.answers import answer_loss
from clearhead.training.tasks.base import (
    DataSide,
    TaskParts,
    TaskSetup,
    one_sided,
    part_of,
    prepare_stores,
    train_word_tokenizer,
)


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare questions with their contexts, tokenizer and model of a model that answers.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    tokenizer = setup.find_tokenizer(lambda: train_word_tokenizer(run_file, parse_answer_source, answer_texts))
    length = run_file.data.max_length

    def prepare(name: str) -> AnswerStore:
        source, share = part_of(run_file, name, parse_answer_source)
        return prepare_answers(source, tokenizer, max_length=length, share=share)

    stores = prepare_stores(setup.progress, prepare, lambda store: store.report)
    store = stores.train
    if not store.report.answer_tokens:
        raise InputError("[data] train: no question has an answer; expected some that have one")
    record = TaskRecord(kind="answer", max_length=length, is_paired=True, answer_tokens=store.report.answer_tokens)
    spec, record = _spec(setup, tokenizer, record)
    collator = InputCollator.of(spec, tokenizer, record.repeats)
    check_no_answer(collator)
    plan = LengthSortedPlan(store.lengths, batch_tokens=train.batch_tokens, seed=train.seed)
    batches = training_batches(store, plan, lambda rows: collate_answers(store, rows, collator))
    budget = max(train.batch_tokens, length)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return answer_loss(module, batch.to(setup.device), label_smoothing=train.label_smoothing)

    def validate(module: nn.Module) -> Validation:
        assert isinstance(module, Transformer), "answers need the module that was built for them"
        found = evaluate_answer_store(
            module, collator, stores.valid, max_tokens=store.report.answer_tokens, batch_tokens=budget
        )
        return Validation(loss=found.loss, score=100 * found.scores.f1)

    texts = [part for store in stores for part in (store.questions, store.contexts)]
    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=loss,
        validate=validate,
        sides=[DataSide.of("source", tokenizer, texts, [store.lengths for store in stores])],
        widest=collate_answers(store, plan.widest(), collator),
        mean_tokens=int(store.lengths.sum()) / batches.batches_per_epoch,
        valid_share=stores.valid_share,
        record=record,
        valid_data=stores.valid.identity,
        score_name="F1",
        best_by="score",
    )


def _spec(setup: TaskSetup, tokenizer: Tokenizer, record: TaskRecord) -> tuple[Model, TaskRecord]:
    """Return the spec of the model, and the record with the input of its decoder."""
    found = setup.labelled_spec(tokenizer, record)
    if found is not None:
        return found[0], record.model_copy(update={"repeats": found[1]})
    spec = setup.build_spec(source_vocab=tokenizer.vocab_size, head=token_head(2))
    if spec.encoder is not None and spec.decoder is not None:
        raise InputError(
            "the task 'answer' needs a model with one stack; the decoder of this one does not read the context"
        )
    return spec, record
