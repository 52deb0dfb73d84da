"""Word alignments between a text and its translation, from cross-attention weights.

Legend: B texts, T target tokens, S source tokens, W target words, V source words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.core import Sequence as Read
from clearhead.core import Transformer
from clearhead.core.attention import Attention
from clearhead.generate.batching import WATCHED_TOKENS, batches_by_cost, device_of, pad_ids, read_tokens
from clearhead.generate.decoder import Decoder, longest_sentence
from clearhead.generate.results import Hypothesis, StreamingDecoder
from clearhead.interpret.maps.head_statistics import text_scores
from clearhead.interpret.maps.recording import AttentionRecord, record_run
from clearhead.text.pair import TokenizerPair
from clearhead.text.spans import trim_spans, word_numbers
from clearhead.text.tokenizer import Tokenizer

SAMPLE = 64
"""Number of translations on which heads are measured."""
MOST_HEADS, LEAST_SHARE = 4, 0.8
"""Most heads that are averaged, and their least alignment score as a share of that of the best head."""

Head = tuple[int, int]
"""Numbers of a layer and of a head."""
Alignments = bool | Sequence[Head]
"""True to align words by the best heads, False for no alignment, or the heads to use."""


@dataclass(frozen=True)
class _TokenizedPair:
    """Tokens of a text and its translation, as encoder and decoder read them, and the word of each token (-1: none)."""

    source: list[int]
    target: list[int]
    source_words: list[int]
    target_words: list[int]

    @property
    def has_words(self) -> bool:
        """Return whether both sides have words."""
        return max(self.source_words, default=-1) >= 0 and max(self.target_words, default=-1) >= 0


class WordAligner:
    """Aligns the words of translations with those of their texts.

    Row t of a head's weights shows where the decoder attends while it writes target token t. The weights are averaged
    over some heads, summed over the tokens of each source word, and averaged over the rows of each target word. Two
    words are linked if each has its largest weight on the other.

    Args:
        decoder: encoder-decoder model with its decoding settings.
        heads: heads of the cross-attention. None means the heads that align best in the first translations.

    Raises:
        InputError: the cross-attention does not have one of the heads.

    Source: Och and Ney 2003, symmetrization by intersection; arXiv 1909.02074, section 3 (attention as alignment).
    """

    def __init__(self, decoder: Decoder, heads: Sequence[Head] | None = None) -> None:
        self.module: Transformer = decoder.module
        self.tokenizers: TokenizerPair = decoder.tokenizers
        self.heads = None if heads is None else tuple(heads)
        self._special_tokens = decoder.special_tokens
        self._limit = longest_sentence(decoder.module, decoder.max_length)
        if heads is not None:
            _check_heads(heads, decoder.module)

    def add_to(self, texts: Sequence[str], translations: Sequence[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Return translations with their alignments.

        Args:
            texts: source texts.
            translations: hypotheses of each text.
        """
        pairs = [
            [self._pair(text, hypothesis) for hypothesis in hypotheses]
            for text, hypotheses in zip(texts, translations, strict=True)
        ]
        if self.heads is None:
            self.heads = self._measure_heads(
                [text_pairs[0] for text_pairs in pairs if text_pairs and text_pairs[0].has_words][:SAMPLE]
            )
        links = iter(self._links(list(chain.from_iterable(pairs))))
        return [
            [replace(hypothesis, alignment=next(links)) for hypothesis in hypotheses] for hypotheses in translations
        ]

    def _pair(self, text: str, hypothesis: Hypothesis) -> _TokenizedPair:
        affixes, start = self._special_tokens.for_source, self._special_tokens.for_target.prefix[0]
        ids, words = self.tokenizers.source.words(text)
        ids = ids[: self._limit - len(affixes)]
        source_words = [-1] * len(affixes.prefix) + words[: len(ids)].tolist() + [-1] * len(affixes.suffix)
        written = hypothesis.ids
        return _TokenizedPair(
            affixes(ids), [start, *written[:-1]], source_words, written_words(self.tokenizers.target, written)
        )

    def _memory(self, pairs: Sequence[_TokenizedPair]) -> list[AttentionRecord]:
        """Return the recorded cross-attentions of a batch."""
        pad, device = self.tokenizers.source.pad_id, device_of(self.module)
        source, target = (
            Read(*pad_ids([getattr(pair, side) for pair in pairs], pad, device)) for side in ("source", "target")
        )
        records = record_run(self.module, source, target)
        return [record for record in records if record.stack == "decoder.memory"]

    def _measure_heads(self, pairs: Sequence[_TokenizedPair]) -> tuple[Head, ...] | None:
        """Return the heads with the largest statistic `alignment`, best first; None without texts."""
        sums: dict[Head, float] = {}
        for pair in pairs:
            for record in self._memory([pair]):
                for head, value in enumerate(text_scores(record)["alignment"][0].tolist()):
                    sums[record.layer, head] = sums.get((record.layer, head), 0.0) + value
        ranked = sorted(sums, key=lambda layer_head: -sums[layer_head])[:MOST_HEADS]
        return tuple(layer_head for layer_head in ranked if sums[layer_head] >= LEAST_SHARE * sums[ranked[0]]) or None

    def _links(self, pairs: Sequence[_TokenizedPair]) -> list[str]:
        texts = [""] * len(pairs)
        filled = [number for number, pair in enumerate(pairs) if pair.has_words]
        costs = [len(pairs[number].source) + len(pairs[number].target) for number in filled]
        for batch in batches_by_cost(costs, budget=min(read_tokens(self.module), WATCHED_TOKENS), most_rows=None):
            numbers = [filled[index] for index in batch]
            weights_BTS = self._weights([pairs[number] for number in numbers])
            for number, weights_TS in zip(numbers, weights_BTS, strict=True):
                texts[number] = _format_links(_mutual(weights_TS, pairs[number]))
        return texts

    def _weights(self, pairs: Sequence[_TokenizedPair]) -> Float[Tensor, "batch target source"]:
        """Return the attention weights averaged over the heads."""
        assert self.heads is not None
        records = {record.layer: record for record in self._memory(pairs)}
        return torch.stack([records[layer].weights([head])[:, 0] for layer, head in self.heads]).mean(0)


def written_words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the word number of each token id, from 0; -1 for a token without text.

    Words are separated by white space in the decoded text.

    Args:
        tokenizer: tokenizer of the ids.
        ids: token ids of one text, special tokens included.
    """
    decoder, spans, text = StreamingDecoder(tokenizer.decode), [], ""
    for index in ids:
        piece = decoder.add(index)
        spans.append((len(text), len(text) + len(piece)))
        text += piece
    words = word_numbers(text + decoder.finish(), trim_spans(text, spans), joint=None).tolist()
    return [-1 if tokenizer.decode([index]) == "" else word for index, word in zip(ids, words, strict=True)]


def _mutual(weights_TS: Float[Tensor, "target source"], pair: _TokenizedPair) -> list[tuple[int, int]]:
    """Return the pairs (source word, target word) that have their largest weights on each other."""
    target, source = (_membership(words, weights_TS) for words in (pair.target_words, pair.source_words))
    weights_WV = target.T @ weights_TS[: len(target), : len(source)] @ source / target.sum(0)[:, None].clamp(min=1)
    source_W, target_V = weights_WV.argmax(1).tolist(), weights_WV.argmax(0).tolist()
    return [(word, target_V[word]) for word in range(len(target_V)) if source_W[target_V[word]] == word]


def _membership(words: Sequence[int], like: Tensor) -> Float[Tensor, "tokens words"]:
    """Return a matrix with 1 where a token belongs to a word, otherwise 0."""
    number = torch.tensor(words, device=like.device)[:, None]
    return (number == torch.arange(max(words) + 1, device=like.device)).to(like)


def _format_links(links: Sequence[tuple[int, int]]) -> str:
    return " ".join(f"{source}-{target}" for source, target in links)


def _check_heads(heads: Sequence[Head], module: Transformer) -> None:
    if not heads:
        raise InputError("the list of heads for alignments is empty: give some, or True for the heads that align best")
    assert module.decoder is not None
    counts = {}
    for depth, index in enumerate(module.decoder.order):
        for child in module.decoder.layers[index].modules():
            if isinstance(child, Attention) and child.spec.source == "memory":
                counts[depth] = child.spec.num_heads
    for layer, head in heads:
        if layer not in counts:
            raise InputError(f"the cross-attention has no layer {layer}; it has 0 to {max(counts)}")
        if not 0 <= head < counts[layer]:
            raise InputError(
                f"layer {layer} of the cross-attention has no head {head}; it has 0 to {counts[layer] - 1}"
            )
