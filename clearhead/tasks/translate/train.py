"""Training of translation: the encoder reads the source text, the decoder predicts the target text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import nn

from clearhead.core import Transformer
from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch, seq2seq_batch
from clearhead.data.batches.plans import LengthSortedPlan, training_batches, validation_batches
from clearhead.data.sources.pairs import read_pairs
from clearhead.data.stores.store import Store
from clearhead.generate.continuation import generate_ids
from clearhead.generate.decoder import Decoder
from clearhead.generate.options import SearchOptions
from clearhead.generate.scoring.result import Validation
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.evaluate.translations import bleu_chrf, join_segments
from clearhead.tasks.train import PairTraining, evenly_spaced, mean_token_loss
from clearhead.text.pair import TokenizerPair
from clearhead.training.preflight import ONCE
from clearhead.training.task_setup import PreparedTask

MEASURED_SECONDS: Final = 0.3
"""Shortest measured time, in seconds, from which the time for all sentences is extrapolated."""


class Training(PairTraining):
    """Training of a translator."""

    def parts(self) -> PreparedTask[Batch]:
        """Return the prepared task of the run: its data, tokenizers and spec."""
        setup, train = self.setup, self.run_file.train
        joint = self.run_file.tokenizer.joint is not False
        tokenizers = setup.find_tokenizers(lambda: self.train_tokenizers(joint=joint))
        stores = self.pairs(tokenizers)
        spec = setup.build_spec(
            source_vocab=tokenizers.source.vocab_size, target_vocab=tokenizers.target.vocab_size, joint=tokenizers.joint
        )
        self.need_two_stacks(spec)
        store, valid = stores.train, stores.valid
        plan = LengthSortedPlan(*store.input_lengths, batch_tokens=train.batch_tokens, seed=train.seed)
        batches = training_batches(store, plan, lambda rows: collate_pairs(store, rows, tokenizers))
        setup.progress.message(f"padding: {100 * plan.padding_waste(0):.1f} % of the positions in a batch")
        translator = self._translator(valid, tokenizers)

        def validate(module: nn.Module) -> Validation:
            pairs = validation_batches(
                valid, lambda rows: collate_pairs(valid, rows, tokenizers), batch_tokens=self.budget
            )
            loss = mean_token_loss(module, pairs, setup.device)
            return Validation(loss=loss, score=translator.bleu(module) if translator else None)

        return PreparedTask(
            tokenizers=tokenizers,
            spec=spec,
            batches=batches,
            loss=self.loss,
            validate=validate,
            sides=self.sides(stores, tokenizers),
            largest=collate_pairs(store, plan.widest(), tokenizers),
            mean_tokens=plan.num_tokens / batches.batches_per_epoch,
            valid_share=stores.valid_share,
            record=TaskRecord(kind="translate", max_length=self.run_file.data.max_length),
            valid_data=valid.identity,
            score_seconds=translator.seconds if translator else None,
        )

    def _translator(self, store: Store, tokenizers: TokenizerPair) -> _Translator | None:
        """Return a translator of a sample of validation sentences; None if the run computes no BLEU."""
        rows = evenly_spaced(len(store), self.run_file.train.bleu_sentences or 0)
        if not rows:
            return None
        lines, (sources, targets) = read_pairs(*self.source("valid"))["target"], store.texts
        return _Translator(
            tokenizers,
            sources=[sources[row].tolist() for row in rows],
            references=[lines[store.arrays["lines"][row]] for row in rows],
            steps=float(np.mean([len(targets[row]) + 1 for row in rows])),
        )


@dataclass(frozen=True)
class _Translator:
    """Translates a sample of validation sentences greedily, to compute BLEU during training.

    Args:
        tokenizers: the tokenizers of source and target.
        sources: the ids of the source sentences, without special ids; at least one.
        references: the reference translations.
        steps: the mean number of tokens in a reference translation.
    """

    tokenizers: TokenizerPair
    sources: Sequence[list[int]]
    references: Sequence[str]
    steps: float

    def bleu(self, module: nn.Module) -> float:
        """Translate the sample, and return the BLEU of the translations, 0 to 100."""
        translations = self.translations(module, self.sources)
        if self.tokenizers.target.kind != "split":
            return bleu_chrf(translations, self.references, tokenize="13a").bleu
        return bleu_chrf(translations, [join_segments(text) for text in self.references], tokenize="none").bleu

    def seconds(self, module: nn.Module) -> float:
        """Return the time of the translations in seconds, extrapolated from a few steps on some sentences.

        A full measurement would mislead: an untrained model decodes to the length limit, a trained model stops earlier.
        """
        self.translations(module, self.sources[:1], max_length=1)  # warm-up: the first call takes longer
        sources = self.sources[:1]

        def measure_seconds(length: int) -> float:
            began = time.perf_counter()
            self.translations(module, sources, max_length=length)
            return time.perf_counter() - began

        # Double the number of sentences, evenly spaced, until one step takes long enough to measure.
        while measure_seconds(1) < MEASURED_SECONDS and len(sources) < len(self.sources):
            sources = self.sources[:: max(1, len(self.sources) // (2 * len(sources)))]
        # Measure alternately and take the minimum of each, since other load only slows a run down.
        pairs = [(measure_seconds(1), measure_seconds(5))]
        if sum(pairs[0]) < ONCE:
            pairs.append((measure_seconds(1), measure_seconds(5)))
        first, fifth = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        seconds = first + max(0.0, fifth - first) / 4 * (self.steps - 1)
        return seconds * len(self.sources) / len(sources)

    def translations(
        self, module: nn.Module, sources: Sequence[list[int]], *, max_length: int | None = None
    ) -> list[str]:
        """Return the greedy translations of tokenized source sentences."""
        assert isinstance(module, Transformer), "a model that translates is a Transformer"
        target = self.tokenizers.target
        special_tokens = self.tokenizers.source.special_tokens.with_target(target.special_tokens.for_target)
        request = Decoder(module, self.tokenizers, special_tokens).source_request(
            [special_tokens.for_source(ids) for ids in sources], SearchOptions(beam_size=1, max_length=max_length)
        )
        return [target.decode(candidates[0].ids) for candidates in generate_ids(module, request)]


def collate_pairs(store: Store, rows: Indices, tokenizers: TokenizerPair) -> Batch:
    """Return a batch of pairs.

    Args:
        store: the store of the pairs.
        rows: the indices of the pairs, in the order of the batch; at least one.
        tokenizers: the tokenizers of source and target.
    """
    source_ids, target_ids = (side.take(rows) for side in store.texts)
    return seq2seq_batch(source_ids, target_ids, tokenizers.source, tokenizers.target, rows, limits=store.longest)
