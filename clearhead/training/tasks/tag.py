"""Tagging: the class of each word of a text, said at the word's first piece."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.collate import collate_tagged
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import LengthSortedPlan, training_batches
from clearhead.data.sources.tagged import parse_tagged_source, tagged_texts
from clearhead.data.stores.tag_set import TagSet
from clearhead.data.stores.tagged import TagStore, prepare_tagged
from clearhead.data.stores.tokenizers import cached_tokenizer
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.evaluate.tags import evaluate_tag_store
from clearhead.presets.task_heads import token_head
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.losses.tokens import token_loss
from clearhead.training.preflight import TokenSide
from clearhead.training.runfile.read import RunFile
from clearhead.training.tasks.base import LazyTexts, TaskParts, TaskSetup, part_of, vocabulary_size
from clearhead.training.tasks.text import one_sided


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare tagged words, tokenizer and model of a tagger.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    tokenizer = setup.find_tokenizer(lambda: _train_tokenizer(run_file))
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
    spec = setup.resolve_spec(source_vocab=tokenizer.vocab_size, head=head) if found is None else found[0]
    if spec.encoder is not None and spec.decoder is not None:
        raise InputError(
            "the task 'tag' needs a model with one stack; the decoder of this one would not read the words"
        )
    collator = InputCollator.of(spec, tokenizer)
    plan = LengthSortedPlan(store.lengths, batch_tokens=train.batch_tokens, seed=train.seed)
    batches = training_batches(store, plan, lambda rows: collate_tagged(store, rows, collator))
    budget = max(train.batch_tokens, run_file.data.max_length)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return token_loss(module, batch.to(setup.device), label_smoothing=train.label_smoothing)

    def validate(module: nn.Module) -> Validation:
        assert isinstance(module, Transformer), "tags need the module that was built for them"
        found = evaluate_tag_store(module, tokenizer, stores.valid, batch_tokens=budget)
        return Validation(loss=found.loss, score=100 * found.scores.all.f1)

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=loss,
        validate=validate,
        sides=lambda module: _sides(setup, tokenizer, stores, module),
        widest=collate_tagged(store, plan.widest(), collator),
        mean_tokens=int(store.lengths.sum()) / batches.batches_per_epoch,
        record=record,
        valid_data=stores.valid.identity,
        score_name="entity F1",
        best_by="score",
    )


@dataclass(frozen=True)
class _Stores:
    train: TagStore
    valid: TagStore


def _train_tokenizer(run_file: RunFile) -> Tokenizer:
    section = run_file.tokenizer
    assert section.kind is not None, "the rules of the run file want kind or path"
    source, share = part_of(run_file, "train", parse_tagged_source)
    return cached_tokenizer(
        LazyTexts(lambda: tagged_texts(source, share)),
        [*source.identity(), list(share)],
        kind=section.kind,
        vocab_size=vocabulary_size(run_file),
    )


def _prepare(setup: TaskSetup, tokenizer: Tokenizer) -> _Stores:
    """Return the prepared words of training and validation, and say what became of them."""
    tags: TagSet | None = None
    stores = []
    for name in ("train", "valid"):
        source, share = part_of(setup.run_file, name, parse_tagged_source)
        length = setup.run_file.data.max_length
        try:
            store = prepare_tagged(source, tokenizer, max_length=length, tags=tags, share=share)
            own = None if tags is not None or setup.start is None else setup.start.labels_like("tag", store.tags.names)
            if own is not None and own != store.tags.names:
                store = prepare_tagged(source, tokenizer, max_length=length, tags=TagSet(own), share=share)
        except InputError as error:
            raise InputError(f"[data] {name}: {error}") from None
        setup.progress.message(f"{name}: {store.report}")
        tags = store.tags
        stores.append(store)
    return _Stores(*stores)


def _sides(setup: TaskSetup, tokenizer: Tokenizer, stores: _Stores, module: nn.Module) -> list[TokenSide]:
    """Describe the words as the module will see them, the longest of training and validation."""
    both = (stores.train, stores.valid)
    largest = max(int(store.chunks.ids.max()) for store in both)
    longest = max(int(store.lengths.max()) for store in both)
    return [setup.side("source", tokenizer, module, largest_id=largest, longest=longest)]
