"""Bases of the training of a task: shared preparation of data, tokenizer and loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.errors import InputError, within
from clearhead.base.progress import use_display
from clearhead.core import Transformer
from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import LengthSortedPlan, training_batches
from clearhead.data.batches.text import window_epoch, window_view
from clearhead.data.objectives.build import build_objective
from clearhead.data.sources.run_file_tables import Form
from clearhead.data.sources.tables import WHOLE, Share, TableSource
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.data.stores.store import Store, prepare_pairs
from clearhead.data.task_tables import DataSection, PairSection, TaskSection
from clearhead.data.tokenize.tokenizers import (
    LazyTexts,
    load_or_train_text_tokenizer,
    load_or_train_tokenizer,
    load_or_train_tokenizers,
)
from clearhead.fast.training.loss import fast_cross_entropy
from clearhead.generate.scoring.result import Validation
from clearhead.generate.scoring.token_accuracy import labelled_states, projected_cross_entropy, score_tokens
from clearhead.spec.presets.task_heads import token_head
from clearhead.spec.tasks.record import Noise, TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.runfile.sections import RunFile
from clearhead.training.task_setup import DataSide, PreparedTask, TaskSetup, one_sided


def token_loss(module: nn.Module, batch: Batch, *, label_smoothing: float) -> tuple[Float[Tensor, ""], int]:
    """Sum the cross-entropy of one batch over its labels, without building its logits.

    Args:
        module: a Transformer with a head over the vocabulary.
        batch: ids and labels, on the module's device.
        label_smoothing: share of the target that is spread evenly over the vocabulary, from 0 up to but not 1.

    Returns:
        the sum in nats and the number of labels.
    """
    model = cast(Transformer, module)
    states_ND, labels_N = labelled_states(model, batch)
    assert model.head is not None, "token loss needs a head over the vocabulary"
    loss = fast_cross_entropy(
        states_ND, model.head.projection(), labels_N, label_smoothing=label_smoothing, plain=projected_cross_entropy
    )
    return loss, labels_N.numel()


def mean_token_loss(module: nn.Module, batches: Iterable[Batch], device: torch.device) -> float:
    """Return the mean loss of a label in nats, without label smoothing."""
    total, count = 0.0, 0
    for batch in batches:
        loss, labels = token_loss(module, batch.to(device), label_smoothing=0.0)
        total += float(loss)
        count += labels
    return total / max(1, count)


StoreT = TypeVar("StoreT", bound=Store)
TaskT = TypeVar("TaskT", bound=TaskSection)
DataT = TypeVar("DataT", bound=DataSection)

_NO_LIMIT = 2**31 - 8
_BYTE_VOCABULARY = 260


@dataclass(frozen=True)
class Stores(Generic[StoreT]):
    """The prepared data of a run."""

    train: StoreT
    valid: StoreT

    def __iter__(self) -> Iterator[StoreT]:
        return iter((self.train, self.valid))

    @property
    def valid_share(self) -> float:
        """Tokens of the validation data, as a share of those of the training data."""
        return self.valid.num_tokens / self.train.num_tokens


class TaskTraining(ABC):
    """The training of a task: each has a subclass `Training`.

    Args:
        setup: of the run.

    Attributes:
        run_file: of the setup.
        budget: most tokens of a batch; one sequence fits at least.
    """

    def __init__(self, setup: TaskSetup) -> None:
        self.setup: TaskSetup = setup
        self.run_file: RunFile = setup.run_file
        self.budget: int = max(self.run_file.train.batch_tokens, self.run_file.data.max_length)

    @abstractmethod
    def parts(self) -> PreparedTask[Any]:
        """Prepare data, tokenizers and model.

        Raises:
            InputError: the data, the tokenizers or the sizes cannot be used.
        """

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, here that of its labelled tokens, and the number of its labels."""
        smoothing = self.run_file.train.label_smoothing
        return token_loss(module, batch.to(self.setup.device), label_smoothing=smoothing)

    def task_table(self, kind: type[TaskT]) -> TaskT:
        """Return the [task] table, with the keys of the task."""
        table = self.run_file.task
        assert isinstance(table, kind), "a run file has the tables of its task"
        return table

    def data_table(self, kind: type[DataT]) -> DataT:
        """Return the [data] table, with the keys of the task."""
        table = self.run_file.data
        assert isinstance(table, kind), "a run file has the tables of its task"
        return table

    def source(self, name: str) -> tuple[Any, Share]:
        """Return the source of "train" or "valid", and the share of it to use."""
        data = self.run_file.data
        if isinstance(data.valid, Form):
            return getattr(data, name).as_source(), WHOLE
        share = (0.0, 1.0 - data.valid) if name == "train" else (1.0 - data.valid, 1.0)
        return data.train.as_source(), share

    def store(self, name: str, prepare: Callable[[Any, Share], StoreT]) -> StoreT:
        """Prepare a share of the source of "train" or "valid", and report what was kept."""
        self.setup.progress.message(f"{name}: reading and tokenizing")
        with within(f"[data] {name}"), use_display(self.setup.progress):
            store = prepare(*self.source(name))
        self.setup.progress.message(f"{name}: {store.report}")
        return store

    def vocabulary(self) -> tuple[str, int]:
        """Return the kind and the largest size of the vocabulary to train."""
        section = self.run_file.tokenizer
        assert section.kind is not None, "the rules of the run file want kind or path"
        return section.kind, section.vocab_size or (_BYTE_VOCABULARY if section.kind == "byte" else _NO_LIMIT)

    def need_two_stacks(self, model: spec.Model) -> None:
        """Refuse a model without a decoder behind its encoder.

        Raises:
            InputError: it has one stack.
        """
        if model.encoder is None or model.decoder is None:
            raise InputError(
                f"the task '{self.run_file.task.kind}' needs a model with encoder and decoder; this one has a single "
                "stack"
            )


class LabelledTraining(TaskTraining):
    """The training on texts with labels of their own, read by one tokenizer into one stack or two."""

    @abstractmethod
    def texts(self, source: TableSource, share: Share) -> Iterable[str]:
        """Read the texts of a share of a source, for the tokenizer."""

    @abstractmethod
    def prepare(self, source: TableSource, share: Share, tokenizer: Tokenizer, train: Store | None) -> Store:
        """Return a share of a source as a store.

        Args:
            source, share: what to read.
            tokenizer: of the run.
            train: the training data, whose labels the validation data has; None: this is the training data.
        """

    @abstractmethod
    def record(self, stores: Stores[Store]) -> TaskRecord:
        """Return the record of the task; data that cannot be learned from is refused."""

    @abstractmethod
    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """Return the spec of a model with a new head."""

    @abstractmethod
    def collate(self, store: Store, collator: InputCollator) -> Callable[[Indices], Batch]:
        """Return what makes a batch of some rows; a tokenizer that does not suit the task is refused."""

    @abstractmethod
    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: Store) -> Any:
        """Return the measures of the model on validation data, with a loss and a score."""

    def parts(self) -> PreparedTask[Batch]:
        """As of `TaskTraining`."""
        tokenizer = self.setup.find_tokenizer(self._train_tokenizer)
        stores = self._stores(tokenizer)
        record = self.record(stores)
        model, record = self._spec(tokenizer, record)
        store, train = stores.train, self.run_file.train
        collate = self.collate(store, InputCollator.of(model, tokenizer, record.repeats))
        plan = LengthSortedPlan(*store.input_lengths, batch_tokens=train.batch_tokens, seed=train.seed)
        batches = training_batches(store, plan, collate)

        def validate(module: nn.Module) -> Validation:
            assert isinstance(module, Transformer), "labels need the module that was built for them"
            measures = self.measure(module, tokenizer, record, stores.valid)
            return Validation(loss=measures.loss, score=measures.score)

        texts = [text for store in stores for text in store.texts]
        return PreparedTask(
            tokenizers=one_sided(tokenizer),
            spec=model,
            batches=batches,
            loss=self.loss,
            validate=validate,
            sides=[DataSide.of_texts("source", tokenizer, texts, [store.input_lengths[0] for store in stores])],
            largest=collate(plan.widest()),
            mean_tokens=store.num_tokens / batches.batches_per_epoch,
            valid_share=stores.valid_share,
            record=record,
            valid_data=stores.valid.identity,
            best_by="score",
        )

    def one_stack_spec(self, tokenizer: Tokenizer, outputs: int, reads: str) -> spec.Model:
        """Return the spec of a model with a new head that scores every token.

        Args:
            tokenizer: of the run.
            outputs: of a token.
            reads: what only a single stack reads, for the message.

        Raises:
            InputError: it has two stacks.
        """
        model = self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=token_head(outputs))
        if model.encoder is not None and model.decoder is not None:
            raise InputError(
                f"the task '{self.run_file.task.kind}' needs a model with one stack; the decoder of this one does not "
                f"read {reads}"
            )
        return model

    def reuse_initial_head(self, tokenizer: Tokenizer, record: TaskRecord) -> tuple[spec.Model, TaskRecord] | None:
        """Return the spec with the head that the initial model has for these labels, and the record for it."""
        known = self.setup.find_head(record)
        if known is None:
            return None
        model = self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=known[0])
        return model, record.model_copy(update={"repeats": known[1]})

    def _spec(self, tokenizer: Tokenizer, record: TaskRecord) -> tuple[spec.Model, TaskRecord]:
        return self.reuse_initial_head(tokenizer, record) or (self.new_spec(tokenizer, record), record)

    def _train_tokenizer(self) -> Tokenizer:
        source, share = self.source("train")
        kind, size = self.vocabulary()
        texts = LazyTexts(lambda: self.texts(source, share))
        return load_or_train_tokenizer(texts, [*source.identity(), list(share)], kind=kind, vocab_size=size)

    def _stores(self, tokenizer: Tokenizer) -> Stores[Store]:
        train = self.store("train", lambda source, share: self.prepare(source, share, tokenizer, None))
        valid = self.store("valid", lambda source, share: self.prepare(source, share, tokenizer, train))
        return Stores(train, valid)


class TextTraining(TaskTraining):
    """The training on running text."""

    def train_tokenizer(self, *, mask: bool = False, sentinels: int = 0) -> Tokenizer:
        """Train the tokenizer of the run on its training text, or load it from the cache.

        Args:
            mask: whether the vocabulary has a mask token.
            sentinels: how many sentinel tokens it has.

        Raises:
            InputError: the text is unusable, or does not support the vocabulary.
        """
        kind, size = self.vocabulary()
        source, share = self.source("train")
        return load_or_train_text_tokenizer(
            source, kind=kind, vocab_size=size, share=share, mask=mask, sentinels=sentinels
        )

    def corpora(self, tokenizer: Tokenizer) -> Stores[Corpus]:
        """Return the prepared text of training and validation.

        Raises:
            InputError: a source is unusable.
        """
        return Stores(self.corpus("train", tokenizer), self.corpus("valid", tokenizer))

    def corpus(self, name: str, tokenizer: Tokenizer) -> Corpus:
        """Return the prepared text of "train" or "valid".

        Raises:
            InputError: the source is unusable.
        """
        return self.store(name, lambda source, share: prepare_corpus(source, tokenizer, share=share))


class NoisedTraining(TextTraining):
    """The training on windows of noised text: the model predicts what is missing."""

    @abstractmethod
    def train_noise_tokenizer(self) -> Tokenizer:
        """Train a tokenizer with the tokens that stand for what is missing, or load it from the cache."""

    @abstractmethod
    def noise(self, tokenizer: Tokenizer) -> Noise:
        """Return the noise; a tokenizer without the tokens for it is refused."""

    @abstractmethod
    def check(self, model: spec.Model) -> None:
        """Refuse a model whose stacks do not suit the task."""

    def parts(self) -> PreparedTask[Batch]:
        """As of `TaskTraining`."""
        setup, length = self.setup, self.run_file.data.max_length
        tokenizer = setup.find_tokenizer(self.train_noise_tokenizer)
        noise = self.noise(tokenizer)
        objective = build_objective(noise, tokenizer)
        model = setup.build_spec(source_vocab=tokenizer.vocab_size)
        self.check(model)
        corpora = self.corpora(tokenizer)
        seed = self.run_file.train.seed
        view = window_view(corpora.train, objective, length=length, batch_tokens=self.budget, seed=seed)
        batches = view.batches(corpora.train.identity)
        widest, largest_id = batches.peek(), max(corpora.train.largest_id, corpora.valid.largest_id)
        # A decoder reads tokens of its own beside those of the text.
        is_read_once = model.decoder is None
        of_text = corpora.train.num_tokens / batches.batches_per_epoch

        def validate(module: nn.Module) -> Validation:
            return score_tokens(module, window_epoch(corpora.valid, objective, length=length), setup.device)

        return PreparedTask(
            tokenizers=one_sided(tokenizer),
            spec=model,
            batches=batches,
            loss=self.loss,
            validate=validate,
            sides=[
                DataSide.of(name, tokenizer, largest_id=largest_id, longest=length)
                for name in (("source",) if is_read_once else ("source", "target"))
            ],
            largest=widest,
            mean_tokens=of_text if is_read_once else float(widest.num_tokens),
            valid_share=corpora.valid_share,
            record=TaskRecord(kind=self.run_file.task.kind, max_length=length, noise=noise),
            valid_data=corpora.valid.identity,
        )


class PairTraining(TaskTraining):
    """The training on pairs of texts."""

    def train_tokenizers(self, *, joint: bool) -> TokenizerPair:
        """Train the tokenizers of both sides, or load them from the cache; `joint`: one vocabulary for both."""
        kind, size = self.vocabulary()
        return load_or_train_tokenizers(*self.source("train"), kind=kind, vocab_size=size, joint=joint)

    def pairs(self, tokenizers: TokenizerPair, *, extra: tuple[int, int] | None = None) -> Stores[Store]:
        """Return the prepared pairs of training and validation, and report what the filters dropped.

        Args:
            tokenizers: of both sides.
            extra: special tokens around a source and around a target; None: those of a translation.

        Raises:
            InputError: a source is unusable.
        """
        data = self.data_table(PairSection)

        def prepare(source: TableSource, share: Share, *, training: bool = False) -> Store:
            return prepare_pairs(
                source,
                tokenizers,
                max_length=data.max_length,
                max_ratio=data.max_ratio,
                training=training,
                extra=extra,
                share=share,
            )

        return Stores(self.store("train", partial(prepare, training=True)), self.store("valid", prepare))

    @staticmethod
    def sides(stores: Stores[Store], tokenizers: TokenizerPair) -> list[DataSide]:
        """Return both sides of the data."""
        sides = []
        for index, name in enumerate(("source", "target")):
            texts = [store.texts[index] for store in stores]
            lengths = [store.input_lengths[index] for store in stores]
            sides.append(DataSide.of_texts(name, getattr(tokenizers, name), texts, lengths))
        return sides


def evenly_spaced(length: int, count: int) -> list[int]:
    """Return up to `count` indices below `length`, evenly spaced."""
    count = min(count, length)
    return [index * length // count for index in range(count)]
