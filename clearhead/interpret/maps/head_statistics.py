"""Statistics of attention heads, over texts and over repeated random tokens.

Notation: w_ij is the weight of query i (of T) on key j (of S). The tokens of query and key are y_i and x_j. Every
score is a mean over queries. All but entropy and distance are shares of the weight, from 0 to 1.

Induction and duplicate-token scores are measured on sequences of random tokens that occur twice.

Legend: B texts, H heads, T queries, S keys.

Source: arXiv 2209.11895, section "Induction heads", for the repeated tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead import core
from clearhead.base.printing import Printed
from clearhead.core import Transformer
from clearhead.generate.batching import device_of
from clearhead.interpret.maps.map_inputs import MapInputs
from clearhead.interpret.maps.recording import AttentionRecord, record_run
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import word_boundaries

Scores = dict[str, Float[Tensor, "texts heads"]]
"""Name of a statistic -> its value per text and head, float64 on the CPU; NaN if it has no query."""

PATTERN_THRESHOLD = 0.5
"""A head has a pattern if more than this share of its weight follows the pattern."""
_CHUNK = 2**21  # weights computed at once; fastest if they fit into the CPU caches


@dataclass(frozen=True, repr=False)
class HeadStatistics(Printed):
    """Statistics of one attention head; each number is a mean over texts, or None if it is not defined.

    Args:
        stack: encoder.self, decoder.self or decoder.memory.
        layer, head: numbers of the layer and of the head, from 0.
        entropy: entropy of the weights of a query, in nats: mean of -sum_j w_ij ln w_ij. Source: arXiv 1906.04341,
            section 3.3.
        distance: distance between query and key, in tokens: mean of sum_j w_ij |i - j|, in self-attention. Source:
            arXiv 1906.04284, "Attention Distance".
        first_token: weight w_i0 on the first token; in self-attention without the first query. Source: arXiv
            2309.17453, section 3.1.
        previous_token: weight w_i,i-1 on the previous token, in self-attention. Source: arXiv 1906.04341, section 3.1.
        duplicate_token: weight on the other occurrences of the query's token, sum_j w_ij with x_j = y_i. It is measured
            in the second half of random tokens that occur twice. Source: arXiv 2211.00593, section 3.
        induction: weight on the token after an earlier occurrence of the query's token, sum_j w_ij with x_j-1 = y_i;
            measured on the same random tokens. Source: arXiv 2209.11895, section "Induction heads".
        diagonal: weight on the key at the same relative position, floor((i + 1/2) S / T); in self-attention the token
            itself. Source: arXiv 1908.08593, section 4.1.
        alignment: sum of the weights that are the largest of both their query and their key, divided by the number of
            queries, in cross-attention. Source: Och and Ney 2003, symmetrization by intersection.
        patterns: names of the patterns that more than half of the weight follows. In self-attention: "first token",
            "previous token", "duplicate token", "induction", "current token". In cross-attention: "first token",
            "duplicate token", "copying", "diagonal", "alignment".
        spread: name of a statistic -> standard deviation over texts (duplicate_token and induction: over the sequences
            of random tokens). None means fewer than two values.
        num_texts: number of texts.
    """

    stack: str
    layer: int
    head: int
    entropy: float | None = None
    distance: float | None = None
    first_token: float | None = None
    previous_token: float | None = None
    duplicate_token: float | None = None
    induction: float | None = None
    diagonal: float | None = None
    alignment: float | None = None
    patterns: tuple[str, ...] = ()
    spread: Mapping[str, float | None] = field(default_factory=dict)
    num_texts: int = 1


STATISTICS = (
    "entropy", "distance", "first_token", "previous_token", "duplicate_token", "induction", "diagonal", "alignment",
)  # fmt: skip
_SELF_PATTERNS = {
    "first_token": "first token",
    "previous_token": "previous token",
    "duplicate_token": "duplicate token",
    "induction": "induction",
    "diagonal": "current token",
}
_MEMORY_PATTERNS = {
    "first_token": "first token",
    "duplicate_token": "duplicate token",
    "induction": "copying",
    "diagonal": "diagonal",
    "alignment": "alignment",
}


def text_scores(record: AttentionRecord) -> Scores:
    """Return the statistics of all heads of one attention over one text; computed in chunks of queries.

    Args:
        record: recorded attention over a single text.
    """
    (_, num_heads, num_queries, _), num_keys = record.query_BHTE.shape, record.key_BKSE.shape[2]
    is_self, device = record.attention.spec.source == "self", record.query_BHTE.device
    key_S = torch.arange(num_keys, device=device)
    sums = {name: torch.zeros(num_heads, dtype=torch.float64, device=device) for name in STATISTICS}
    links = _LargestWeights(num_heads, num_queries, num_keys, device)
    for queries, weights_BHTS in query_chunks(record):
        weights_HTS = weights_BHTS[0]
        query_T = torch.arange(num_queries, device=device)[queries]
        sums["entropy"] += torch.special.entr(weights_HTS).sum((1, 2), dtype=torch.float64)
        same_share_T = (2 * query_T + 1) * num_keys // (2 * num_queries)
        sums["diagonal"] += _sum_key_weights(weights_HTS, same_share_T)
        later_HTS, later_T = weights_HTS[:, query_T > 0], query_T[query_T > 0]
        if is_self:
            distance_TS = (query_T[:, None] - key_S).abs()
            sums["distance"] += (weights_HTS * distance_TS).sum((1, 2), dtype=torch.float64)
            sums["first_token"] += _sum_key_weights(later_HTS, torch.zeros_like(later_T))
            sums["previous_token"] += _sum_key_weights(later_HTS, later_T - 1)
        else:
            sums["first_token"] += _sum_key_weights(weights_HTS, torch.zeros_like(query_T))
            links.add(queries, weights_HTS)
    if not is_self:
        sums["alignment"] += links.mutual()
    num_later = num_queries - 1 if is_self else num_queries
    counts = dict.fromkeys(("entropy", "diagonal"), num_queries) | {"first_token": num_later}
    counts |= {"distance": num_queries, "previous_token": num_later} if is_self else {"alignment": num_queries}
    return {name: (sums[name] / (count or math.nan))[None].cpu() for name, count in counts.items()}


def repeat_scores(
    record: AttentionRecord,
    query_ids_BT: Int[Tensor, "texts queries"],
    key_ids_BS: Int[Tensor, "texts keys"],
    is_second_T: Bool[Tensor, " queries"],
) -> Scores:
    """Return the duplicate-token and induction scores on tokens that occur twice.

    Args:
        record: recorded attention over texts that repeat their tokens.
        query_ids_BT: token ids of the queries.
        key_ids_BS: token ids of the keys.
        is_second_T: mask of the queries, True at the second occurrence of a token.
    """
    same_BTS = query_ids_BT[:, :, None] == key_ids_BS[:, None, :]
    if record.attention.spec.source == "self":
        same_BTS = same_BTS & ~torch.eye(same_BTS.shape[1], dtype=torch.bool, device=same_BTS.device)
    after_BTS = torch.zeros_like(same_BTS)
    after_BTS[:, :, 1:] = same_BTS[:, :, :-1]
    seen_BHTS = record.weights()[:, :, is_second_T].double()
    masks = {"duplicate_token": same_BTS, "induction": after_BTS}
    return {
        name: (seen_BHTS * where_BTS[:, None, is_second_T]).sum(-1).mean(-1).cpu() for name, where_BTS in masks.items()
    }


def summarise(stack: str, layer: int, scores: Scores, num_texts: int) -> list[HeadStatistics]:
    """Return the statistics of each head of an attention: mean and standard deviation over texts.

    Args:
        stack, layer: stack and layer of the attention.
        scores: statistics, each over the texts that it was measured on.
        num_texts: number of texts.
    """
    rows = []
    for head in range(scores["entropy"].shape[1]):
        values = {name: score_TH[:, head][~score_TH[:, head].isnan()].tolist() for name, score_TH in scores.items()}
        means = {name: statistics.fmean(numbers) if numbers else None for name, numbers in values.items()}
        spread = {name: statistics.stdev(numbers) if len(numbers) > 1 else None for name, numbers in values.items()}
        names = tuple(find_patterns(stack, means))
        rows.append(HeadStatistics(stack, layer, head, **means, patterns=names, spread=spread, num_texts=num_texts))
    return rows


def find_patterns(stack: str, scores: Mapping[str, float | None]) -> Iterator[str]:
    """Yield the names of the patterns that a head follows with more than half of its weight."""
    for name, pattern in (_MEMORY_PATTERNS if stack.endswith("memory") else _SELF_PATTERNS).items():
        if (scores.get(name) or 0.0) > PATTERN_THRESHOLD:
            yield pattern


def query_chunks(
    record: AttentionRecord,
) -> Iterator[tuple[slice, Float[Tensor, "texts heads queries keys"]]]:
    """Yield the attention weights of all heads for one slice of the queries after another, to bound memory."""
    rows, heads, num_queries, _ = record.query_BHTE.shape
    step = max(1, _CHUNK // (rows * heads * record.key_BKSE.shape[2]))
    for start in range(0, num_queries, step):
        queries = slice(start, min(start + step, num_queries))
        yield queries, record.weights(queries=queries)


def _sum_key_weights(weights_HTS: Tensor, key_T: Int[Tensor, " queries"]) -> Float[Tensor, " heads"]:
    """Return, for each head, the sum over the queries of the weight on the key that `key_T` gives for each query."""
    return weights_HTS.gather(2, key_T[None, :, None].expand(len(weights_HTS), -1, 1)).sum((1, 2), dtype=torch.float64)


class _LargestWeights:
    """Running maximum of the attention weights of every query and of every key, updated by chunks of queries."""

    def __init__(self, num_heads: int, num_queries: int, num_keys: int, device: torch.device) -> None:
        self.weight_HT = torch.zeros(num_heads, num_queries, device=device)
        self.key_HT = torch.zeros(num_heads, num_queries, dtype=torch.long, device=device)
        self.weight_HS = torch.full((num_heads, num_keys), -1.0, device=device)
        self.query_HS = torch.zeros(num_heads, num_keys, dtype=torch.long, device=device)

    def add(self, queries: slice, weights_HTS: Float[Tensor, "heads queries keys"]) -> None:
        """Update the largest weights with the attention weights of the next queries."""
        self.weight_HT[:, queries], self.key_HT[:, queries] = weights_HTS.max(2)
        weight_HS, query_HS = weights_HTS.max(1)
        is_larger = weight_HS > self.weight_HS
        self.weight_HS = torch.where(is_larger, weight_HS, self.weight_HS)
        self.query_HS = torch.where(is_larger, query_HS + queries.start, self.query_HS)

    def mutual(self) -> Float[Tensor, " heads"]:
        """Return, per head, the sum of the weights that are the largest of both their query and their key."""
        places_T = torch.arange(self.weight_HT.shape[1], device=self.weight_HT.device)
        is_mutual_HT = self.query_HS.gather(1, self.key_HT) == places_T
        return (self.weight_HT * is_mutual_HT).sum(1, dtype=torch.float64)


LENGTH = 25  # number of tokens before they repeat
SEQUENCES = 4


def heads_over_texts(
    module: Transformer,
    tokenizers: TokenizerPair,
    runs: Iterable[tuple[MapInputs, Sequence[AttentionRecord]]],
    *,
    seed: int,
) -> list[HeadStatistics]:
    """Return the statistics of each head over several texts.

    Args:
        module: model of the runs.
        tokenizers: tokenizers of the model.
        runs: pairs of inputs and recorded attentions, at least one; only one is held in memory at a time.
        seed: seed of the repeated random tokens.
    """
    scores_by_attention: dict[tuple[str, int], list[Scores]] = {}
    num_texts = 0
    for inputs, records in runs:
        num_texts, read = num_texts + 1, inputs
        for record in records:
            scores_by_attention.setdefault((record.stack, record.layer), []).append(text_scores(record))
    repeats = repeat_statistics(module, tokenizers, read, seed)
    rows = []
    for (stack, layer), texts in scores_by_attention.items():
        scores = {name: torch.cat([text[name] for text in texts]) for name in texts[0]}
        rows += summarise(stack, layer, scores | repeats.get((stack, layer), {}), num_texts)
    return rows


def repeat_statistics(
    module: Transformer, tokenizers: TokenizerPair, inputs: MapInputs, seed: int = 0
) -> dict[tuple[str, int], Scores]:
    """Return the duplicate-token and induction scores of every attention, by stack and layer.

    Every stack reads random tokens twice, with the special tokens of a text around them. If both stacks share one
    vocabulary, the decoder reads the same tokens as the encoder, and cross-attention is scored too.

    Args:
        module: model to run, in evaluation mode; its training mode is restored afterwards.
        tokenizers: tokenizers of the model.
        inputs: inputs of any text, for their special tokens.
        seed: seed of the random tokens.

    Returns:
        Scores by stack and layer. An attention is missing if the model has too few positions or entries for two
        tokens; cross-attention is missing if the two vocabularies differ.
    """
    reader = tokenizers.target if module.encoder is None else tokenizers.source
    vocabularies = [_ordinary_ids(tokenizer) for tokenizer in (reader, tokenizers.target)[: len(inputs.affixes)]]
    length = min(LENGTH, *map(len, vocabularies))
    if module.max_positions is not None:
        length = min(length, *((module.max_positions - len(affixes)) // 2 for affixes in inputs.affixes))
    if length < 2:
        return {}
    draw, device = torch.Generator().manual_seed(seed), device_of(module)
    read: list[Tensor] = []
    is_second: list[Tensor] = []
    for ordinary, affixes in zip(vocabularies, inputs.affixes, strict=True):
        if not read or not tokenizers.joint:
            drawn = _draw_repeats(ordinary, length, draw)
        read.append(_add_affixes(drawn, affixes).to(device))
        position = torch.arange(read[-1].shape[1], device=device) - len(affixes.prefix)
        is_second.append((length <= position) & (position < 2 * length))
    target = core.Sequence(read[1]) if len(read) == 2 else None
    last = len(read) - 1
    sides = {"encoder.self": (0, 0), "decoder.self": (last, last), "decoder.memory": (last, 0)}
    scores = {}
    for record in record_run(module, core.Sequence(read[0]), target):
        query, key = sides[record.stack]
        if query == key or tokenizers.joint:
            scores[record.stack, record.layer] = repeat_scores(record, read[query], read[key], is_second[query])
    return scores


def _ordinary_ids(tokenizer: Tokenizer) -> Int[Tensor, " entries"]:
    """Return the token ids that can occur in an encoded text."""
    return torch.from_numpy(word_boundaries(tokenizer).ordinary).nonzero()[:, 0]


def _draw_repeats(ordinary: Int[Tensor, " entries"], length: int, draw: torch.Generator) -> Int[Tensor, "texts tokens"]:
    """Return sequences of `length` distinct random tokens, each followed by a copy of itself."""
    once_BN = torch.stack([ordinary[torch.randperm(len(ordinary), generator=draw)[:length]] for _ in range(SEQUENCES)])
    return once_BN.repeat(1, 2)


def _add_affixes(ids_BN: Int[Tensor, "texts tokens"], affixes: PrefixSuffix) -> Int[Tensor, "texts framed_tokens"]:
    """Add the special tokens that surround a text before and after each sequence of random tokens."""
    prefix, suffix = (ids_BN.new_tensor(side).expand(len(ids_BN), -1) for side in (affixes.prefix, affixes.suffix))
    return torch.cat([prefix, ids_BN, suffix], dim=1)
