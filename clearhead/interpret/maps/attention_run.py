"""`AttentionRun`: one run of a model, with its attention weights, head statistics, effects and logit lens.

Legend: H heads, T queries, S keys, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from jaxtyping import Float32
from torch import Tensor

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.printing import block, short
from clearhead.base.progress import Notify
from clearhead.core import Transformer
from clearhead.generate.search.recorder import ConsideredToken
from clearhead.interpret.maps.contributions import Contribution, contributions
from clearhead.interpret.maps.effects import (
    EffectMeter,
    HeadEffect,
    Patcher,
    Patches,
    Positions,
    align_positions,
)
from clearhead.interpret.maps.flow import norm_weighted, rollout
from clearhead.interpret.maps.head_statistics import HeadStatistics, heads_over_texts
from clearhead.interpret.maps.lens import LogitLens, logit_lens
from clearhead.interpret.maps.map_inputs import MapInputs
from clearhead.interpret.maps.outcome import ModelOutcome, OutcomeChoice, OutputNames, choose_outcome
from clearhead.interpret.maps.recording import ALL, STACKS, AttentionRecord
from clearhead.interpret.maps.streams import Streams
from clearhead.interpret.maps.token_texts import label_tokens, token_texts
from clearhead.interpret.view.explorer.data import BeamNode
from clearhead.spec.describe import count_noun
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer

MOST_BYTES = 2**31
"""Largest array of weights that is computed at once, in bytes."""


@check_types
class AttentionRun:
    """Attention of one run of a model, with methods that measure heads, effects and the logit lens on this run.

    Args:
        module: model that ran, in evaluation mode.
        tokenizers: tokenizers of the model.
        task: task that the model was trained for.
        inputs: inputs of the model's stacks.
        records: recorded attentions.
        next_id: token id that the decoder predicts after the last token that it reads. None means that the model writes
            no text, or that the run did not reach its output.
    """

    def __init__(
        self,
        module: Transformer,
        tokenizers: TokenizerPair,
        task: TaskRecord,
        inputs: MapInputs,
        records: Sequence[AttentionRecord],
        next_id: int | None = None,
    ) -> None:
        self.module = module
        self.tokenizers = tokenizers
        self.task = task
        self.inputs = inputs
        self.next_id = next_id
        self.records: dict[tuple[str, int], AttentionRecord] = {
            (record.stack, record.layer): record for record in records
        }
        assert len(self.records) == len(records), "a layer attends to each source once"

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}, weights(stack, layer, head) of"]
        for stack in self.stacks:
            layers = self.layers(stack)
            queries, keys = len(self.query_tokens(stack)), len(self.key_tokens(stack))
            heads = sorted({self.num_heads(stack, layer) for layer in layers})
            count = f"{' or '.join(map(str, heads))} head{'s' * (heads != [1])}"
            lines.append(f"  {stack}: {count_noun(len(layers), 'layer')} with {count}, {queries} queries, {keys} keys")
        sides = self.token_lists().items()
        return block(lines + [f"  {name}: {short(tokens)}" for name, tokens in sides if tokens is not None])

    @property
    def tokens(self) -> list[str]:
        """Vocabulary entries of the tokens that the first stack reads, special tokens included."""
        tokenizer = self.tokenizers.target if self.module.encoder is None else self.tokenizers.source
        return tokenizer.tokens(self.inputs.source.ids[0].tolist())

    @property
    def target_tokens(self) -> list[str] | None:
        """Vocabulary entries of the tokens that the decoder of a two-stack model reads; None for one stack."""
        target = self.inputs.target
        return None if target is None else self.tokenizers.target.tokens(target.ids[0].tolist())

    @property
    def written_tokens(self) -> list[str] | None:
        """Vocabulary entry of the token that the decoder writes at each step; None if it writes no text.

        The list is as long as the list of tokens that the decoder reads: entry i follows token i in the text. The last
        entry is the end token of a generated text. If you gave the text, it is the most probable next token.
        """
        ids = self.written_ids
        return None if ids is None else self.tokenizers.target.tokens(ids)

    @property
    def written_ids(self) -> list[int] | None:
        """The token ids of `written_tokens`."""
        steps = self.inputs.last.ids.shape[1]
        ids = [*self.inputs.written, *(() if self.next_id is None else (self.next_id,))][:steps]
        return ids if len(ids) == steps else None

    def token_lists(self) -> dict[str, list[str] | None]:
        """Return a dictionary of `tokens`, `target_tokens` and `written_tokens`, as written to files and JSON."""
        return {"tokens": self.tokens, "target_tokens": self.target_tokens, "written_tokens": self.written_tokens}

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the attentions that the model has, out of encoder.self, decoder.self and decoder.memory."""
        return tuple(dict.fromkeys(stack for stack, _ in self.records))

    def layers(self, stack: str) -> tuple[int, ...]:
        """Return the numbers of the layers of a stack that have attention, from 0; shared layers count at every depth.

        Raises:
            InputError: the stack does not exist.
        """
        if stack not in self.stacks:
            raise InputError(f"{_explain_missing_stack(stack, self.stacks)}; it has {', '.join(self.stacks)}")
        return tuple(layer for name, layer in self.records if name == stack)

    def num_heads(self, stack: str, layer: int) -> int:
        """Return the number of heads of a layer.

        Raises:
            InputError: the stack or layer does not exist.
        """
        return self.record(stack, layer).num_heads

    def record(self, stack: str, layer: int) -> AttentionRecord:
        """Return the recorded queries, keys and values of a layer, from which its weights are recomputed.

        Raises:
            InputError: the stack or layer does not exist.
        """
        layers = self.layers(stack)
        if layer not in layers:
            raise InputError(f"{stack} has no layer {layer!r}; it has {_numbers(layers)}")
        return self.records[stack, layer]

    def query_tokens(self, stack: str) -> list[str]:
        """Return the query tokens: the rows of a stack's weights.

        Rows of `decoder.memory` have the token that the decoder writes at that step. All other rows have the token that
        the stack reads.
        """
        if stack == "decoder.memory" and self.target_tokens is not None and self.written_tokens is not None:
            return self.written_tokens
        return self.tokens if self.target_tokens is None or stack.startswith("encoder") else self.target_tokens

    def key_tokens(self, stack: str) -> list[str]:
        """Return the key tokens: the columns of a stack's weights."""
        return self.tokens if stack.endswith("memory") else self.query_tokens(stack)

    def weights(
        self, stack: str, layer: int, head: int | None = None, *, queries: slice = ALL
    ) -> Float32[Tensor, "*heads queries keys"]:
        """Return the attention weights of a head, or of all heads of a layer, recomputed with the eager kernel.

        Args:
            stack: one of `stacks`.
            layer: layer of the stack, from 0.
            head: head of the layer, from 0. None means all heads, as the first axis.
            queries: slice of the queries, for texts with too many weights; all by default.

        Returns:
            Weights in float32 on the CPU. A row sums to one, or to less if the model has attention sinks.

        Raises:
            InputError: the stack, layer or head does not exist, or the weights are too large.
        """
        record = self.record(stack, layer)
        heads = None if head is None else [_check_head(record, head)]
        num_queries, num_keys = len(range(*queries.indices(record.query_BHTE.shape[2]))), record.key_BKSE.shape[2]
        _check_size(
            (record.num_heads if heads is None else 1) * num_queries * num_keys, "choose some with head= and queries="
        )
        weights_HTS = record.weights(heads, queries)[0].cpu()
        return weights_HTS if head is None else weights_HTS[0]

    def heads(self, *, seed: int = 0) -> list[HeadStatistics]:
        """Return the statistics of each head on this text: see `HeadStatistics`.

        Duplicate-token and induction scores are measured on generated sequences of random tokens.

        Args:
            seed: seed of the random sequences.
        """
        return heads_over_texts(self.module, self.tokenizers, [(self.inputs, list(self.records.values()))], seed=seed)

    def norm_weighted(self, stack: str, layer: int, head: int) -> Float32[Tensor, "queries keys"]:
        """Return each attention weight of a head times the length of its projected value: see `flow.norm_weighted`.

        Args:
            stack, layer, head: see `weights`.

        Raises:
            InputError: same as `weights`.
        """
        return norm_weighted(*self._record_of(stack, layer, head))

    def rollout(self, stack: str) -> Float32[Tensor, "layers queries keys"]:
        """Return attention rollout: the share of each input token in the residual stream; see `flow.rollout`.

        Args:
            stack: one of `stacks`.

        Raises:
            InputError: the stack does not exist, or the text is too long.
        """
        records = [self.record(stack, layer) for layer in self.layers(stack)]
        heads = max(record.num_heads for record in records)
        query, key = records[0].query_BHTE, records[0].key_BKSE
        _check_size((heads + len(records)) * query.shape[2] * key.shape[2], "give a shorter text")
        return rollout(list(self.records.values()), stack)

    def outcome(self, of: OutcomeChoice = None) -> ModelOutcome:
        """Return the output that effects and contributions are measured on: a token or label, or two to compare.

        Args:
            of: a position; a token or label; two tokens or labels to compare; or a position followed by one or two of
                them. See `outcome.choose_outcome`. None means the last token of a language model, the first mask of a
                masked model, or the label of a classifier.

        Raises:
            InputError: the output does not exist, or the model outputs no probabilities.
        """
        return choose_outcome(of, self._streams, self.output_names, self.inputs.labels)

    def effects(self, of: OutcomeChoice = None, *, notify: Notify | None = None) -> list[HeadEffect]:
        """Return, for each head, the change of an output's log-probability if this head is switched off.

        With two outputs, it is the change of the difference of their log-probabilities. The model runs once for each
        head, in batches, from the layer of the head on.

        Args:
            of: see `outcome`.
            notify: function called with the numbers of finished and of all heads. None means the progress display.

        Raises:
            InputError: same as `outcome`.
        """
        return self._meter(of, notify).head_effects()

    def key_effects(
        self, stack: str, layer: int, head: int, of: OutcomeChoice = None, *, notify: Notify | None = None
    ) -> Float32[Tensor, " keys"]:
        """Return, for each key, the change of an output's log-probability if a head does not attend to this key.

        Args:
            stack, layer, head: see `weights`.
            of: see `outcome`.
            notify: function called with the numbers of finished and of all keys. None means the progress display.

        Raises:
            InputError: same as `weights` and `outcome`.
        """
        record, head = self._record_of(stack, layer, head)
        return self._meter(of, notify).key_effects(record, head)

    def patch(
        self,
        other: AttentionRun,
        of: OutcomeChoice = None,
        *,
        positions: Positions | None = None,
        notify: Notify | None = None,
    ) -> Patches:
        """Return the changes of an output's log-probability if activations are replaced by those of another text.

        The model runs once for each depth and position of every stack and once for each head, in batches.

        Args:
            other: run of the same model on the other text.
            of: output of this text; see `outcome`.
            positions: name of a stack ("encoder", "decoder") -> pairs of a position in this text and its counterpart in
                the other text. None means that both texts have equally many tokens, and equal positions correspond.
            notify: function called with the numbers of finished and of all patches. None means the progress display.

        Raises:
            InputError: the runs are of different models, positions have no counterparts, or same as `outcome`.
        """
        if other.module.spec != self.module.spec:
            raise InputError("the two runs are of different models: run the same model on both texts")
        meter = self._meter(of, notify)
        pairs = align_positions(self._streams, other._streams, positions)
        patcher = Patcher(meter, other._streams, pairs)
        tokens = {name: self._labels(f"{name}.self")[0] for name in pairs}
        name = self.output_names.difference(meter.outcome, " rather than ")
        return Patches(patcher.streams(), patcher.heads(), patcher.total(), name, tokens)

    def _meter(self, of: OutcomeChoice, notify: Notify | None) -> EffectMeter:
        return EffectMeter(self._streams, self.outcome(of), list(self.records.values()), notify)

    def contributions(self, of: OutcomeChoice = None) -> list[Contribution]:
        """Return the terms of an output's logit, one per component of the model: see `contributions.contributions`.

        Args:
            of: see `outcome`.

        Raises:
            InputError: same as `outcome`.
        """
        return contributions(self._streams, self.outcome(of))

    def beams(self) -> tuple[BeamNode, ...]:
        """Return the tree of the beam search that wrote the tokens; empty if no beam search did."""
        inputs = self.inputs
        if not inputs.considered or inputs.num_given is None:
            return ()
        start = int((inputs.target or inputs.source).ids[0, inputs.num_given - 1])
        return beam_tree(inputs.considered, self.tokenizers.target, start)

    def lens(self, top_k: int = 5, of: OutcomeChoice = None) -> LogitLens:
        """Return the logit lens: the model's predictions if it ended after each layer of its last stack.

        Args:
            top_k: number of outputs for each position.
            of: output that is followed at every position; see `outcome`. None means no output.

        Raises:
            InputError: top_k is out of range, the output does not exist, or the model outputs no probabilities.
        """
        followed = None if of is None else self.outcome(of)
        return logit_lens(self._streams, self.output_names, top_k, self.inputs.labels, followed)

    def _labels(self, stack: str) -> tuple[list[str], list[str]]:
        """Return the display labels of the rows and columns of a stack's weights."""
        source, target = self.inputs.source, self.inputs.target
        first = self.tokenizers.target if self.module.encoder is None else self.tokenizers.source
        keys = queries = label_tokens(first, source.ids[0].tolist())
        if target is not None and not stack.startswith("encoder"):
            queries = label_tokens(self.tokenizers.target, target.ids[0].tolist())
        if not stack.endswith("memory"):
            return queries, queries
        return queries if self.written_ids is None else label_tokens(self.tokenizers.target, self.written_ids), keys

    def _record_of(self, stack: str, layer: int, head: int) -> tuple[AttentionRecord, int]:
        """Return the record of a layer and the head number; raise InputError if the head is missing or too large."""
        record = self.record(stack, layer)
        _check_size(record.query_BHTE.shape[2] * record.key_BKSE.shape[2], "give a shorter text")
        return record, _check_head(record, head)

    @cached_property
    def _streams(self) -> Streams:
        """The residual stream at every depth, from one more run of the model."""
        return Streams.of(self.module, self.inputs.source, self.inputs.target)

    @cached_property
    def output_names(self) -> OutputNames:
        """The names of the model's outputs.

        Raises:
            InputError: the outputs are vectors or numbers.
        """
        tokenizer = self.tokenizers.source if self.module.decoder is None else self.tokenizers.target
        return OutputNames.of(self.module, tokenizer, self.task)

    def choose(
        self, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
    ) -> list[tuple[AttentionRecord, list[int]]]:
        """Return the attention records of the chosen layers, each with the chosen heads that exist in this layer.

        Args:
            layers, heads: chosen layers and heads. None means all.

        Raises:
            InputError: a layer or head does not exist in any stack, or the weights together are too large.
        """
        known_layers = {record.layer for record in self.records.values()}
        known_heads = set(range(max((record.num_heads for record in self.records.values()), default=0)))
        for name, requested, known in (("layer", layers, known_layers), ("head", heads, known_heads)):
            unknown = [number for number in requested or () if number not in known]
            if unknown:
                raise InputError(f"this model has no {name} {unknown[0]!r}; it has {_numbers(sorted(known))}")
        chosen = []
        for record in self.records.values():
            chosen_heads = [head for head in range(record.num_heads) if heads is None or head in heads]
            if chosen_heads and (layers is None or record.layer in layers):
                chosen.append((record, chosen_heads))
        count = sum(len(some) * record.query_BHTE.shape[2] * record.key_BKSE.shape[2] for record, some in chosen)
        _check_size(count, "choose some with layers= and heads=")
        return chosen


def _explain_missing_stack(stack: str, stacks: Sequence[str]) -> str:
    """Return the error message for a stack that the model does not have."""
    absent = [
        stack_name for stack_name in ("encoder", "decoder") if not any(name.startswith(stack_name) for name in stacks)
    ]
    if stack in STACKS and absent:
        reason = ", so its decoder has no cross-attention" if absent == ["encoder"] and stack.endswith("memory") else ""
        return f"'{stack}': this model has no {absent[0]}{reason}"
    return f"this model has no stack '{stack}'{did_you_mean(stack, stacks)}"


def _check_head(record: AttentionRecord, head: int) -> int:
    if head not in range(record.num_heads):
        raise InputError(
            f"layer {record.layer} of {record.stack} has no head {head!r}; it has {_numbers(range(record.num_heads))}"
        )
    return head


def _check_size(count: int, advice: str) -> None:
    if 4 * count > MOST_BYTES:
        raise InputError(f"the attention weights need {4 * count / 2**30:.1f} GiB, but at most 2 GiB fit: {advice}")


def _numbers(numbers: Sequence[int]) -> str:
    """Return ascending layer or head numbers in words, such as "0 to 11"."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def beam_tree(considered: Sequence[ConsideredToken], tokenizer: Tokenizer, start: int) -> tuple[BeamNode, ...]:
    """Return the candidates of a beam search as a tree, parents before children.

    Args:
        considered: candidates in the order of the steps.
        tokenizer: tokenizer of the written text.
        start: token id at which the search started, the root of the tree.
    """
    (first,) = token_texts(tokenizer, [start])
    root = BeamNode(-1, first, log_probability=0.0, score=0.0, step=0, state="kept")
    numbers = {candidate.ids: number for number, candidate in enumerate(considered, start=1)}
    return (
        root,
        *(
            BeamNode(
                parent=numbers.get(candidate.ids[:-1], 0),
                token=token_texts(tokenizer, candidate.ids)[-1],
                log_probability=candidate.log_probability,
                score=candidate.score,
                step=len(candidate.ids),
                state=candidate.state,
                reason=candidate.reason,
                rank=candidate.rank,
            )
            for candidate in considered
        ),
    )
