"""The training of translation: an encoder for the source text and a decoder for the target text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from torch import nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch, seq2seq_batch
from clearhead.data.batches.plans import LengthSortedPlan, training_batches, validation_batches
from clearhead.data.sources.pairs import read_pairs
from clearhead.data.sources.run_file_tables import Form
from clearhead.data.stores.arrays import Indices
from clearhead.data.stores.pairs import PairStore
from clearhead.evaluate.result import Validation
from clearhead.evaluate.translations import bleu_chrf, join_segments
from clearhead.generate.options import SearchOptions
from clearhead.generate.translation import translate_ids
from clearhead.tasks.record import TaskRecord
from clearhead.tasks.train import PairTraining, evenly_spaced
from clearhead.text.pair import TokenizerPair
from clearhead.training.losses import mean_token_loss
from clearhead.training.task_parts import DataSide, TaskParts


class Training(PairTraining):
    """The training of a translator."""

    def parts(self) -> TaskParts[Batch]:
        """As of `TaskTraining`."""
        setup, train = self.setup, self.run_file.train
        joint = self.run_file.tokenizer.joint is not False
        tokenizers = setup.find_tokenizers(lambda: self.train_tokenizers(joint=joint))
        stores = self.pairs(tokenizers)
        spec = setup.build_spec(
            source_vocab=tokenizers.source.vocab_size, target_vocab=tokenizers.target.vocab_size, joint=tokenizers.joint
        )
        self.need_two_stacks(spec)
        store = stores.train
        plan = LengthSortedPlan(*store.input_lengths, batch_tokens=train.batch_tokens, seed=train.seed)
        batches = training_batches(store, plan, lambda rows: collate_pairs(store, rows))
        setup.progress.message(f"padding: {100 * plan.padding_waste(0):.1f} % of the positions in a batch")
        scored = evenly_spaced(len(stores.valid), train.bleu_sentences or 0)
        translator = _Translator(tokenizers, [stores.valid.sources[row].tolist() for row in scored])
        steps = float(np.mean([len(stores.valid.targets[row]) + 1 for row in scored])) if scored else 0.0
        return TaskParts(
            tokenizers=tokenizers,
            spec=spec,
            batches=batches,
            loss=self.loss,
            validate=self._validator(stores.valid, translator, scored),
            sides=[
                DataSide.of(
                    "source",
                    tokenizers.source,
                    [store.sources for store in stores],
                    [store.input_lengths[0] for store in stores],
                ),
                DataSide.of(
                    "target",
                    tokenizers.target,
                    [store.targets for store in stores],
                    [store.input_lengths[1] for store in stores],
                ),
            ],
            widest=collate_pairs(store, plan.widest()),
            mean_tokens=plan.num_tokens / batches.batches_per_epoch,
            valid_share=stores.valid_share,
            record=TaskRecord(kind="translate", max_length=self.run_file.data.max_length),
            valid_data=stores.valid.identity,
            score_seconds=partial(translator.seconds, steps) if scored else None,
        )

    def _validator(
        self, store: PairStore, translator: _Translator, scored: Sequence[int]
    ) -> Callable[[nn.Module], Validation]:
        """Return the validation on held-out pairs: the loss of a target token, and BLEU of some greedy translations."""
        table = self.run_file.data.valid
        assert isinstance(table, Form), "the rules of the run file refuse a share of pairs"
        texts = read_pairs(self.pair_source(table))["target"] if scored else []
        references = [texts[store.lines[row]] for row in scored]

        def validate(module: nn.Module) -> Validation:
            batches = validation_batches(store, lambda rows: collate_pairs(store, rows), batch_tokens=self.budget)
            loss = mean_token_loss(module, batches, self.setup.device)
            return Validation(loss=loss, score=translator.bleu(module, references) if scored else None)

        return validate


@dataclass(frozen=True)
class _Translator:
    """Translates some sentences greedily.

    Args:
        tokenizers: of both sides.
        sources: their ids, without special ids.
    """

    tokenizers: TokenizerPair
    sources: Sequence[list[int]]

    def bleu(self, module: nn.Module, references: Sequence[str]) -> float:
        """Return BLEU of the translations."""
        if self.tokenizers.target.kind == "split":
            references = [join_segments(text) for text in references]
        tokenize: Literal["none", "13a"] = "none" if self.tokenizers.target.kind == "split" else "13a"
        return bleu_chrf(self.translations(module, self.sources), references, tokenize=tokenize).bleu

    def seconds(self, steps: float, module: nn.Module) -> float:
        """Return the seconds of translations of so many steps: those of a few steps, times the steps.

        An untrained model would decode to the limit, where a trained one ends its translations.
        """
        self.translations(module, self.sources[:1], max_length=1)  # the first call takes longer

        def timed(length: int) -> float:
            began = time.perf_counter()
            self.translations(module, self.sources, max_length=length)
            return time.perf_counter() - began

        # In turn, and the least of each: what else runs on the machine only adds to a time.
        pairs = [(timed(1), timed(5)) for _ in range(2)]
        first, more = min(few for few, _ in pairs), min(five for _, five in pairs)
        return first + max(0.0, more - first) / 4 * (steps - 1)

    def translations(
        self, module: nn.Module, sources: Sequence[list[int]], *, max_length: int | None = None
    ) -> list[str]:
        """Return greedy translations."""
        assert isinstance(module, Transformer), "translation needs the module that was built for it"
        source, target = self.tokenizers.source.special_tokens, self.tokenizers.target
        added = target.special_tokens.for_target
        candidates_of_texts = translate_ids(
            module,
            [source.for_source(ids) for ids in sources],
            bos_id=added.prefix[0],
            eos_id=added.suffix[-1],
            pad_id=target.pad_id,
            options=SearchOptions(beam_size=1, max_length=max_length),
        )
        return [target.decode(candidates[0].ids) for candidates in candidates_of_texts]


def collate_pairs(store: PairStore, rows: Indices) -> Batch:
    """Make a batch of some pairs.

    Args:
        store: the pairs.
        rows: which pairs, in the order of the batch; at least one.
    """
    tokenizers = store.tokenizers
    sides = store.sources.take(rows), store.targets.take(rows)
    return seq2seq_batch(*sides, tokenizers.source, tokenizers.target, rows, limits=store.longest)
