"""Data classes for the content of an attention explorer page: arrays and texts.

A page has one or more samples: one text in one model, two texts, two models, or the checkpoints of a run in order. A
sample has tokens, attentions and optional measurements; the page hides a view that has no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

StackName = Literal["encoder.self", "decoder.self", "decoder.memory"]
RowName = Literal["encoder", "decoder", "written"]
"""Name of a token row: the tokens that a stack reads, or "written": those that the decoder writes at each step."""


@dataclass(frozen=True)
class TokenRow:
    """Row of tokens on a page: those that one stack reads, or that the decoder writes.

    Args:
        tokens: vocabulary entries, as the tokenizer stores them.
        texts: display text of each token, with its spaces and line breaks; neighbours never repeat a text.
        words: word number of each token, in ascending order; "join subwords" merges tokens of one word.
        is_generated: True for a token that the model generated. None means that no token is marked.
        is_special: True for a special token, such as the end token. None means that there are none.
        writes: text of the token that the model writes at each step; empty if it writes none.
    """

    tokens: tuple[str, ...]
    texts: tuple[str, ...]
    words: Int[np.ndarray, " tokens"]
    is_generated: Bool[np.ndarray, " tokens"] | None = None
    is_special: Bool[np.ndarray, " tokens"] | None = None
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExactHead:
    """Float32 inputs of one head's weights, which are softmax(cap(query key^T * scale) + bias) after the mask.

    Args:
        query: queries after norm and rotation.
        key: keys after norm and rotation, of the key/value head that this head uses.
        scale: factor of the scores.
        soft_cap: c of c * tanh(score / c), applied before the bias. None means no soft cap.
        bias: bias that is added to the scores. None means no bias.
        sink: score of the attention sink, whose weight goes to no key. None means no sink.
    """

    query: Float[np.ndarray, "queries head_size"]
    key: Float[np.ndarray, "keys head_size"]
    scale: float
    soft_cap: float | None = None
    bias: Float[np.ndarray, "queries keys"] | None = None
    sink: float | None = None


@dataclass(frozen=True)
class LayerAttention:
    """One attention of one layer, for the heads that the page shows.

    Args:
        layer: number of the layer in the stack, from 0; shared layers count at every depth.
        heads: numbers of the shown heads, ascending.
        num_heads, num_kv_heads: head counts of the whole attention; neighbouring heads share a key/value head.
        weights: function that returns the float32 weights [heads, queries, keys] of the shown heads, from 0 to 1 and
            zero where the mask is False. It is called while the page is written, so one layer is in memory at a time.
            None means that a live page requests them in tiles.
        mask: mask [queries, keys], True = may attend; the visible keys of a query are contiguous. None means that every
            query sees every key.
        mask_name: mask in words, such as "causal" or "window: 64 before, 64 after".
        has_sink: True if a share of each query's attention goes to no token.
        spans: first and last visible key of each query in turn, in place of a large mask. Empty means: see `mask`.
        score_bias: kind of the score bias in words; empty without a bias.
        exact: number of a head -> its float32 queries, keys and weights.
        values: name of a column -> number for each shown head; NaN if undefined.
        patterns: names of the patterns of each shown head, as one text. An empty tuple means not measured.
        key_effects: change of the output if a head does not attend to one key. None means not measured.
        feed_forward: name of a column -> number of the feed-forward network of this layer.
    """

    layer: int
    heads: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    weights: Callable[[], Float[np.ndarray, "heads queries keys"]] | None
    mask: Bool[np.ndarray, "queries keys"] | None
    mask_name: str
    has_sink: bool = False
    spans: tuple[int, ...] = ()
    score_bias: str = ""
    exact: Mapping[int, ExactHead] = field(default_factory=dict)
    values: Mapping[str, Float[np.ndarray, " heads"]] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    key_effects: Float[np.ndarray, "heads keys"] | None = None
    feed_forward: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StackAttention:
    """Attention of all shown layers of one stack.

    Args:
        stack: name of the stack with its source, such as "decoder.memory".
        queries, keys: names of the token rows of the queries and of the keys.
        layers: attentions in ascending order of layers.
        measure: meaning of the numbers, in words. One stack can have several measures: attention weight, norm-weighted
            attention, and rollout (one head per layer).
    """

    stack: StackName
    queries: RowName
    keys: RowName
    layers: tuple[LayerAttention, ...]
    measure: str = "attention weight"


@dataclass(frozen=True)
class HeadColumn:
    """Column of numbers, one per head: a statistic, an effect or a contribution.

    Args:
        name: key in `LayerAttention.values`.
        title: title of one or two words.
        description: meaning and unit, in one sentence.
        kind: "statistic", "effect" or "contribution". Effects and contributions can be negative.
    """

    name: str
    title: str
    description: str
    kind: Literal["statistic", "effect", "contribution"] = "statistic"


@dataclass(frozen=True)
class PageLens:
    """Logit lens: the predictions of a stack if it ended after each layer.

    Args:
        row: name of the token row of the positions.
        layers: name of each depth, from the lowest, such as "embedding", "0", "1".
        vocabulary: display texts of the outputs that occur.
        entries: indices into `vocabulary` of the most probable outputs, the most probable first.
        probabilities: probabilities of the entries.
        targets: index into `vocabulary` of the next or the masked token at each position, -1 if unknown. None means
            unknown everywhere.
        target_probabilities: probabilities of the targets. None means not computed.
        followed: difference of the log-probabilities of two outputs. None means that no outputs are compared.
        followed_name: the two outputs in words.
    """

    row: RowName
    layers: tuple[str, ...]
    vocabulary: tuple[str, ...]
    entries: Int[np.ndarray, "depths positions top"]
    probabilities: Float[np.ndarray, "depths positions top"]
    targets: Int[np.ndarray, " positions"] | None = None
    target_probabilities: Float[np.ndarray, "depths positions"] | None = None
    followed: Float[np.ndarray, "depths positions"] | None = None
    followed_name: str = ""


@dataclass(frozen=True)
class BeamNode:
    """Candidate token of a beam search, as a node of the search tree.

    Args:
        parent: index of the parent node, smaller than that of this node; -1 for the root.
        token: display text of the token.
        log_probability: log-probability of the token after its parents.
        score: score of the hypothesis that ends with this token, as the search compares it.
        step: step of the search, from 0 (the root).
        state: "kept" for the next step, "pruned", or "finished".
        reason: reason for pruning or finishing, in words; empty if it was kept.
        rank: rank among the results, from 0. None means that it is no result.
    """

    parent: int
    token: str
    log_probability: float
    score: float
    step: int
    state: Literal["kept", "pruned", "finished"]
    reason: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class Sample:
    """Content of an explorer page for one text in one model: tokens, attention, logit lens and beam search.

    Args:
        label: label that distinguishes it from other samples of the page: a text, a model, a checkpoint.
        rows: tokens of each stack, and those that the decoder of a two-stack model writes.
        attentions: attentions, at most one for each stack and measure.
        columns: columns of the numbers of the heads.
        lens: logit lens. None means not computed.
        beams: tree of the beam search, parents before children; empty without a search.
        facts: pairs of name and value, such as ("step", "4,000").
        texts: pairs of an action and a text, such as ("writes", "A dog runs.").
    """

    label: str
    rows: Mapping[RowName, TokenRow]
    attentions: tuple[StackAttention, ...]
    columns: tuple[HeadColumn, ...] = ()
    lens: PageLens | None = None
    beams: tuple[BeamNode, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Page:
    """Content of an attention explorer page.

    Args:
        title: heading, such as the name of the model.
        samples: samples, at least one; two are shown side by side.
        is_timeline: True if the samples are one text at successive checkpoints, which the page can play.
        facts: pairs of name and value about the model, such as ("parameters", "124 million"). There is no date, so
            that equal content gives an identical file.
    """

    title: str
    samples: tuple[Sample, ...]
    is_timeline: bool = False
    facts: tuple[tuple[str, str], ...] = ()
