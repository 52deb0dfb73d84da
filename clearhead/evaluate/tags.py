"""How well a model tags the words of sentences.

Shape suffixes: W words, N words of a batch, L tags.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.tagged import TaggedSource
from clearhead.data.stores.tagged import TagStore, prepare_tagged
from clearhead.evaluate.metrics import EntityScores, entity_f1
from clearhead.predict.outputs import max_input_length
from clearhead.predict.tag import check_tagger, word_logits
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TagEvaluation:
    """What a model reaches on tagged sentences.

    Args:
        loss: mean over words, in nats.
        scores: entities, counted as conlleval does.
        report: which sentences of the source were used, as a sentence.
    """

    loss: float
    scores: EntityScores
    report: str


def evaluate_tags(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    source: TaggedSource,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> TagEvaluation:
    """Run a tagger over the sentences of a source and score it.

    Args:
        module: used in evaluation mode, its own mode is restored.
        tokenizer: the tokenizer it was trained with.
        record: the task it was trained for.
        source: tagged sentences.
        batch_size: most chunks of one batch; None: no limit but the tokens.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer chunk is a batch of its own.

    Raises:
        InputError: the model is not a tagger, or the source is unusable or has other tags.
        RunFailure: the model's outputs are not finite.
    """
    tags = check_tagger(module, record)
    max_length = max_input_length(module, record.max_length)
    store = prepare_tagged(source, tokenizer, max_length=max_length, tags=tags)
    return evaluate_tag_store(module, tokenizer, store, batch_size=batch_size, batch_tokens=batch_tokens)


def evaluate_tag_store(
    module: Transformer,
    tokenizer: Tokenizer,
    store: TagStore,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> TagEvaluation:
    """Run a model over prepared sentences and score it.

    Args:
        module: its head gives one output of a token for each tag; used in evaluation mode, its own mode is restored.
        tokenizer: the tokenizer of the store.
        store: the sentences.
        batch_size, batch_tokens: as for `evaluate_tags`.

    Raises:
        RunFailure: the model's outputs are not finite.
    """
    offsets = store.chunks.offsets
    chunks = [slice(start, end) for start, end in itertools.pairwise(offsets)]
    expected_W = np.array(store.word_tags, dtype=np.int64)
    predicted_W = np.full_like(expected_W, store.tags.fallback)
    total, count = 0.0, 0
    for words_N, logits_NL in word_logits(
        module,
        InputCollator.of(module.spec, tokenizer),
        [store.chunks.ids[chunk] for chunk in chunks],
        [store.words[chunk] for chunk in chunks],
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    ):
        total += float(F.cross_entropy(logits_NL, torch.from_numpy(expected_W[words_N]), reduction="sum"))
        count += len(words_N)
        predicted_W[words_N] = logits_NL.argmax(1).numpy()
    scores = entity_f1(store.names_of(predicted_W), store.names_of(expected_W))
    return TagEvaluation(total / count, scores, str(store.report))
