"""The training of the task: its head, its batches, its loss and its validation.

Shape suffixes: B texts of a batch, N all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import Transformer
from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import Ids, InputCollator
from clearhead.data.sources.tables import Share, TableSource
from clearhead.data.stores.store import Store
from clearhead.generate.scoring.result import Validation
from clearhead.spec.presets.task_heads import default_pool, with_head
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.outputs import run_batch
from clearhead.tasks.train import LabelledTraining, Stores
from clearhead.text.tokenizer import Tokenizer
from clearhead_rate.data import RateData, RateTask, read_rated
from clearhead_rate.store import prepare_rated, targets, units_of
from clearhead_rate.use import compare, numbers_of


class Training(LabelledTraining):
    """The training of a model that rates texts; what is not here is the base's."""

    def texts(self, source: TableSource, share: Share) -> Sequence[str]:
        """Return the texts on which a tokenizer is trained."""
        return read_rated(source, share)["text"]

    def prepare(self, source: TableSource, share: Share, tokenizer: Tokenizer, train: Store | None) -> Store:
        """Return texts and numbers as a store; the validation data has the units of the training data."""
        data = self.data_table(RateData)
        return prepare_rated(
            source,
            tokenizer,
            max_length=data.max_length,
            bounds=data.bounds,
            units=None if train is None else units_of(train),
            share=share,
        )

    def record(self, stores: Stores[Store]) -> TaskRecord:
        """Return what a trained model remembers of its task."""
        data, units = self.data_table(RateData), units_of(stores.train)
        return TaskRecord(
            kind="rate",
            max_length=data.max_length,
            number_mean=units.mean,
            number_scale=units.scale,
            facts=data.bounds.model_dump(),
        )

    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """Return the spec of the model: of the states of a text one vector, and of the vector one number."""
        linear = spec.Linear(size=1)
        model = self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=spec.Head(layers=(linear,)))
        pool = self.task_table(RateTask).pool or default_pool(model)
        return with_head(model, spec.Head(layers=(spec.Pool(by=pool), linear)))

    def collate(self, store: Store, collator: InputCollator) -> Callable[[Indices], Batch]:
        """Return what makes a batch of some texts."""

        def batch(rows: Indices) -> Batch:
            inputs = collator.collate([store.texts[0][row] for row in rows], limit=store.longest[0])
            return inputs.with_labels(torch.from_numpy(targets(store, rows)), rows, num_labels=len(rows))

        return batch

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, and the number of its texts."""
        assert isinstance(module, Transformer), "a number needs the module that was built for it"
        batch = batch.to(self.setup.device)
        difference_B = run_batch(module, batch)[:, 0].float() - batch.labels
        return self._errors(difference_B).sum(), len(difference_B)

    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: Store) -> Validation:
        """Return loss and score of the validation data."""
        texts: list[Ids] = [store.texts[0][row] for row in range(len(store))]
        expected_N = np.array(store.arrays["number"])
        predicted_N = numbers_of(module, tokenizer, record, [texts], batch_tokens=self.budget)
        difference_N = torch.from_numpy((predicted_N - expected_N) / units_of(store).scale)
        score = 100 * compare(predicted_N, expected_N).correlation
        return Validation(loss=float(self._errors(difference_N).mean()), score=score)

    def _errors(self, difference_N: Tensor) -> Tensor:
        return difference_N.abs() if self.task_table(RateTask).loss == "absolute" else difference_N.square()
