"""Base classes for the training of a task: preparation of data and tokenizer, and the loss."""

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
from clearhead.data.feed import compute_each
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
    """Return the summed cross-entropy of a batch and the number of its labels, without storing the logits.

    Args:
        module: a Transformer with a head over the vocabulary.
        batch: the ids and labels, on the device of the module.
        label_smoothing: the share of the target that is spread evenly over the vocabulary, at least 0 and below 1.

    Returns:
        The sum in nats, and the number of labels.
    """
    model = cast(Transformer, module)
    states_ND, labels_N = labelled_states(model, batch)
    assert model.head is not None, "token loss needs a head over the vocabulary"
    projection = model.head.projection()
    if labels_N.device.type != "cpu":
        from clearhead.fast.training.gpu_loss import CompiledHead, gpu_cross_entropy  # a CPU does not need it

        compiles = isinstance(model.head, CompiledHead)
        loss = gpu_cross_entropy(states_ND, projection, labels_N, label_smoothing=label_smoothing, compiles=compiles)
        return loss, batch.num_labels
    loss = fast_cross_entropy(
        states_ND, projection, labels_N, label_smoothing=label_smoothing, plain=projected_cross_entropy
    )
    return loss, labels_N.numel()


def mean_token_loss(module: nn.Module, batches: Iterable[Batch], device: torch.device) -> float:
    """Return the mean loss per label in nats, without label smoothing."""
    total, count = 0.0, 0

    def run(_: int, batch: Batch) -> tuple[Tensor]:
        return (token_loss(module, batch, label_smoothing=0.0)[0],)

    for num_labels, (loss,) in compute_each(((batch.num_labels, batch) for batch in batches), run, device):
        total += float(loss)
        count += num_labels
    return total / max(1, count)


StoreT = TypeVar("StoreT", bound=Store)
TaskT = TypeVar("TaskT", bound=TaskSection)
DataT = TypeVar("DataT", bound=DataSection)

_NO_LIMIT = 2**31 - 8
_BYTE_VOCABULARY = 260


@dataclass(frozen=True)
class Stores(Generic[StoreT]):
    """The prepared training and validation data of a run."""

    train: StoreT
    valid: StoreT

    def __iter__(self) -> Iterator[StoreT]:
        return iter((self.train, self.valid))

    @property
    def valid_share(self) -> float:
        """The number of tokens of the validation data divided by that of the training data."""
        return self.valid.num_tokens / self.train.num_tokens


class TaskTraining(ABC):
    """Base class of the training of a task; each task has a subclass `Training`.

    Args:
        setup: the setup of the run.

    Attributes:
        run_file: the run file of the setup.
        budget: the maximum number of tokens in a batch, large enough for one sequence.
    """

    def __init__(self, setup: TaskSetup) -> None:
        self.setup: TaskSetup = setup
        self.run_file: RunFile = setup.run_file
        self.budget: int = max(self.run_file.train.batch_tokens, self.run_file.data.max_length)

    @abstractmethod
    def parts(self) -> PreparedTask[Any]:
        """Return the prepared task: its data, tokenizers and spec.

        Raises:
            InputError: the data, the tokenizers or the sizes cannot be used.
        """

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch and its number of labels; by default the cross-entropy of token labels."""
        smoothing = self.run_file.train.label_smoothing
        return token_loss(module, batch.to(self.setup.device), label_smoothing=smoothing)

    def task_table(self, kind: type[TaskT]) -> TaskT:
        """Return the [task] table of the run file, after checking that it is of type `kind`."""
        table = self.run_file.task
        assert isinstance(table, kind), "the tables of a run file have the types of its task"
        return table

    def data_table(self, kind: type[DataT]) -> DataT:
        """Return the [data] table of the run file, after checking that it is of type `kind`."""
        table = self.run_file.data
        assert isinstance(table, kind), "the tables of a run file have the types of its task"
        return table

    def source(self, name: str) -> tuple[Any, Share]:
        """Return the data source of "train" or "valid", and the share of its rows to use."""
        data = self.run_file.data
        if isinstance(data.valid, Form):
            return getattr(data, name).as_source(), WHOLE
        share = (0.0, 1.0 - data.valid) if name == "train" else (1.0 - data.valid, 1.0)
        return data.train.as_source(), share

    def store(self, name: str, prepare: Callable[[Any, Share], StoreT]) -> StoreT:
        """Prepare the data of "train" or "valid", and print a report of the rows."""
        self.setup.progress.message(f"{name}: reading and tokenizing")
        with within(f"[data] {name}"), use_display(self.setup.progress):
            store = prepare(*self.source(name))
        self.setup.progress.message(f"{name}: {store.report}")
        return store

    def vocabulary(self) -> tuple[str, int]:
        """Return the kind of tokenizer to train, and the maximum size of its vocabulary."""
        section = self.run_file.tokenizer
        assert section.kind is not None, "a checked run file has [tokenizer] kind or path"
        return section.kind, section.vocab_size or (_BYTE_VOCABULARY if section.kind == "byte" else _NO_LIMIT)

    def need_two_stacks(self, model: spec.Model) -> None:
        """Raise an error if a model has no encoder or no decoder.

        Raises:
            InputError: the model has one stack.
        """
        if model.encoder is None or model.decoder is None:
            raise InputError(
                f"the task '{self.run_file.task.kind}' needs a model with encoder and decoder; this one has a single "
                "stack"
            )


class LabelledTraining(TaskTraining):
    """Base class for training on labelled texts, with one tokenizer."""

    @abstractmethod
    def texts(self, source: TableSource, share: Share) -> Iterable[str]:
        """Return the texts of the selected rows of a source, to train the tokenizer."""

    @abstractmethod
    def prepare(self, source: TableSource, share: Share, tokenizer: Tokenizer, train: Store | None) -> Store:
        """Tokenize the selected rows of a source, and return them as a store.

        Args:
            source, share: the source, and the share of its rows to read.
            tokenizer: the tokenizer of the run.
            train: the store of the training data, which defines the labels; None means that this is the training data.
        """

    @abstractmethod
    def record(self, stores: Stores[Store]) -> TaskRecord:
        """Return the task record of the trained model; raise an error if the data contain nothing to learn."""

    @abstractmethod
    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """Return the spec of a model with a new head for this task."""

    @abstractmethod
    def collate(self, store: Store, collator: InputCollator) -> Callable[[Indices], Batch]:
        """Return the function that makes a batch from row indices; raise an error if the tokenizer is unsuitable."""

    @abstractmethod
    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: Store) -> Any:
        """Return the metrics of the model on validation data, with attributes `loss` and `score`."""

    def parts(self) -> PreparedTask[Batch]:
        """Return the prepared task of the run: its data, tokenizers and spec."""
        tokenizer = self.setup.find_tokenizer(self._train_tokenizer)
        stores = self._stores(tokenizer)
        record = self.record(stores)
        model, record = self._spec(tokenizer, record)
        store, train = stores.train, self.run_file.train
        collate = self.collate(store, InputCollator.of(model, tokenizer, record.repeats))
        plan = LengthSortedPlan(*store.input_lengths, batch_tokens=train.batch_tokens, seed=train.seed)
        batches = training_batches(store, plan, collate)

        def validate(module: nn.Module) -> Validation:
            assert isinstance(module, Transformer), "a model that predicts labels is a Transformer"
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
            tokenizer: the tokenizer of the run.
            outputs: the number of scores per token.
            reads: the input that a decoder would not read, for the error message, such as "the words".

        Raises:
            InputError: the model has two stacks.
        """
        model = self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=token_head(outputs))
        if model.encoder is not None and model.decoder is not None:
            raise InputError(
                f"the task '{self.run_file.task.kind}' needs a model with one stack; the decoder of this one does not "
                f"read {reads}"
            )
        return model

    def reuse_initial_head(self, tokenizer: Tokenizer, record: TaskRecord) -> tuple[spec.Model, TaskRecord] | None:
        """Return the spec with the head of the initial model, and its record; None if its labels differ."""
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
    """Base class for training on running text."""

    def train_tokenizer(self, *, mask: bool = False, sentinels: int = 0) -> Tokenizer:
        """Train the tokenizer of the run on its training text, or load it from the cache.

        Args:
            mask: True to add a mask token to the vocabulary.
            sentinels: the number of sentinel tokens to add.

        Raises:
            InputError: the text is unusable, or does not support the vocabulary.
        """
        kind, size = self.vocabulary()
        source, share = self.source("train")
        return load_or_train_text_tokenizer(
            source, kind=kind, vocab_size=size, share=share, mask=mask, sentinels=sentinels
        )

    def corpora(self, tokenizer: Tokenizer) -> Stores[Corpus]:
        """Return the tokenized text of training and validation.

        Raises:
            InputError: a source is unusable.
        """
        return Stores(self.corpus("train", tokenizer), self.corpus("valid", tokenizer))

    def corpus(self, name: str, tokenizer: Tokenizer) -> Corpus:
        """Return the tokenized text of "train" or "valid".

        Raises:
            InputError: the source is unusable.
        """
        return self.store(name, lambda source, share: prepare_corpus(source, tokenizer, share=share))


class NoisedTraining(TextTraining):
    """Base class for training on windows of noised text, in which the model predicts the missing tokens."""

    @abstractmethod
    def train_noise_tokenizer(self) -> Tokenizer:
        """Train a tokenizer with mask or sentinel tokens, or load it from the cache."""

    @abstractmethod
    def noise(self, tokenizer: Tokenizer) -> Noise:
        """Return the noise settings of the run; raise an error if the tokenizer lacks special tokens for the noise."""

    @abstractmethod
    def check(self, model: spec.Model) -> None:
        """Raise an error if the stacks of a model do not suit the task."""

    def parts(self) -> PreparedTask[Batch]:
        """Return the prepared task of the run: its data, tokenizers and spec."""
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
        # With a decoder, the model reads more tokens than those of the text.
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
    """Base class for training on pairs of texts."""

    def train_tokenizers(self, *, joint: bool) -> TokenizerPair:
        """Train the tokenizers of both sides, or load them from the cache; `joint` means one shared vocabulary."""
        kind, size = self.vocabulary()
        return load_or_train_tokenizers(*self.source("train"), kind=kind, vocab_size=size, joint=joint)

    def pairs(self, tokenizers: TokenizerPair, *, extra: tuple[int, int] | None = None) -> Stores[Store]:
        """Return the tokenized pairs of training and validation, and print the pairs that filters dropped.

        Args:
            tokenizers: the tokenizers of source and target.
            extra: the numbers of special tokens around a source and a target; None means those of a translation.

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
        """Return the largest id and the longest text of each side, source and target, to check the model."""
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
