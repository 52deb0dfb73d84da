"""Interface between training and tasks: the inputs of a task, and the prepared task that it returns.

Training finds a task by its name and imports none; the `train` module of a task imports this file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from numpy import ndarray
from torch import nn

from clearhead import spec
from clearhead.base.commands import quote
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.data.arrays import Ragged
from clearhead.data.batches.base import BatchT
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.sources.run_file_tables import describe_data_format
from clearhead.generate.scoring.result import Validation
from clearhead.spec.presets.task_heads import with_head
from clearhead.spec.tasks.record import Repeats, TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.init_from import InitialModel
from clearhead.training.preflight import Workload
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.record import Metric
from clearhead.training.runfile.model_table import resolve_spec, with_dropout
from clearhead.training.runfile.sections import RunFile


@dataclass(frozen=True)
class TaskSetup:
    """The inputs that a task gets from training.

    Attributes:
        run_file: the checked run file.
        find_tokenizers: a function that returns the tokenizers of the run: those of its checkpoint, of its initial
            model or of a file. If there are none, it calls its argument, which trains them.
        initial: the model from which the run starts. None means from scratch.
        progress: the display that receives messages.
        device: the device of the model.
    """

    run_file: RunFile
    find_tokenizers: Callable[[Callable[[], TokenizerPair]], TokenizerPair]
    initial: InitialModel | None
    progress: TrainingProgress
    device: torch.device

    def find_tokenizer(self, train: Callable[[], Tokenizer]) -> Tokenizer:
        """Return the tokenizer of a task with one tokenizer; `train` trains it if there is none yet.

        Raises:
            InputError: the two sides have different tokenizers, or the tokenizer differs from that of the checkpoint.
        """

        pair = self.find_tokenizers(lambda: one_sided(train()))
        if not pair.joint:
            raise InputError(
                f"the task '{self.run_file.task.kind}' takes one tokenizer, but the source and target sides of this "
                "one differ"
            )
        return pair.source

    def build_spec(
        self,
        *,
        source_vocab: int,
        target_vocab: int | None = None,
        joint: bool = True,
        head: spec.Head | None = None,
    ) -> spec.Model:
        """Return the spec of the model: that of the initial model, or that of the [model] table.

        Args:
            source_vocab: the vocabulary size of the first stack.
            target_vocab: the vocabulary size of the decoder. None means the same as `source_vocab`.
            joint: True if both sides share one vocabulary.
            head: the head of the model. None means a vocabulary head.

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
            )
        base, length = with_dropout(self.initial.spec, self.run_file.model), self.run_file.data.max_length
        if base.declared_length is not None and length > (base.position_limit or length):
            # Training on longer sequences extends the checkpoint's limit.
            base = base.model_copy(update={"declared_length": length})
        if head is not None:
            return with_head(base, head)
        if self.initial.has_vocabulary_head:
            return base
        head = self.initial.vocabulary_head(self.run_file.task.kind)
        if head is None:
            raise InputError(
                f"[task] init: the model was trained to '{self.initial.record.kind}', so it has no vocabulary head for "
                f"the task '{self.run_file.task.kind}'"
            )
        return with_head(base, head)

    def find_head(self, record: TaskRecord) -> tuple[spec.Head, Repeats | None] | None:
        """Return the head of the initial model or its family that fits a record's labels, and its decoder input.

        Args:
            record: the record of the task.

        Returns:
            The head and `repeats` of its decoder input; None if there is no initial model or no such head.
        """
        if self.initial is None:
            return None
        if self.initial.has_labels_of(record) and self.initial.spec.head is not None:
            return self.initial.spec.head, self.initial.record.repeats
        return self.initial.family_head(record)


@dataclass(frozen=True)
class DataSide:
    """One side of the data, source or target: the facts that must fit the model.

    Attributes:
        name: the name of the side, "source" or "target".
        largest_id: the largest token id in the data.
        longest: the number of tokens of the longest sequence, special tokens included.
        special_ids: the ids of the special tokens by role, such as "pad" and "eos".
    """

    name: str
    largest_id: int
    longest: int
    special_ids: Mapping[str, int]

    @classmethod
    def of(cls, name: str, tokenizer: Tokenizer, *, largest_id: int, longest: int) -> DataSide:
        """Return the facts about one side of the data, with the special ids of its tokenizer."""
        return cls(
            name, largest_id, longest, {role: getattr(tokenizer, f"{role}_id") for role in ("pad", "bos", "eos")}
        )

    @classmethod
    def of_texts(
        cls, name: str, tokenizer: Tokenizer, texts: Iterable[Ragged], lengths: Iterable[Int64[ndarray, " _"]]
    ) -> DataSide:
        """Return the facts about some texts; `lengths` has the number of tokens per row, special tokens included."""
        largest = max(int(text_ids.ids.max()) for text_ids in texts)
        return cls.of(name, tokenizer, largest_id=largest, longest=max(int(counts.max()) for counts in lengths))

    def faults(self, model: Transformer, init: str = "") -> list[str]:
        """Return one message for each fact of the side that does not fit a model.

        Args:
            model: the plain module.
            init: the trained model from which the run starts; empty means none.
        """
        faults, rows = [], model.num_target_ids if self.name == "target" else model.num_source_ids
        if self.largest_id >= rows:
            faults.append(
                f"The {self.name} data has the token id {self.largest_id}, but the model's {self.name} vocabulary ends "
                f"at {rows - 1}. The data was made with another tokenizer, or the vocabulary is too small."
            )
        if model.max_positions is not None and self.longest > model.max_positions:
            faults.append(
                f"The longest {self.name} has {self.longest} tokens, but the model has {model.max_positions} "
                f"positions: lower data.max_length to {model.max_positions}, or {_more_positions(init, self.longest)}."
            )
        for role, token_id in self.special_ids.items():
            if not 0 <= token_id < rows:
                faults.append(
                    f"The {self.name} id for {role} is {token_id}, but the ids of the model's vocabulary end at "
                    f"{rows - 1}."
                )
        return faults


def _more_positions(init: str, longest: int) -> str:
    """Return the fix for too few positions: a key of the run file, or a command that extends a trained model."""
    if not init:
        return "raise model.max_positions"
    saved = f"{Path(init.partition('@')[0]).name}-{longest}"
    code = f"import clearhead as ch; ch.surgery.resize_positions(ch.load({init!r}), {longest}).model.save({saved!r})"
    return (
        f"give {init} more of them with: {quote(sys.executable)} -c {quote(code)} - and then train with "
        f"{quote(f'task.init={saved}')}"
    )


@dataclass(frozen=True, kw_only=True)
class PreparedTask(Workload[BatchT]):
    """A task that is prepared for training: its workload, model and data.

    Attributes:
        tokenizers: the tokenizers of the run; both sides have the same one if the task has only one.
        spec: the spec of the model to build.
        batches: the endless training batches.
        validate: a function that validates the module; called in evaluation mode.
        sides: the facts about each side of the data, source and target, for the checks before the first step.
        mean_tokens: the number of tokens of an average batch.
        record: the task record of the trained model.
        valid_data: the identity of the validation data; scores on other data cannot be compared.
        score_name: the name of the validation score; empty means that of the task.
        best_by: the metric that decides which checkpoint is best.
        compares_rows: True if the loss compares the rows of a batch; several processes then cannot divide them. False
            means that batches are of the class `Batch`.
    """

    tokenizers: TokenizerPair
    spec: spec.Model
    batches: EpochBatches[BatchT]
    validate: Callable[[nn.Module], Validation]
    sides: list[DataSide]
    mean_tokens: float
    record: TaskRecord
    valid_data: str
    score_name: str = ""
    best_by: Metric = "loss"
    compares_rows: bool = False


def prepare_task(setup: TaskSetup) -> PreparedTask[Any]:
    """Prepare the data, tokenizers and spec of a run with the class `Training` of its task.

    Raises:
        InputError: the data, the tokenizers or the sizes cannot be used.
    """
    task = find_task(setup.run_file.task.kind)
    parts: PreparedTask[Any] = task.module("train").Training(setup).parts()
    table = setup.run_file.data.train.model_dump(exclude_none=True)
    record = parts.record.model_copy(update={"reading": describe_data_format(table)})
    num_sizes = parts.batches.plan.num_sizes()
    return replace(parts, record=record, score_name=parts.score_name or task.score, num_sizes=num_sizes)


def one_sided(tokenizer: Tokenizer) -> TokenizerPair:
    """Return a pair that has the same tokenizer on both sides."""
    return TokenizerPair(source=tokenizer, target=tokenizer, joint=True)
