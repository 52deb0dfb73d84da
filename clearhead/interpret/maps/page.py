"""Build a page of the attention explorer from runs of a model: statistics, effects, logit lens and float32 heads."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.base.printing import num_parameters
from clearhead.base.progress import Notify, counter
from clearhead.generate.results import StreamingDecoder
from clearhead.interpret.maps.attention_run import AttentionRun
from clearhead.interpret.maps.outcome import OutcomeChoice
from clearhead.interpret.maps.recording import STACKS, AttentionRecord
from clearhead.interpret.maps.token_texts import token_texts
from clearhead.interpret.view.explorer.data import (
    ExactHead,
    HeadColumn,
    LayerAttention,
    Page,
    PageLens,
    RowName,
    Sample,
    StackAttention,
    StackName,
    TokenRow,
)
from clearhead.interpret.view.explorer.encode import refuse_too_many
from clearhead.text.tokenizer import Tokenizer

Weights = Float32[np.ndarray, "heads queries keys"]

MOST_EXACT = 2**20
"""Most numbers (queries, keys and weights) for which a page holds all heads in float32 by default."""
MOST_TEXT = 2000
"""Most characters of a text in the heading."""
MOST_MEASURED = 2**22
"""Most weights for which a page also has norm-weighted attention and rollout."""

STATISTIC_COLUMNS = (
    HeadColumn("entropy", "entropy", "Entropy of the weights, in nats: 0 for one token, ln n for n equal weights."),
    HeadColumn("distance", "distance", "The mean distance between query and key, in tokens."),
    HeadColumn("first_token", "first token", "The share of the weight on the first token."),
    HeadColumn("previous_token", "previous token", "The share of the weight on the previous token."),
    HeadColumn("duplicate_token", "duplicate", "The share of the weight on earlier copies of a repeated random token."),
    HeadColumn(
        "induction", "induction", "The share of the weight on the token after the earlier copy of a random token."
    ),
    HeadColumn(
        "diagonal", "diagonal", "The share of the weight on the same relative position (self-attention: itself)."
    ),
    HeadColumn("alignment", "alignment", "The share of the weight on links that are the largest in both directions."),
)
EFFECT: Final = "effect"
CONTRIBUTION: Final = "contribution"


@dataclass(frozen=True)
class SampleOptions:
    """Options for the content of an attention explorer page.

    Args:
        layers, heads: layers and heads to show, with float32 queries, keys and weights. None means all.
        effects: True to measure the effect of every head on the outcome, with one run per head. If `layers` or `heads`
            are given, the effect of each key of these heads is measured too.
        of: outcome to measure; see `AttentionRun.outcome`. None means its default.
        top_k: number of predictions at each position and depth of the logit lens.
    """

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    effects: bool = False
    of: OutcomeChoice = None
    top_k: int = 5

    @property
    def are_chosen(self) -> bool:
        """Return whether layers or heads were chosen."""
        return self.layers is not None or self.heads is not None


def run_sample(run: AttentionRun, label: str, options: SampleOptions, notify: Notify | None = None) -> Sample:
    """Return the page content for one run of a model on one text (a sample of the explorer page).

    Args:
        run: run of the model.
        label: label that distinguishes the sample from others.
        options: options for the content of the page.
        notify: function called with the numbers of measured and of all heads. None means the current progress display.

    Raises:
        InputError: a layer, head or outcome does not exist.
    """
    return _SampleBuilder(run, options, notify).build(label)


def explorer_page(
    title: str,
    runs: Sequence[tuple[str, AttentionRun]],
    options: SampleOptions | None = None,
    *,
    is_timeline: bool = False,
    notify: Notify | None = None,
) -> Page:
    """Return an explorer page that shows one run of a model, or several runs side by side.

    Args:
        title: heading of the page.
        runs: pairs of a label, such as "step 100", and a run.
        options: options for the content of the page. None means all content that needs no further run of the model.
        is_timeline: True if the runs are of one text at successive checkpoints.
        notify: function called with the numbers of measured and of all heads. None means the current progress display.

    Raises:
        InputError: same as `run_sample`.
    """
    samples = tuple(run_sample(run, label, options or SampleOptions(), notify) for label, run in runs)
    facts = [("task", runs[0][1].task.kind), ("parameters", f"{num_parameters(runs[0][1].module):,}")]
    if is_timeline:
        facts.append(("steps kept", " · ".join(label.removeprefix("step ") for label, _ in runs)))
    return Page(title, samples, is_timeline, tuple(facts))


def token_row(tokenizer: Tokenizer, ids: Sequence[int], num_given: int | None) -> TokenRow:
    """Return the tokens of a stack with their display texts and word numbers.

    Args:
        tokenizer: tokenizer of the tokens.
        ids: token ids that the stack reads.
        num_given: number of tokens that were not generated. None means that no token was generated.
    """
    decoder = StreamingDecoder(tokenizer.decode)
    pieces = [decoder.add(index) for index in ids]
    specials = [tokenizer.decode([index]) == "" for index in ids]
    words, word = [], 0
    for position, piece in enumerate(pieces):
        if position and (specials[position] or specials[position - 1] or _starts_word(pieces[position - 1], piece)):
            word += 1
        words.append(word)
    return TokenRow(
        tuple(tokenizer.tokens(ids)),
        tuple(token_texts(tokenizer, ids)),
        np.array(words, dtype=np.int64),
        None if num_given is None or num_given >= len(ids) else np.arange(len(ids)) >= num_given,
        np.array(specials) if any(specials) else None,
    )


def _starts_word(before: str, piece: str) -> bool:
    if not before or not piece:
        return False
    first, last = piece[0], before[-1]
    if first.isspace() or last.isspace():
        return not before.isspace()  # a space token belongs to the next word
    return unicodedata.east_asian_width(first) in "WF" or first.isalnum() != last.isalnum()


def token_rows(run: AttentionRun) -> dict[RowName, TokenRow]:
    """Return the tokens that each stack of a run reads, and the tokens that a decoder with a memory writes."""
    inputs, tokenizers = run.inputs, run.tokenizers
    sequences = {"encoder" if run.module.decoder is None else "decoder": inputs.source}
    if inputs.target is not None:
        sequences = {"encoder": inputs.source, "decoder": inputs.target}
    rows: dict[RowName, TokenRow] = {}
    for name, sequence in sequences.items():
        ids = sequence.ids[0].tolist()
        if name == "decoder":
            rows["decoder"] = token_row(tokenizers.target, ids, inputs.num_given)
        else:
            rows["encoder"] = token_row(tokenizers.source, ids, None)
    if run.written_ids is not None:
        # Step i writes token i + 1, so one token less was given.
        num_given = None if inputs.num_given is None else inputs.num_given - 1
        written = token_row(tokenizers.target, run.written_ids, num_given)
        rows["decoder"] = replace(rows["decoder"], writes=written.texts)
        if inputs.target is not None:
            rows["written"] = written
    return rows


class _SampleBuilder:
    """Builder of one sample (one text in one model) of an explorer page; it computes every number once."""

    def __init__(self, run: AttentionRun, options: SampleOptions, notify: Notify | None) -> None:
        self.run, self.options, self.rows = run, options, token_rows(run)
        self.chosen = run.choose(options.layers, options.heads)
        # Refuse before measuring; a causal mask hides at most half of the weights, so half of them is a lower bound.
        refuse_too_many(sum(len(heads) * _num_weights(record) for record, heads in self.chosen) // 2)
        self.values: dict[tuple[str, int, int], dict[str, float]] = {}
        self.patterns: dict[tuple[str, int, int], str] = {}
        self.feed_forward: dict[int, dict[str, float]] = {}
        self.key_effects: dict[tuple[str, int, int], Float32[np.ndarray, " keys"]] = {}
        self.columns = list(STATISTIC_COLUMNS)
        self.facts: list[tuple[str, str]] = []
        for row in run.heads():
            head_key = (row.stack, row.layer, row.head)
            statistics = {column.name: getattr(row, column.name) for column in STATISTIC_COLUMNS}
            self.values[head_key] = {name: math.nan if value is None else value for name, value in statistics.items()}
            self.patterns[head_key] = ", ".join(row.patterns)
        self._add_outcome(notify)

    def build(self, label: str) -> Sample:
        """Return the sample with all its numbers and texts."""
        stacks = [name for name in STACKS if any(record.stack == name for record, _ in self.chosen)]
        maps = [self._stack]
        if sum(len(heads) * _num_weights(record) for record, heads in self.chosen) <= MOST_MEASURED:
            maps += [self._norm_weighted, self._rollout]
        attentions = tuple(make(stack) for make in maps for stack in stacks)
        columns, facts = tuple(self.columns), tuple(self.facts)
        return Sample(label, self.rows, attentions, columns, self._lens(), self.run.beams(), facts, self._texts())

    def _texts(self) -> tuple[tuple[str, str], ...]:
        """Return the text that the model reads and the text that it writes or predicts."""
        inputs, tokenizers = self.run.inputs, self.run.tokenizers
        ids, num_given = inputs.source.ids[0].tolist(), inputs.num_given
        if self.top == "encoder":
            read, written = tokenizers.source.decode(ids), self._describe_prediction()
        elif inputs.target is not None:
            read, written = tokenizers.source.decode(ids), tokenizers.target.decode(list(inputs.labels))
        else:
            read, written = (
                tokenizers.target.decode(ids_part)
                for ids_part in (ids[:num_given], [ids[0], *inputs.labels][num_given:])
            )
        texts = (("reads", read.strip()), ("writes", written.strip()))
        return tuple((name, text[:MOST_TEXT]) for name, text in texts if text)

    def _describe_prediction(self) -> str:
        """Return the prediction of a model without a decoder; empty if it predicts no token and no label."""
        try:
            return self.run.output_names.difference(self.run.outcome(None), "")
        except InputError:
            return ""

    def _add_outcome(self, notify: Notify | None) -> None:
        """Add contributions of heads and feed-forward networks, and requested effects, if the model has an outcome."""
        run, of = self.run, self.options.of
        try:
            outcome = run.outcome(of)
        except InputError:
            if of is not None or self.options.effects:
                raise
            return
        where = "" if outcome.position is None else f" at position {outcome.position}"
        self.facts.append(("followed output", f"{run.output_names.difference(outcome, ' rather than ')}{where}"))
        written = run.output_names.difference(outcome, " less that of ")
        self.columns.append(
            HeadColumn(CONTRIBUTION, "contribution", f"The head's term in the logit of {written}.", CONTRIBUTION)
        )
        for term in run.contributions(of):
            if term.head is not None and term.layer is not None:
                self.values[term.component, term.layer, term.head][CONTRIBUTION] = term.value
            elif term.component == "feed-forward" and term.layer is not None:
                self.feed_forward[term.layer] = {CONTRIBUTION: term.value}
        if self.options.effects:
            description = f"The change of the log-probability of {written} when the head is switched off."
            self.columns.append(HeadColumn(EFFECT, "effect", description, EFFECT))
            self._measure_effects(counter("heads", notify))

    def _measure_effects(self, notify: Notify) -> None:
        run, of = self.run, self.options.of
        places = [(record.stack, record.layer, head) for record, heads in self.chosen for head in heads]
        chosen = places if self.options.are_chosen else []
        for row in run.effects(of, notify=lambda done, total: notify(done, total + len(chosen))):
            self.values[row.stack, row.layer, row.head][EFFECT] = row.change
        for number, head_key in enumerate(chosen, start=1):
            self.key_effects[head_key] = run.key_effects(*head_key, of).numpy()
            notify(len(self.values) + number, len(self.values) + len(chosen))

    def _stack(self, stack: StackName) -> StackAttention:
        count = sum(
            len(heads) * (_num_weights(record) + record.query_BHTE.shape[3] * sum(_size(record)))
            for record, heads in self.chosen
        )
        is_exact = self.options.are_chosen or count <= MOST_EXACT
        return stack_attention(
            stack,
            [
                self._layer(record, heads, partial(_weights, record, heads), heads if is_exact else ())
                for record, heads in self.chosen
                if record.stack == stack
            ],
            self.rows,
        )

    def _norm_weighted(self, stack: StackName) -> StackAttention:
        return stack_attention(
            stack,
            [
                self._layer(record, heads, partial(self._norm_weighted_shares, record, heads))
                for record, heads in self.chosen
                if record.stack == stack
            ],
            self.rows,
            "weight times length of the projected value, as a share of the largest in the layer",
        )

    def _norm_weighted_shares(self, record: AttentionRecord, heads: Sequence[int]) -> Weights:
        lengths = np.stack([self.run.norm_weighted(record.stack, record.layer, head).numpy() for head in heads])
        shares: Weights = lengths / max(lengths.max(), np.finfo(np.float32).tiny)
        return shares

    def _rollout(self, stack: StackName) -> StackAttention:
        shares = dict(zip(self.run.layers(stack), self.run.rollout(stack).numpy(), strict=True))
        mask = _reach([self.run.record(stack, layer) for layer in shares])
        return stack_attention(
            stack,
            [
                LayerAttention(
                    layer=record.layer,
                    heads=(0,),
                    num_heads=1,
                    num_kv_heads=1,
                    weights=partial(np.expand_dims, shares[record.layer], 0),
                    mask=mask,
                    mask_name="none" if mask is None else "causal",
                )
                for record, _ in self.chosen
                if record.stack == stack
            ],
            self.rows,
            "rollout: the share of each token in the stream after the layer",
        )

    def _layer(
        self, record: AttentionRecord, heads: Sequence[int], weights: Callable[[], Weights], exact: Sequence[int] = ()
    ) -> LayerAttention:
        places = [(record.stack, record.layer, head) for head in heads]
        key_effects = None
        if self.key_effects:
            key_effects = np.stack([self.key_effects[head_key] for head_key in places])
        feed_forward: dict[str, float] = {}
        if record.stack == f"{self.top}.self":
            feed_forward = self.feed_forward.get(record.layer, {})
        return LayerAttention(
            layer=record.layer,
            heads=tuple(heads),
            num_heads=record.num_heads,
            num_kv_heads=record.key_BKSE.shape[1],
            weights=weights,
            mask=_mask(record),
            mask_name=mask_name(record),
            has_sink=record.attention.sink is not None,
            score_bias=bias_name(record),
            exact={head: _exact_head(record, head) for head in exact},
            values={column.name: self._column_values(column.name, places) for column in self.columns},
            patterns=tuple(self.patterns[head_key] for head_key in places),
            key_effects=key_effects,
            feed_forward=feed_forward,
        )

    def _column_values(self, name: str, places: Sequence[tuple[str, int, int]]) -> Float[np.ndarray, " heads"]:
        return np.array([self.values[head_key].get(name, math.nan) for head_key in places])

    @property
    def top(self) -> RowName:
        """Name of the last stack, below the head."""
        return "encoder" if self.run.module.decoder is None else "decoder"

    def _compared_outputs(self) -> tuple[str, OutcomeChoice]:
        """Return the two outputs that the lens compares at every depth, as text and as choice; ("", None) if none.

        A single output is not shown in the lens, only in the numbers of the heads.
        """
        of = self.options.of
        if isinstance(of, tuple) and (outcome := self.run.outcome(of)).other is not None:
            return self.run.output_names.difference(outcome, " rather than "), of
        return "", None

    def _lens(self) -> PageLens | None:
        try:
            top_k = min(self.options.top_k, len(self.run.output_names.names))
        except InputError:
            return None
        compared, of = self._compared_outputs()
        lens = self.run.lens(top_k, of)
        followed = lens.followed if lens.followed is None else lens.followed.numpy()
        tokenizer = self.run.tokenizers.source if self.top == "encoder" else self.run.tokenizers.target
        places = {index: position for position, index in enumerate(lens.names)}
        is_label = bool(self.run.task.labels)
        vocabulary = tuple(
            name if is_label or not name else token_texts(tokenizer, [index])[0] for index, name in lens.names.items()
        )
        find = np.vectorize(places.__getitem__, otypes=[np.int64])
        depths = len(lens.ids)
        return PageLens(
            self.top,
            ("embedding", *map(str, range(depths - 1))),
            vocabulary,
            find(lens.ids.numpy()),
            lens.probabilities.numpy(),
            find(lens.target_ids.numpy()),
            lens.target_probabilities.numpy(),
            followed,
            compared,
        )


def stack_attention(
    stack: StackName, layers: Sequence[LayerAttention], rows: Collection[RowName], measure: str = "attention weight"
) -> StackAttention:
    """Return the page's attention of a stack for some layers, with the names of its query and key token rows.

    Args:
        stack: name of the stack.
        layers: layers in ascending order.
        rows: names of the token rows of the sample.
        measure: meaning of a number, in words.
    """
    queries: RowName = "encoder" if stack == "encoder.self" else "decoder"
    keys: RowName = "decoder" if stack == "decoder.self" else "encoder"
    if stack == "decoder.memory" and "written" in rows:
        queries = "written"
    return StackAttention(stack, queries, keys, tuple(layers), measure)


def _weights(record: AttentionRecord, heads: Sequence[int]) -> Weights:
    return record.weights(heads)[0].cpu().numpy()


def _size(record: AttentionRecord) -> tuple[int, int]:
    return record.query_BHTE.shape[2], record.key_BKSE.shape[2]


def _num_weights(record: AttentionRecord) -> int:
    return math.prod(_size(record))


def _mask(record: AttentionRecord) -> np.ndarray | None:
    mask = record.mask()
    return None if mask is None else mask[0, 0].expand(_size(record)).cpu().numpy()


def _reach(records: Sequence[AttentionRecord]) -> np.ndarray | None:
    """Return the causal mask for attention rollout, or None if a query sees later tokens in some layer."""
    masks = [_mask(record) for record in records]
    causal = np.tri(*_size(records[0]), dtype=np.bool_)
    return causal if all(mask is not None and not mask[~causal].any() for mask in masks) else None


def bias_name(record: AttentionRecord) -> str:
    """Return the kind of the score bias in words; empty if there is none."""
    bias = record.attention.spec.score_bias
    return "" if bias is None else bias.kind.replace("_", " ")


def mask_name(record: AttentionRecord) -> str:
    """Return the mask of an attention in words."""
    mask = record.attention.spec.mask
    if isinstance(mask, spec.Window):
        return f"window: {mask.before} before, {mask.after} after"
    return "none" if isinstance(mask, spec.Full) else mask.kind


@torch.no_grad()
def _exact_head(record: AttentionRecord, head: int) -> ExactHead:
    bias, sink = record.bias(), record.attention.sink
    return ExactHead(
        query=record.query_BHTE[0, head].float().cpu().numpy(),
        key=record.key_BKSE[0, record.kv_head(head)].float().cpu().numpy(),
        scale=record.attention.scale,
        soft_cap=record.attention.spec.soft_cap,
        bias=None if bias is None else bias.expand(1, record.num_heads, *_size(record))[0, head].float().cpu().numpy(),
        sink=None if sink is None else float(sink[head]),
    )
