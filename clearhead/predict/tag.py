"""The entities of a text, or the class of each of its words, with the characters they stand at.

Shape suffixes: B stretches of a batch, T tokens, W words, N words of a batch, L tags.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional as F

from clearhead.core import Transformer
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.tagged import tagged_epoch
from clearhead.data.sources.tagged import TaggedSource
from clearhead.data.stores.tag_set import TagSet
from clearhead.data.stores.tagged import TagStore, prepare_tagged
from clearhead.data.stores.word_chunks import NO_WORD, chunk_words
from clearhead.data.stores.word_splitter import WordSplitter
from clearhead.errors import InputError, RunFailure
from clearhead.evaluate.metrics import EntityScores, entity_f1, entity_spans
from clearhead.generate.batching import batches_by_cost, device_of, evaluation_mode, read_tokens
from clearhead.predict.classify import max_length_of
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer

# Where neither the record nor the model limits a sentence, memory should.
_LONGEST = 4096


@dataclass(frozen=True)
class Entity:
    """One entity, or one word where every word has a class.

    Args:
        label: its type.
        text: the characters it stands at.
        start, end: places in the given text, in characters; `end` is behind the last one.
        probability: of the tags that make it one, on average over its words, 0 to 1.
    """

    label: str
    text: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class Tagged:
    """Tags of words.

    Args:
        tags: the index of the tag of each word.
        probabilities: of that tag; 0 for a word that the tokenizer has no piece for, whose tag is the fallback.
    """

    tags: Int64[ndarray, " words"]
    probabilities: Float[ndarray, " words"]


@dataclass(frozen=True)
class JudgedTags:
    """A model's tags for tagged sentences.

    Args:
        loss: of a word on average, in nats.
        scores: counted as conlleval does.
    """

    loss: float
    scores: EntityScores


def tag(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    texts: Sequence[str] | Sequence[Sequence[str]],
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[list[Entity]]:
    """Return the entities of each text in order.

    Args:
        module: used in evaluation mode, its own mode is restored.
        tokenizer: what it was trained with.
        record: what it was trained for.
        texts: raw texts, which are split into words as the training data was; or each a list of words, whose entities
            then count characters in these words with a space between them.
        batch_size: most stretches of one batch; None: only the tokens count.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer stretch is a batch of its own.

    Raises:
        InputError: the model was not trained to tag, or a text is no text.
        RunFailure: the model's outputs are not finite.
    """
    tags = check_tagger(module, record)
    if isinstance(texts, str):
        raise InputError("tag() takes a list of texts; put the single text into a list")
    splitter = WordSplitter(record.inner_signs, record.sign_runs)
    wholes, borders = _split(texts, splitter)
    sentences = [[whole[start:end] for start, end in spans] for whole, spans in zip(wholes, borders, strict=True)]
    found = tag_words(
        module,
        tokenizer,
        sentences,
        fallback=tags.fallback,
        max_length=max_length_of(module, record) or _LONGEST,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    )
    return [_entities(whole, spans, one, tags) for whole, spans, one in zip(wholes, borders, found, strict=True)]


def tag_words(
    module: Transformer,
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    *,
    fallback: int,
    max_length: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[Tagged]:
    """Return the tag of each word of each sentence.

    Args:
        module: its head gives one output of a token for each tag.
        tokenizer: what it was trained with.
        sentences: words; a sentence may have none.
        fallback: the tag of a word that the tokenizer has no piece for.
        max_length: the longest stretch that is read at once, special ids included.
        batch_size: most stretches of one batch; None: only the tokens count.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`.

    Raises:
        RunFailure: the model's outputs are not finite.
    """
    collator = InputCollator.of(module.spec, tokenizer)
    extra = collator.special_tokens.num_added()
    ids: list[list[int]] = []
    words: list[list[int]] = []
    first_word = 0
    for sentence in sentences:
        for stretch in chunk_words(sentence, tokenizer, room=max_length - extra)[0] if sentence else []:
            ids.append(stretch.ids)
            words.append([word if word == NO_WORD else word + first_word for word in stretch.words])
        first_word += len(sentence)
    costs, budget = [len(part) + extra for part in ids], batch_tokens or read_tokens(module)
    batches = (
        _batch(collator, ids, words, rows) for rows in batches_by_cost(costs, budget=budget, most_rows=batch_size)
    )
    tags_W = np.full(first_word, fallback, dtype=np.int64)
    probabilities_W = np.zeros(first_word)
    for words_N, logits_NL in _word_logits(module, batches):
        best = logits_NL.double().softmax(1).max(1)
        tags_W[words_N], probabilities_W[words_N] = best.indices.numpy(), best.values.numpy()
    ends = np.cumsum([0, *map(len, sentences)])
    return [Tagged(tags_W[start:end], probabilities_W[start:end]) for start, end in itertools.pairwise(ends)]


def judge_tagged(module: Transformer, tokenizer: Tokenizer, store: TagStore, *, batch_tokens: int) -> JudgedTags:
    """Run a model over tagged sentences.

    Args:
        module: its head gives one output of a token for each tag; used in evaluation mode, its own mode is restored.
        tokenizer: what the store was made with.
        store: the sentences.
        batch_tokens: most padded tokens of one batch.

    Raises:
        InputError: a stretch is longer than the budget, or than the model's positions.
        RunFailure: the model's outputs are not finite.
    """
    collator = InputCollator.of(module.spec, tokenizer)
    batches = (
        _with_words(batch, store, collator) for batch in tagged_epoch(store, collator, batch_tokens=batch_tokens)
    )
    expected_W = np.array(store.word_tags, dtype=np.int64)
    predicted_W = np.full_like(expected_W, store.tags.fallback)
    total, count = 0.0, 0
    for words_N, logits_NL in _word_logits(module, batches):
        total += float(F.cross_entropy(logits_NL, torch.from_numpy(expected_W[words_N]), reduction="sum"))
        count += len(words_N)
        predicted_W[words_N] = logits_NL.argmax(1).numpy()
    return JudgedTags(total / count, entity_f1(store.names_of(predicted_W), store.names_of(expected_W)))


def evaluate_tagged(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    source: TaggedSource,
    *,
    batch_tokens: int | None = None,
) -> tuple[JudgedTags, str]:
    """Return how well a model tags the words of a source, and in words which of them were used.

    Args:
        module: used in evaluation mode, its own mode is restored.
        tokenizer: what it was trained with.
        record: what it was trained for.
        source: tagged sentences.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; raised to the longest stretch where that is
            longer.

    Raises:
        InputError: the model was not trained to tag, or the source is unusable or has other tags.
        RunFailure: the model's outputs are not finite.
    """
    tags = check_tagger(module, record)
    store = prepare_tagged(source, tokenizer, max_length=max_length_of(module, record) or _LONGEST, tags=tags)
    budget = max(batch_tokens or read_tokens(module), int(store.lengths.max()))
    return judge_tagged(module, tokenizer, store, batch_tokens=budget), str(store.report)


def check_tagger(module: Transformer, record: TaskRecord) -> TagSet:
    """Return the tags that a model gives.

    Raises:
        InputError: it was not trained to give any; the sentence says what to train.
    """
    head = module.head
    if record.kind != "tag" or not record.labels or head is None or head.is_pooled:
        raise InputError(
            f"this model was trained to '{record.kind}', so it knows no tags and would only guess: train it on tagged "
            'words with [task] kind = "tag" and init = "…", the path of this model'
        )
    outputs = head.projection().weight_VD.shape[0]
    if outputs != len(record.labels):
        raise InputError(
            f"the model has {outputs} outputs, but its record names {len(record.labels)} tags; restore the files of "
            "the same model"
        )
    return TagSet(record.labels)


def _split(
    texts: Sequence[str] | Sequence[Sequence[str]], splitter: WordSplitter
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Return each text as a whole, and where its words are."""
    wholes, borders = [], []
    for number, text in enumerate(texts, start=1):
        if isinstance(text, str):
            wholes.append(text)
            borders.append(splitter.spans(text))
            continue
        for word in text:
            if not word.strip():
                raise InputError(f"text {number} is a list of words, but one of them is {word!r}; leave it out")
        ends = list(itertools.accumulate((len(word) + 1 for word in text), initial=-1))[1:]
        wholes.append(" ".join(text))
        borders.append([(end - len(word), end) for word, end in zip(text, ends, strict=True)])
    return wholes, borders


def _entities(whole: str, spans: Sequence[tuple[int, int]], found: Tagged, tags: TagSet) -> list[Entity]:
    entities = []
    for first, behind, label in entity_spans([tags.names[index] for index in found.tags.tolist()]):
        start, end = spans[first][0], spans[behind - 1][1]
        probability = float(found.probabilities[first:behind].mean())
        entities.append(Entity(label, whole[start:end], start, end, probability))
    return entities


def _batch(
    collator: InputCollator, ids: Sequence[Sequence[int]], words: Sequence[Sequence[int]], rows: Sequence[int]
) -> tuple[Batch, Int64[Tensor, "batch tokens"]]:
    """Return some stretches as a batch, and the word that each of its tokens stands for."""
    rectangle = collator.collate([ids[row] for row in rows])
    words_BT = torch.full(rectangle.ids.shape, NO_WORD)
    for index, row in enumerate(rows):
        words_BT[index, collator.front : collator.front + len(words[row])] = torch.tensor(words[row])
    batch = Batch(
        ids=rectangle.ids,
        mask=rectangle.mask,
        labels=torch.full_like(rectangle.ids, NO_LABEL),
        num_labels=0,
        num_tokens=rectangle.num_tokens,
        rows=np.array(rows, dtype=np.int64),
        segments=rectangle.segments,
    )
    return batch, words_BT


def _with_words(batch: Batch, store: TagStore, collator: InputCollator) -> tuple[Batch, Int64[Tensor, "batch tokens"]]:
    """Return a batch of a store with the word that each of its tokens stands for."""
    words_BT = torch.full(batch.ids.shape, NO_WORD)
    for index, row in enumerate(batch.rows):
        start, end = store.side.offsets[row : row + 2]
        words_BT[index, collator.front : collator.front + end - start] = torch.from_numpy(
            np.array(store.words[start:end])
        )
    return batch, words_BT


def _word_logits(
    module: Transformer, batches: Iterable[tuple[Batch, Tensor]]
) -> Iterator[tuple[Int64[ndarray, " read"], Float[Tensor, "read tags"]]]:
    """Go through the words of all batches: which they are, and the outputs for each, float32 on the CPU."""
    device = device_of(module)
    with evaluation_mode(module), torch.inference_mode():
        for batch, words_BT in batches:
            moved, is_word_BT = batch.to(device), words_BT != NO_WORD
            logits_BTL = module(moved.ids, mask=moved.mask, segments=moved.segments).logits
            logits_NL = logits_BTL[is_word_BT.to(device)].float().cpu()
            if not bool(torch.isfinite(logits_NL).all()):
                raise RunFailure("the model's outputs are not finite: its weights are damaged, or training diverged")
            yield words_BT[is_word_BT].numpy(), logits_NL
