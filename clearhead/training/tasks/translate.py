"""Translation: an encoder for the source text and a decoder for the target text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.collate import collate_pairs
from clearhead.data.batches.plans import LengthSortedPlan, training_batches, validation_batches
from clearhead.data.sources.pairs import parse_pair_source, read_pairs
from clearhead.data.sources.run_file_tables import Form
from clearhead.data.sources.tables import TableSource
from clearhead.data.stores.pairs import PairStore, prepare_pairs
from clearhead.data.stores.tokenizers import cached_tokenizers
from clearhead.errors import InputError
from clearhead.evaluate.result import Validation
from clearhead.evaluate.translations import bleu_chrf, join_segments
from clearhead.generate.options import SearchOptions
from clearhead.generate.translation import translate_ids
from clearhead.task import TaskRecord
from clearhead.tasks.data import PairSection
from clearhead.text.pair import TokenizerPair
from clearhead.training.losses.tokens import mean_token_loss
from clearhead.training.progress.reports import Progress
from clearhead.training.runfile.sections import RunFile
from clearhead.training.tasks.base import (
    DataSide,
    Stores,
    TaskParts,
    TaskSetup,
    evenly_spaced,
    prepare_stores,
    vocabulary,
)


def parts(setup: TaskSetup) -> TaskParts[Batch]:
    """Prepare pairs, tokenizers and model of a translation run.

    Raises:
        InputError: the data, the tokenizers or the sizes cannot be used.
    """
    run_file, train = setup.run_file, setup.run_file.train
    tokenizers = setup.find_tokenizers(lambda: _train_tokenizers(run_file))
    stores = prepare_parallel(run_file, tokenizers, setup.progress)
    spec = setup.build_spec(
        source_vocab=tokenizers.source.vocab_size, target_vocab=tokenizers.target.vocab_size, joint=tokenizers.joint
    )
    if spec.encoder is None or spec.decoder is None:
        raise InputError("the task 'translate' needs a model with encoder and decoder; this one has a single stack")
    store = stores.train
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=train.batch_tokens, seed=train.seed)
    batches = training_batches(store, plan, lambda rows: collate_pairs(store, rows))
    setup.progress.message(f"padding: {100 * plan.padding_waste(0):.1f} % of the positions in a batch")

    return TaskParts(
        tokenizers=tokenizers,
        spec=spec,
        batches=batches,
        loss=setup.token_loss,
        validate=_validator(run_file, tokenizers, stores.valid, setup.device),
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
        record=TaskRecord(kind="translate", max_length=run_file.data.max_length),
        valid_data=stores.valid.identity,
        score_name="BLEU",
        score_seconds=_score_seconds(run_file, tokenizers, stores.valid),
    )


def pair_source(table: Form) -> TableSource:
    """Return the source that a [data] table of pairs means."""
    return parse_pair_source(table.model_dump(exclude_none=True))


def prepare_parallel(
    run_file: RunFile, tokenizers: TokenizerPair, progress: Progress, *, extra: tuple[int, int] | None = None
) -> Stores[PairStore]:
    """Return the prepared pairs of training and validation, and report what the filters dropped.

    Args:
        run_file: the checked run file.
        tokenizers: of both sides.
        progress: receives the reports.
        extra: special tokens around a source and around a target; None: those of a translation.

    Raises:
        InputError: a source is unusable.
    """
    data = run_file.data
    assert isinstance(data, PairSection), "the task is on pairs"

    def prepare(name: str) -> PairStore:
        source, is_train = pair_source(getattr(data, name)), name == "train"
        return prepare_pairs(
            source, tokenizers, max_length=data.max_length, max_ratio=data.max_ratio, training=is_train, extra=extra
        )

    return prepare_stores(progress, prepare, lambda store: store.report)


def _train_tokenizers(run_file: RunFile) -> TokenizerPair:
    kind, size = vocabulary(run_file)
    joint = run_file.tokenizer.joint is not False
    return cached_tokenizers(pair_source(run_file.data.train), kind=kind, vocab_size=size, joint=joint)


def _validator(
    run_file: RunFile, tokenizers: TokenizerPair, store: PairStore, device: torch.device
) -> Callable[[nn.Module], Validation]:
    """Return the validation on held-out pairs: the loss of a target token, and BLEU of some greedy translations."""
    scored = _scored(run_file, store)
    assert isinstance(run_file.data.valid, Form), "the rules of the run file refuse a share of pairs"
    texts = read_pairs(pair_source(run_file.data.valid))["target"] if scored else []
    references = [texts[store.lines[row]] for row in scored]
    if tokenizers.target.kind == "split":
        references = [join_segments(text) for text in references]
    budget = max(run_file.train.batch_tokens, run_file.data.max_length)

    def validate(module: nn.Module) -> Validation:
        assert isinstance(module, Transformer), "translation needs the module that was built for it"
        batches = validation_batches(store, lambda rows: collate_pairs(store, rows), batch_tokens=budget)
        loss = mean_token_loss(module, batches, device)
        sources = [store.sources[row].tolist() for row in scored]
        return Validation(loss=loss, score=_bleu(module, tokenizers, sources, references) if scored else None)

    return validate


def _scored(run_file: RunFile, store: PairStore) -> list[int]:
    """Return the pairs whose sources are translated for BLEU."""
    return evenly_spaced(len(store), run_file.train.bleu_sentences or 0)


def _score_seconds(
    run_file: RunFile, tokenizers: TokenizerPair, store: PairStore
) -> Callable[[nn.Module], float] | None:
    """Return what measures the time of BLEU: the seconds of a few decoding steps, times the steps of the references.

    An untrained model would decode to the limit, where a trained one ends its translations.
    """
    scored = _scored(run_file, store)
    if not scored:
        return None
    sources = [store.sources[row].tolist() for row in scored]
    steps = float(np.mean([len(store.targets[row]) + 1 for row in scored]))

    def seconds(module: nn.Module) -> float:
        assert isinstance(module, Transformer), "translation needs the module that was built for it"
        _translations(module, tokenizers, sources[:1], max_length=1)  # the first call takes longer

        def timed(length: int) -> float:
            began = time.perf_counter()
            _translations(module, tokenizers, sources, max_length=length)
            return time.perf_counter() - began

        # In turn, and the least of each: what else runs on the machine only adds to a time.
        pairs = [(timed(1), timed(5)) for _ in range(2)]
        first, more = min(one for one, _ in pairs), min(five for _, five in pairs)
        return first + max(0.0, more - first) / 4 * (steps - 1)

    return seconds


def _bleu(
    module: Transformer, tokenizers: TokenizerPair, sources: Sequence[list[int]], references: Sequence[str]
) -> float:
    """Return BLEU of greedy translations."""
    found = _translations(module, tokenizers, sources)
    return bleu_chrf(found, references, tokenize="none" if tokenizers.target.kind == "split" else "13a").bleu


def _translations(
    module: Transformer, tokenizers: TokenizerPair, sources: Sequence[list[int]], *, max_length: int | None = None
) -> list[str]:
    """Return greedy translations."""
    target = tokenizers.target
    added = target.special_tokens.for_target
    found = translate_ids(
        module,
        [tokenizers.source.special_tokens.for_source(ids) for ids in sources],
        bos_id=added.prefix[0],
        eos_id=added.suffix[-1],
        pad_id=target.pad_id,
        options=SearchOptions(beam_size=1, max_length=max_length),
    )
    return [target.decode(candidates[0].ids) for candidates in found]
