"""Token classification: a tag for each word of a text, predicted at its first token."""

from __future__ import annotations

from functools import partial

from torch import nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.collate import collate_tagged
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import LengthSortedPlan, training_batches
from clearhead.data.sources.tagged import tagged_texts
from clearhead.data.stores.tag_set import TagSet
from clearhead.data.stores.tagged import TagStore, prepare_tagged
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.evaluate.tags import evaluate_tag_store
from clearhead.presets.task_heads import token_head
from clearhead.task import TaskRecord
from clearhead.tasks.tag.data import parse_tagged_source
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.tasks.base import (
    DataSide,
    Stores,
    TaskParts,
    TaskSetup,
    one_sided,
    part_of,
    prepare_stores,
    train_word_tokenizer,
)


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare tagged words, tokenizer and model of a tagger.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    tokenizer = setup.find_tokenizer(lambda: train_word_tokenizer(run_file, parse_tagged_source, tagged_texts))
    stores = _prepare(setup, tokenizer)
    store = stores.train
    record = TaskRecord(
        kind="tag",
        labels=store.tags.names,
        max_length=run_file.data.max_length,
        inner_signs=store.splitter.inner,
        sign_runs=store.splitter.runs,
    )
    found = setup.labelled_spec(tokenizer, record)
    head = token_head(len(store.tags.names))
    spec = setup.build_spec(source_vocab=tokenizer.vocab_size, head=head) if found is None else found[0]
    if spec.encoder is not None and spec.decoder is not None:
        raise InputError("the task 'tag' needs a model with one stack; the decoder of this one does not read the words")
    collator = InputCollator.of(spec, tokenizer)
    plan = LengthSortedPlan(store.lengths, batch_tokens=train.batch_tokens, seed=train.seed)
    batches = training_batches(store, plan, lambda rows: collate_tagged(store, rows, collator))
    budget = max(train.batch_tokens, run_file.data.max_length)

    def validate(module: nn.Module) -> Validation:
        assert isinstance(module, Transformer), "tags need the module that was built for them"
        found = evaluate_tag_store(module, tokenizer, stores.valid, batch_tokens=budget)
        return Validation(loss=found.loss, score=100 * found.scores.all.f1)

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=setup.token_loss,
        validate=validate,
        sides=[
            DataSide.of("source", tokenizer, [store.chunks for store in stores], [store.lengths for store in stores])
        ],
        widest=collate_tagged(store, plan.widest(), collator),
        mean_tokens=int(store.lengths.sum()) / batches.batches_per_epoch,
        valid_share=stores.valid_share,
        record=record,
        valid_data=stores.valid.identity,
        score_name="entity F1",
        best_by="score",
    )


def _prepare(setup: TaskSetup, tokenizer: Tokenizer) -> Stores[TagStore]:
    """Return the prepared words; validation has the tags of training."""
    tags: TagSet | None = None

    def prepare(name: str) -> TagStore:
        nonlocal tags
        source, share = part_of(setup.run_file, name, parse_tagged_source)
        prepared = partial(prepare_tagged, source, tokenizer, max_length=setup.run_file.data.max_length, share=share)
        store = prepared(tags=tags)
        if tags is None and setup.initial is not None:
            known = setup.initial.labels_like("tag", store.tags.names)
            if known is not None and known != store.tags.names:
                store = prepared(tags=TagSet(known))
        tags = store.tags
        return store

    return prepare_stores(setup.progress, prepare, lambda store: store.report)
