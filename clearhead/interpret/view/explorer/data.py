"""What the attention explorer shows: the whole input of its page, as arrays and texts.

A page holds one sample or several: one text in one model, two texts, two models, or a run's checkpoints in order. A
sample holds its tokens, its attentions, and what else was measured; a view without data is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

StackName = Literal["encoder.self", "decoder.self", "decoder.memory"]
RowName = Literal["encoder", "decoder", "written"]
"""The tokens that a stack reads, or those that the decoder writes: "written" has the rows of `decoder.memory`."""


@dataclass(frozen=True)
class TokenRow:
    """The tokens that one stack reads, or that the decoder writes.

    Args:
        tokens: entries of the vocabulary, as the tokenizer stores them.
        texts: the readable text of each token, its spaces and line breaks kept; no text repeats its neighbour's.
        words: the number of the word that each token belongs to, never falling; neighbours with the same number are
            joined on demand.
        is_generated: whether the model chose the token itself; None: no token is marked.
        is_special: whether the token stands for no text, such as the end of one; None: none does.
        writes: the text of the token that the model writes after each; empty: it writes none.
    """

    tokens: tuple[str, ...]
    texts: tuple[str, ...]
    words: Int[np.ndarray, " tokens"]
    is_generated: Bool[np.ndarray, " tokens"] | None = None
    is_special: Bool[np.ndarray, " tokens"] | None = None
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExactHead:
    """The numbers from which the weights of one head follow: softmax(cap(query key^T * scale) + bias), masked.

    Args:
        query: after norm and rotation.
        key: after norm and rotation, of the key/value head that this head uses.
        scale: of the scores.
        soft_cap: c of c * tanh(score / c), applied before the bias; None: none.
        bias: added to the scores; None: none.
        sink: the score without a key, whose weight is left out; None: none.
    """

    query: Float[np.ndarray, "queries head_size"]
    key: Float[np.ndarray, "keys head_size"]
    scale: float
    soft_cap: float | None = None
    bias: Float[np.ndarray, "queries keys"] | None = None
    sink: float | None = None


@dataclass(frozen=True)
class LayerAttention:
    """One attention of one layer, for the heads that are shown.

    Args:
        layer: its number in the stack, from 0; shared layers count at every depth.
        heads: the numbers of the heads that are shown, ascending.
        num_heads, num_kv_heads: of the whole attention; neighbouring heads share a key/value head.
        weights: gives the float32 weights [heads, queries, keys], from 0 to 1, of the shown heads, when the page is
            written: one layer is in memory at a time. Zero where the mask is False. None: a live page asks for pieces.
        mask: [queries, keys], True = may attend; None: every query sees every key. The keys that a query sees are
            neighbours.
        spans: in place of a large mask, the first and the last key of each query in turn; empty: the mask says it.
        mask_name: in words, such as "causal" or "window: 64 before, 64 after".
        has_sink: whether a part of each query's attention goes to no token.
        score_bias: its kind in words; empty: none.
        exact: by the number of the head: heads that are stored as float32 with the numbers behind their weights.
        values: by the name of a column: a number for each shown head, NaN where undefined.
        patterns: the named pattern of each shown head, empty where none; or no entry at all.
        key_effects: how the output changes when a head's look at one key is switched off; None: not measured.
        feed_forward: by the name of a column: the same number for the feed-forward of this layer.
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
    """The attentions of one stack of layers.

    Args:
        stack: whose attention, and over what.
        queries, keys: the rows of tokens that look and that are looked at.
        layers: ascending.
        measure: what a number means, in words; one stack may be shown by several measures, such as its attention
            weights, its weights times the norm of what they move, and rollout (one head in each layer).
    """

    stack: StackName
    queries: RowName
    keys: RowName
    layers: tuple[LayerAttention, ...]
    measure: str = "attention weight"


@dataclass(frozen=True)
class HeadColumn:
    """A number that every head has: a statistic, an effect or a contribution.

    Args:
        name: the key of `LayerAttention.values`.
        title: one or two words.
        description: what it means and in what unit, in one sentence.
        kind: for the order in menus; effects and contributions are signed.
    """

    name: str
    title: str
    description: str
    kind: Literal["statistic", "effect", "contribution"] = "statistic"


@dataclass(frozen=True)
class PageLens:
    """What a stack would predict if it ended after each layer.

    Args:
        row: the tokens at whose positions predictions are made; or there is one position, for the whole text.
        layers: the name of each depth, the first one below the others, such as "embedding", "0", "1".
        vocabulary: the readable texts that occur.
        entries: indices into the vocabulary, the most probable first.
        probabilities: of the entries.
        targets: for each position the token that follows or that is filled in, as an index into the vocabulary, -1
            where unknown; None: unknown everywhere.
        target_probabilities: of these; None: not computed.
        followed: how much larger the log-probability of one output is than that of another; None: none are compared.
        followed_name: the two, in words, the first one in front.
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
    """A token that beam search considered.

    Args:
        parent: the index of the node before it in the tree, smaller than its own; -1: the start.
        token: its readable text.
        log_probability: of the token after its parents.
        score: of the hypothesis that ends here, as the search compares it.
        step: from 0.
        state: kept for the next step, pruned, or finished.
        reason: why it was pruned or how it finished, in words; empty where it was kept.
        rank: its place among the results, from 0; None: not a result.
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
    """One text in one model.

    Args:
        label: what tells it from the page's other samples: a text, a model, a checkpoint.
        rows: the tokens of each stack that reads any, and those that the decoder of two stacks writes.
        attentions: at most one for each stack and measure.
        columns: of the heads' numbers.
        lens: None: not computed.
        beams: the search tree, parents before children; empty: no search.
        facts: pairs of name and value, such as ("step", "4,000").
        texts: pairs of what is done with a text and the text, such as ("writes", "A dog runs.").
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
    """Everything that a page shows.

    Args:
        title: the heading, such as the name of the model.
        samples: at least one; two are put side by side.
        is_timeline: whether the samples are one text at successive checkpoints, to be played.
        facts: pairs of name and value about the model, such as ("parameters", "124 million"); no date, so that the
            same input makes the same file.
    """

    title: str
    samples: tuple[Sample, ...]
    is_timeline: bool = False
    facts: tuple[tuple[str, str], ...] = ()
