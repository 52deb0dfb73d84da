"""Text classification: single-label, multi-label or regression, of texts or pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.collate import collate_labelled
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import LengthSortedPlan, training_batches
from clearhead.data.sources.labelled import labelled_texts
from clearhead.data.stores.label_set import LabelSet
from clearhead.data.stores.labelled import LabelStore, prepare_labelled
from clearhead.errors import InputError
from clearhead.evaluate.labels import evaluate_label_store, main_score
from clearhead.evaluate.result import Validation
from clearhead.presets.task_heads import token_head, usual_label_head, with_head
from clearhead.spec import Model
from clearhead.task import LabelKind, TaskRecord
from clearhead.tasks.classify.data import ClassifyTask, parse_labelled_source
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.losses.labels import label_loss
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

SCORES: Mapping[LabelKind, str] = MappingProxyType(
    {"single_label": "accuracy", "multi_label": "micro F1", "regression": "Spearman"}
)


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare labelled texts, tokenizer and model of a classifier.

    Raises:
        InputError: the data, the tokenizer or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    assert isinstance(run_file.task, ClassifyTask), "the run file is that of its task"
    kind = run_file.task.labels
    if kind == "regression" and train.label_smoothing:
        raise InputError("[train] label_smoothing has no effect where labels are numbers; remove it")
    tokenizer = setup.find_tokenizer(lambda: train_word_tokenizer(run_file, parse_labelled_source, labelled_texts))
    stores = _prepare(setup, tokenizer, kind)
    store = stores.train
    record = TaskRecord(
        kind="classify",
        labels=store.labels.names,
        label_kind=kind,
        max_length=run_file.data.max_length,
        is_paired=store.is_paired,
        number_mean=store.labels.mean,
        number_scale=store.labels.scale,
    )
    spec, record = _spec(setup, tokenizer, record, store.labels)
    collator = InputCollator.of(spec, tokenizer, record.repeats)
    plan = LengthSortedPlan(store.lengths, batch_tokens=train.batch_tokens, seed=train.seed)
    batches = training_batches(store, plan, lambda rows: collate_labelled(store, rows, collator))
    budget = max(train.batch_tokens, run_file.data.max_length)

    def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return label_loss(module, batch.to(setup.device), kind=kind, label_smoothing=train.label_smoothing)

    def validate(module: nn.Module) -> Validation:
        assert isinstance(module, Transformer), "labels need the module that was built for them"
        found = evaluate_label_store(module, tokenizer, stores.valid, batch_tokens=budget, repeats=record.repeats)
        return Validation(loss=found.loss, score=main_score(found.scores))

    return TaskParts(
        tokenizers=one_sided(tokenizer),
        spec=spec,
        batches=batches,
        loss=loss,
        validate=validate,
        sides=[
            DataSide.of(
                "source",
                tokenizer,
                [part for store in stores for part in store.texts],
                [store.lengths for store in stores],
            )
        ],
        widest=collate_labelled(store, plan.widest(), collator),
        mean_tokens=int(store.lengths.sum()) / batches.batches_per_epoch,
        valid_share=stores.valid_share,
        record=record,
        valid_data=stores.valid.identity,
        score_name=SCORES[kind],
        best_by="score",
    )


def _prepare(setup: TaskSetup, tokenizer: Tokenizer, kind: LabelKind) -> Stores[LabelStore]:
    """Return the prepared texts; validation has the labels of training."""
    labels: LabelSet | None = None

    def prepare(name: str) -> LabelStore:
        nonlocal labels
        source, share = part_of(setup.run_file, name, parse_labelled_source)
        length = setup.run_file.data.max_length
        prepared = partial(prepare_labelled, source, tokenizer, max_length=length, kind=kind, share=share)
        store = prepared(labels=labels)
        if labels is None and (known := _known_labels(setup, store.labels)) != store.labels:
            store = prepared(labels=known)
        labels = store.labels
        return store

    stores = prepare_stores(setup.progress, prepare, lambda store: store.report)
    if stores.train.is_paired != stores.valid.is_paired:
        raise InputError("[data] pair: training and validation texts must both be pairs, or both stand alone")
    return stores


def _known_labels(setup: TaskSetup, found: LabelSet) -> LabelSet:
    """Return the labels of the initial model, if they are those of the data, so that its head can be kept."""
    initial = setup.initial
    if initial is None or initial.record.kind != "classify" or initial.record.label_kind != found.kind:
        return found
    if found.kind == "regression":
        return LabelSet("regression", (), initial.record.number_mean, initial.record.number_scale)
    names = initial.labels_like("classify", found.names)
    return found if names is None else LabelSet(found.kind, names)


def _spec(setup: TaskSetup, tokenizer: Tokenizer, record: TaskRecord, labels: LabelSet) -> tuple[Model, TaskRecord]:
    """Return the spec of the model, and the record with the input of its decoder."""
    found = setup.labelled_spec(tokenizer, record)
    if found is not None:
        return found[0], record.model_copy(update={"repeats": found[1]})
    # The width of the head is that of the spec, so the first spec has any head.
    model = setup.build_spec(source_vocab=tokenizer.vocab_size, head=token_head(1))
    pool = setup.pool(model)
    if pool == "first" and model.encoder is None:
        raise InputError(
            "[task] pool = 'first' is the start token, which in a decoder does not attend to the text; use 'last'"
        )
    return with_head(model, usual_label_head(model, labels.num_outputs, pool=pool)), record
