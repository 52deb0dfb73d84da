"""Predictions and metrics of token classification: entities, or a class per word, with character offsets.

Shape suffixes: B chunks of a batch, T tokens, W words, N words of a batch, L tags.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional as F

from clearhead.base.errors import InputError, nth_text
from clearhead.base.printing import Printed
from clearhead.base.progress import message
from clearhead.core import Transformer
from clearhead.data.arrays import Ragged
from clearhead.data.batches.inputs import Ids, InputCollator, ModelInputs
from clearhead.data.stores.store import Store
from clearhead.generate.scoring.result import Measures, f1_table, percent
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.evaluate.metrics import F1Counts
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.outputs import TextBlock, batch_outputs, block_starts, check_finite, max_input_length
from clearhead.tasks.tag.data import DATA
from clearhead.tasks.tag.splitting import NO_WORD, WordSplitter, chunk_sentences
from clearhead.tasks.tag.store import names_of, prepare_tagged, tags_of
from clearhead.tasks.tag.tag_set import OUTSIDE, TagSet, has_no_types
from clearhead.tasks.use import collate_texts, refuse_pair
from clearhead.text.long_texts import MOST_CHARACTERS, warn_of_long_texts
from clearhead.text.tokenizer import Tokenizer

WordSpan = tuple[int, int, str]
"""Span of an entity in words: first word, word after the last, and type."""


@dataclass(frozen=True, repr=False)
class Entity(Printed):
    """An entity, or a word if every word has a class.

    Args:
        label: the type of the entity; empty if the tags have no types (B, I and O).
        text: the text of the entity.
        start, end: the character offsets in the input text; `end` is exclusive.
        probability: the mean probability of the tags of its words, 0 to 1.
    """

    label: str
    text: str
    start: int
    end: int
    probability: float


@dataclass(frozen=True)
class WordTags:
    """Predicted tags of the words of a sentence.

    Args:
        tags: the tag index of each word.
        probabilities: the probability of each tag; 0 for a word without a token, which gets the fallback tag.
    """

    tags: Int64[ndarray, " words"]
    probabilities: Float[ndarray, " words"]


def tag(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    texts: Sequence[str] | Sequence[Sequence[str]],
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[list[Entity]]:
    """Return the entities of each text, in the order of the text.

    Args:
        module: the model; in training mode, a replica in evaluation mode runs in its place.
        tokenizer: the tokenizer of the model.
        record: the task record of the model.
        texts: the raw texts, which are split into words as in the training data, or lists of words. For lists,
            offsets count characters in the words joined by spaces. Long texts are read in chunks.
        batch_size: the maximum number of chunks in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; a longer chunk forms a separate batch. None means
            `read_tokens`.

    Raises:
        InputError: the model is not a tagger, or a text is not a string or a list of words.
        RunFailure: the model's outputs are not finite.
    """
    tags = check_tagger(module, record)
    splitter = WordSplitter(record.inner_signs, record.sign_runs)
    split_texts = [_split(text, number, splitter) for number, text in enumerate(texts, start=1)]
    num_long = sum(isinstance(text, str) and len(text) > MOST_CHARACTERS for text in texts)
    warn_of_long_texts(num_long, MOST_CHARACTERS, "characters")
    predicted = tag_words(
        module,
        tokenizer,
        [[text[start:end] for start, end in spans] for text, spans in split_texts],
        fallback=tags.fallback,
        max_length=max_input_length(module, record.max_length),
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    )
    return [_entities(text, spans, words, tags) for (text, spans), words in zip(split_texts, predicted, strict=True)]


def tag_words(
    module: Transformer,
    tokenizer: Tokenizer,
    sentences: Sequence[Sequence[str]],
    *,
    fallback: int,
    max_length: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[WordTags]:
    """Return the tag of each word of each sentence.

    Args:
        module: a model whose head gives each token one output per tag.
        tokenizer: the tokenizer of the model.
        sentences: the words of each sentence; a sentence may be empty.
        fallback: the tag index of words without a token.
        max_length: the maximum length of a chunk in tokens, special tokens included; a longer sentence is cut between
            words.
        batch_size: the maximum number of chunks in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; None means `read_tokens`.

    Raises:
        RunFailure: the model's outputs are not finite.
    """
    collator = InputCollator.of(module.spec, tokenizer)
    room = max_length - collator.special_tokens.num_added()
    ends = np.cumsum([0, *map(len, sentences)])
    starts = block_starts(len(sentences), module)
    tags_W = np.full(ends[-1], fallback, dtype=np.int64)
    probabilities_W = np.zeros(ends[-1])

    def chunk_blocks() -> Iterator[WordBlock]:
        for start in starts:
            chunks = chunk_sentences(sentences[start : start + starts.step], tokenizer, room=room)
            # Number of the sentence of each chunk, found by its last word.
            lasts = ends[start] + [max(words) for words in chunks.words]
            numbers = np.searchsorted(ends, lasts, side="right") - 1
            yield WordBlock([chunks.ids], numbers.tolist(), chunks.words, int(ends[start]))

    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    total = len(sentences) if len(starts) > 1 else None
    for words_N, logits_NL in word_logits(module, collator, chunk_blocks(), total=total, **sizes):
        best = logits_NL.double().softmax(1).max(1)
        tags_W[words_N], probabilities_W[words_N] = best.indices.numpy(), best.values.numpy()
    return [WordTags(tags_W[start:end], probabilities_W[start:end]) for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True)
class WordBlock(TextBlock):
    """Chunks of some sentences, with the words of their ids.

    Args:
        words: the word of each id of each chunk, if the id is the first token of a word; else NO_WORD.
        first_word: the number of the first word of these sentences; `words` are counted from it.
    """

    words: Sequence[Ids]
    first_word: int = 0


def word_logits(
    module: Transformer,
    collator: InputCollator,
    blocks: Iterable[WordBlock],
    *,
    total: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Iterator[tuple[Int64[ndarray, " words"], Float[Tensor, "words tags"]]]:
    """Yield, per batch, the indices of words and the logits of their first tokens in float32 on the CPU.

    Args:
        module: a model whose head gives each token one output per tag. If it is in training mode, a replica in
            evaluation mode runs in its place.
        collator: the collator of the model's inputs.
        blocks: the chunks of the sentences.
        total, batch_size, batch_tokens: the arguments of `batch_outputs`.

    Raises:
        RunFailure: the model's outputs are not finite.
    """
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    for block, rows, logits_BTL in batch_outputs(module, collator, blocks, total=total, **sizes):
        words_N = np.concatenate([block.words[row] for row in rows]).astype(np.int64)
        row_logits = zip(rows, logits_BTL[:, collator.front :], strict=True)
        logits_NL = torch.cat([logits_TL[: len(block.words[row])] for row, logits_TL in row_logits])
        is_word_N = words_N != NO_WORD
        logits_NL = logits_NL[torch.from_numpy(is_word_N)]
        check_finite(logits_NL)
        yield block.first_word + words_N[is_word_N], logits_NL


def check_tagger(module: Transformer, record: TaskRecord) -> TagSet:
    """Return the tag set of a tagger.

    Raises:
        InputError: the model is not a tagger; the message explains how to train one.
    """
    head = module.head
    if record.kind != "tag" or not record.labels or head is None or head.is_pooled:
        raise InputError(
            f"this model was trained to '{record.kind}', so it cannot tag words: train it on tagged "
            'words with [task] kind = "tag" and init = "…", the path of this model'
        )
    outputs = module.spec.num_outputs
    if outputs != len(record.labels):
        raise InputError(
            f"the model has {outputs} outputs, but its record names {len(record.labels)} tags; restore the files "
            "of the same model"
        )
    return TagSet(record.labels)


def entity_spans(tags: Sequence[str], *, is_bare: bool = False) -> list[WordSpan]:
    """Return the entities of a sentence, each as (first word, word after the last, entity type).

    The rules are those of conlleval: B begins an entity, and so does I after another type or after O. E ends an entity,
    and S is an entity of one word. With plain classes (tags without prefix) every word is an entity.

    Args:
        tags: the tag of each word.
        is_bare: True if B, I, E and S without a type mark entities; their type is then empty.

    Source: Tjong Kim Sang and Buchholz 2000, and its program conlleval.
    """
    spans: list[WordSpan] = []
    start, last_prefix, last_type = 0, OUTSIDE, ""
    for index, name in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(name, is_bare=is_bare)
        is_border = prefix in "BSO" or last_prefix in "ESO" or kind != last_type
        if is_border and last_prefix != OUTSIDE:
            spans.append((start, index, last_type))
        if is_border:
            start = index
        last_prefix, last_type = prefix, kind
    return spans


def split_tag(tag: str, *, is_bare: bool = False) -> tuple[str, str]:
    """Return the prefix of a tag (B, I, E or S) and its entity type; a plain class has the prefix S."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    if len(tag) > 2 and tag[0] in "BIES" and tag[1] == "-":
        return tag[0], tag[2:]
    return (tag, "") if is_bare else ("S", tag)


def _split(text: str | Sequence[str], number: int, splitter: WordSplitter) -> tuple[str, Sequence[tuple[int, int]]]:
    """Split a text into words: return the text (listed words joined by spaces) and each word's character offsets."""
    if isinstance(text, str):
        text = text[:MOST_CHARACTERS]
        return text, splitter.spans(text)
    for word in text:
        if not word.strip():
            raise InputError(nth_text(number) + f" is a list of words, but one of them is {word!r}; leave it out")
    ends = list(itertools.accumulate((len(word) + 1 for word in text), initial=-1))[1:]
    return " ".join(text), [(end - len(word), end) for word, end in zip(text, ends, strict=True)]


def _entities(text: str, spans: Sequence[tuple[int, int]], words: WordTags, tags: TagSet) -> list[Entity]:
    entities = []
    names = [tags.names[index] for index in words.tags.tolist()]
    for first, after, label in entity_spans(names, is_bare=has_no_types(tags.names)):
        start, end = spans[first][0], spans[after - 1][1]
        probability = float(words.probabilities[first:after].mean())
        entities.append(Entity(label, text[start:end], start, end, probability))
    return entities


def predict(model: Any, texts: Sequence[Any], *, batch_size: int | None = None) -> list[list[Entity]]:
    """Return the entities of each text; see `Model.tag`."""
    entities: list[list[Entity]] = model.tag(list(texts), batch_size=batch_size)
    return entities


def read_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return the model inputs for a text, with a space between its words; see `collate_texts`."""
    refuse_pair(texts, task)
    spans = WordSplitter(task.inner_signs, task.sign_runs).spans(texts[0])
    return collate_texts([" ".join(texts[0][start:end] for start, end in spans)], collator, tokenizer, task)


@dataclass(frozen=True)
class EntityScores:
    """Entity scores as conlleval reports them.

    Args:
        all: the counts over all entity types.
        by_type: the counts of each entity type, sorted by name.
        tag_accuracy: the share of words with the right tag, 0 to 1.
        num_words: the number of words.
    """

    all: F1Counts
    by_type: Mapping[str, F1Counts]
    tag_accuracy: float
    num_words: int


def entity_f1(predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> EntityScores:
    """Return entity scores as conlleval computes them: an entity is right if first word, last word and type are right.

    Args:
        predicted: the predicted tags of each sentence.
        expected: the right tags of each sentence.
    """
    num_expected, num_predicted, num_correct = Counter[str](), Counter[str](), Counter[str]()
    right = num_words = 0
    spans_of = partial(entity_spans, is_bare=has_no_types(itertools.chain.from_iterable([*predicted, *expected])))
    for guessed, true in zip(predicted, expected, strict=True):
        guessed_spans, true_spans = set(spans_of(guessed)), set(spans_of(true))
        num_expected.update(kind for _, _, kind in true_spans)
        num_predicted.update(kind for _, _, kind in guessed_spans)
        num_correct.update(kind for _, _, kind in guessed_spans & true_spans)
        right += sum(tag == right_tag for tag, right_tag in zip(guessed, true, strict=True))
        num_words += len(true)
    by_type = {}
    for kind in sorted(num_expected | num_predicted):
        by_type[kind] = F1Counts(num_expected[kind], num_predicted[kind], num_correct[kind])
    return EntityScores(
        all=F1Counts(num_expected.total(), num_predicted.total(), num_correct.total()),
        by_type=by_type,
        tag_accuracy=right / num_words if num_words else 0.0,
        num_words=num_words,
    )


@dataclass(frozen=True, repr=False, eq=False)
class TagMeasures(Measures):
    """Metrics of a tagger; entities are counted as in conlleval.

    Args:
        f1, precision, recall: the scores over all entities, 0 to 1.
        tag_accuracy: the share of words with the right tag, 0 to 1.
        words: the number of words.
        types: precision, recall, F1 and expected count of each entity type.
        loss: the mean cross-entropy per word, in nats.
    """

    f1: float
    precision: float
    recall: float
    tag_accuracy: float
    words: int
    types: Mapping[str, Mapping[str, float | int | None]]
    loss: float

    @property
    def score(self) -> float:
        """The validation score: the F1 of entities times 100."""
        return 100 * self.f1

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        count = sum(row["count"] or 0 for row in self.types.values())
        whole = {"precision": self.precision, "recall": self.recall, "f1": self.f1, "count": count}
        share = f"accuracy of tags  {percent(self.tag_accuracy)} of {self.words} words"
        # Entities without a type have a single row, which would repeat the row "all".
        types = {name: row for name, row in self.types.items() if name}
        return [*f1_table("entities", {"all": whole, **types}, "count"), "", share]


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> TagMeasures:
    """Return the metrics of a tagger on tagged sentences.

    Raises:
        InputError: the model is not a tagger, or the data cannot be used or has other tags.
        RunFailure: the model's outputs are not finite.
    """
    tags, tokenizer, task = check_tagger(model.tree, model.task), model.tokenizers.source, model.task
    max_length = max_input_length(model.tree, task.max_length)
    store = prepare_tagged(DATA.source(data), tokenizer, max_length=max_length, tags=tags)
    measures = measure_store(model.tree, tokenizer, store, batch_size=options.batch_size)
    message(store.report)
    return measures


def measure_store(
    module: Transformer,
    tokenizer: Tokenizer,
    store: Store,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> TagMeasures:
    """Tag the words of prepared sentences, and return the metrics.

    Args:
        module: a model whose head gives each token one output per tag. If it is in training mode, a replica in
            evaluation mode runs in its place.
        tokenizer: the tokenizer of the store.
        store: the store of the sentences.
        batch_size, batch_tokens: the limits of a batch, see `tag`.

    Raises:
        RunFailure: the model's outputs are not finite.
    """
    chunks, words = store.texts[0], Ragged(store.arrays["words"], store.texts[0].offsets)
    expected_W = np.array(store.ragged_rows("tag").ids, dtype=np.int64)
    predicted_W = np.full_like(expected_W, tags_of(store).fallback)
    total, count = 0.0, 0
    rows = range(len(store))
    block = WordBlock([[chunks[row] for row in rows]], rows, [words[row] for row in rows])
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    for words_N, logits_NL in word_logits(module, InputCollator.of(module.spec, tokenizer), [block], **sizes):
        total += float(F.cross_entropy(logits_NL, torch.from_numpy(expected_W[words_N]), reduction="sum"))
        count += len(words_N)
        predicted_W[words_N] = logits_NL.argmax(1).numpy()
    scores = entity_f1(names_of(store, predicted_W), names_of(store, expected_W))
    return TagMeasures(
        f1=scores.all.f1,
        precision=scores.all.precision,
        recall=scores.all.recall,
        tag_accuracy=scores.tag_accuracy,
        words=scores.num_words,
        types={kind: counts.record() for kind, counts in scores.by_type.items()},
        loss=total / count,
    )
