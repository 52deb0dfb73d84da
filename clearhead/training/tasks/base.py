"""The input and output of every kind of task: the setup of a run, and the parts that the task contributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Int64
from numpy import ndarray
from torch import Tensor, nn

from clearhead import spec
from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.sources.run_file_tables import Form
from clearhead.data.sources.tables import WHOLE, Share
from clearhead.data.stores.arrays import ArrayStore, Ragged
from clearhead.data.stores.tokenizers import cached_tokenizer
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.presets.task_heads import PoolBy, with_head
from clearhead.task import Repeats, TaskRecord
from clearhead.tasks.data import PooledSection
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.dry_run import Workload
from clearhead.training.init_from import InitialModel
from clearhead.training.losses.tokens import token_loss
from clearhead.training.progress.reports import Progress
from clearhead.training.protocols import BatchT
from clearhead.training.runfile.model_table import resolve_spec, with_dropout
from clearhead.training.runfile.sections import RunFile
from clearhead.training.settings import Metric

SourceT = TypeVar("SourceT")
StoreT = TypeVar("StoreT", bound=ArrayStore)

_NO_LIMIT = 2**31 - 8
_BYTE_VOCABULARY = 260


@dataclass(frozen=True)
class TaskSetup:
    """The input of a task.

    Attributes:
        run_file: the checked run file.
        find_tokenizers: returns the tokenizers of the run: those of its checkpoint, of its initial model or of a file;
            else those that the given function trains.
        initial: the model that the run starts from; None: from scratch.
        progress: receives the reports.
        device: of the model.
    """

    run_file: RunFile
    find_tokenizers: Callable[[Callable[[], TokenizerPair]], TokenizerPair]
    initial: InitialModel | None
    progress: Progress
    device: torch.device

    def find_tokenizer(self, train: Callable[[], Tokenizer]) -> Tokenizer:
        """Return the tokenizer of a task with one tokenizer; `train` trains it if there is none yet.

        Raises:
            InputError: there are two, or it is not the tokenizer of the checkpoint.
        """

        found = self.find_tokenizers(lambda: one_sided(train()))
        if not found.joint:
            raise InputError(
                f"the task '{self.run_file.task.kind}' takes one tokenizer, but the source and target sides of this "
                "one differ"
            )
        return found.source

    def build_spec(
        self, *, source_vocab: int, target_vocab: int | None = None, joint: bool = True, head: spec.Head | None = None
    ) -> spec.Model:
        """Return the spec of the model: that of the initial model, or that of the [model] table.

        Args:
            source_vocab: vocabulary size of the first stack.
            target_vocab: vocabulary size of the decoder; None: the same.
            joint: whether both sides share one vocabulary.
            head: None: a vocabulary head.

        Raises:
            InputError: the sizes are impossible, or the initial model does not suit the task.
        """
        if self.initial is None:
            return resolve_spec(
                self.run_file.model,
                kind=self.run_file.task.kind,
                source_vocab=source_vocab,
                target_vocab=source_vocab if target_vocab is None else target_vocab,
                joint=joint,
                head=head,
                prefix=self.run_file.task.shows_prefix,
            )
        base = with_dropout(self.initial.spec, self.run_file.model)
        if head is not None:
            return with_head(base, head)
        if self.initial.has_vocabulary_head:
            return base
        own = self.initial.vocabulary_head(self.run_file.task.kind)
        if own is None:
            raise InputError(
                f"[task] init: the model was trained to '{self.initial.record.kind}', so it has no vocabulary head for "
                f"the task '{self.run_file.task.kind}'"
            )
        return with_head(base, own)

    def labelled_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> tuple[spec.Model, Repeats | None] | None:
        """Return the spec of the initial model with its own or its family's head for labels, and its decoder's input.

        Args:
            tokenizer: of the run.
            record: of the task.

        Returns:
            None if there is no initial model or no such head, or if the run file chooses the pooling.
        """
        if self.initial is None or self.chosen_pool is not None:
            return None
        if self.initial.has_labels_of(record) and self.initial.spec.head is not None:
            head, repeats = self.initial.spec.head, self.initial.record.repeats
        elif (own := self.initial.family_head(record)) is not None:
            head, repeats = own
        else:
            return None
        return self.build_spec(source_vocab=tokenizer.vocab_size, head=head), repeats

    def token_loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch's labelled tokens, and their number."""
        return token_loss(module, batch.to(self.device), label_smoothing=self.run_file.train.label_smoothing)

    @property
    def chosen_pool(self) -> PoolBy | None:
        """The pooling of the run file; None: it chooses none."""
        task = self.run_file.task
        return task.pool if isinstance(task, PooledSection) else None

    def pool(self, model: spec.Model) -> PoolBy:
        """Return the pooling: that of the run file, or the usual one for the stacks."""
        return self.chosen_pool or ("mean" if model.decoder is None else "last")


@dataclass(frozen=True)
class DataSide:
    """One side of the data, as far as it must fit the model.

    Attributes:
        name: "source" or "target", for the messages.
        tokenizer: of this side.
        largest_id: the largest id in the data.
        longest: tokens of the longest sequence as the model reads it.
    """

    name: str
    tokenizer: Tokenizer
    largest_id: int
    longest: int

    @classmethod
    def of(
        cls, name: str, tokenizer: Tokenizer, texts: Iterable[Ragged], lengths: Iterable[Int64[ndarray, " _"]]
    ) -> DataSide:
        """Return the side of these texts, whose rows have these lengths with special tokens."""
        largest = max(int(part.ids.max()) for part in texts)
        return cls(name, tokenizer, largest, max(int(part.max()) for part in lengths))


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


@dataclass(frozen=True)
class TaskParts(Generic[BatchT]):
    """The parts that a task contributes to a training run.

    Attributes:
        tokenizers: of the run; the same one on both sides if the task has only one.
        spec: the model to build.
        batches: endless training batches.
        loss: returns the summed loss of a batch and the number of its labels.
        validate: called with the module in evaluation mode.
        sides: the sides of the data, for the checks before the first step.
        widest: the training batch with the most positions.
        mean_tokens: tokens of an average batch.
        valid_share: of the stores.
        record: the task record of the trained model.
        valid_data: identity of the validation data; scores on other data cannot be compared.
        score_name: name of the validation score.
        best_by: the metric that decides which checkpoint is best.
        score_seconds, reading_seconds: as of `dry_run.Workload`.
    """

    tokenizers: TokenizerPair
    spec: spec.Model
    batches: EpochBatches[BatchT]
    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]]
    validate: Callable[[nn.Module], Validation]
    sides: list[DataSide]
    widest: BatchT
    mean_tokens: float
    valid_share: float
    record: TaskRecord
    valid_data: str
    score_name: str = "score"
    best_by: Metric = field(default="loss")
    score_seconds: Callable[[nn.Module], float] | None = None
    reading_seconds: float = 0.0

    def workload(self) -> Workload[BatchT]:
        """Return what a run of the task computes."""
        return Workload(
            self.loss,
            self.batches,
            largest=self.widest,
            num_sizes=self.batches.plan.num_sizes(),
            valid_share=self.valid_share,
            score_seconds=self.score_seconds,
            reading_seconds=self.reading_seconds,
        )


def part_of(run_file: RunFile, name: str, parse: Callable[[Mapping[str, Any]], SourceT]) -> tuple[SourceT, Share]:
    """Return the source of training or validation data, and the share of it to use.

    Args:
        run_file: the checked run file.
        name: "train" or "valid".
        parse: turns a table into a source.
    """
    held_out = run_file.data.valid
    if isinstance(held_out, float):
        share = (0.0, 1.0 - held_out) if name == "train" else (1.0 - held_out, 1.0)
        table: object = run_file.data.train
    else:
        share, table = WHOLE, getattr(run_file.data, name)
    assert isinstance(table, Form), "only validation data is given as a share"
    return parse(table.model_dump(exclude_none=True)), share


def prepare_stores(
    progress: Progress, prepare: Callable[[str], StoreT], describe: Callable[[StoreT], object]
) -> Stores[StoreT]:
    """Prepare training and validation data, and report what was kept.

    Args:
        progress: receives one message for each part.
        prepare: prepares "train" or "valid".
        describe: gives what is printed about a part.
    """
    return Stores(*(prepare_store(progress, name, prepare, describe) for name in ("train", "valid")))


def prepare_store(
    progress: Progress, name: str, prepare: Callable[[str], StoreT], describe: Callable[[StoreT], object]
) -> StoreT:
    """Prepare "train" or "valid", as `prepare_stores` does."""
    progress.message(f"{name}: reading and tokenizing")
    try:
        store = prepare(name)
    except InputError as error:
        raise error.within(f"[data] {name}") from None
    progress.message(f"{name}: {describe(store)}")
    return store


def vocabulary(run_file: RunFile) -> tuple[str, int]:
    """Return the kind and the largest size of the vocabulary to train."""
    section = run_file.tokenizer
    assert section.kind is not None, "the rules of the run file want kind or path"
    return section.kind, section.vocab_size or (_BYTE_VOCABULARY if section.kind == "byte" else _NO_LIMIT)


def one_sided(tokenizer: Tokenizer) -> TokenizerPair:
    """Return one tokenizer as the pair that a run keeps."""
    return TokenizerPair(source=tokenizer, target=tokenizer, joint=True)


def train_word_tokenizer(
    run_file: RunFile, parse: Callable[[Mapping[str, Any]], Any], texts: Callable[[Any, Share], Iterable[str]]
) -> Tokenizer:
    """Train the tokenizer of a run on its labelled texts, or load it from the cache.

    Args:
        run_file: the checked run file.
        parse: turns a [data] table into a source.
        texts: reads the texts of a share of a source.
    """
    source, share = part_of(run_file, "train", parse)
    kind, size = vocabulary(run_file)
    return cached_tokenizer(
        LazyTexts(lambda: texts(source, share)), [*source.identity(), list(share)], kind=kind, vocab_size=size
    )


def evenly_spaced(length: int, count: int) -> list[int]:
    """Return up to `count` indices below `length`, evenly spaced."""
    count = min(count, length)
    return [index * length // count for index in range(count)]


@dataclass(frozen=True)
class LazyTexts(Iterable[str]):
    """Texts that are read anew on every iteration, and not before.

    Args:
        read: reads them.
    """

    read: Callable[[], Iterable[str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())
