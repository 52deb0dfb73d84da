"""Capture the forward pass of a model on one text, as sections of values in the order of computation.

Numbers are activations captured at their addresses. Three kinds have no address and are computed here: table rows,
masks and the weights of experts. Legend: T tokens, S keys, D width, H heads, E head size, V outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clearhead import core, spec
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.core.attention import Attention, attention_weights
from clearhead.core.context import Masking
from clearhead.core.embedding import Embedding, LearnedPosition, Table
from clearhead.core.feedforward import FeedForward, activate
from clearhead.core.head import Linear, Pointwise, Pool
from clearhead.core.kernels.positions import rotate
from clearhead.core.norm import LayerNorm, Norm
from clearhead.core.rare.mixture_of_experts import MixtureOfExperts
from clearhead.core.stack import Branch, Layer, Stack, Step
from clearhead.fast.replica import replica
from clearhead.interpret.explain.values import Code, ExplanationSection, Value, code_of, heads_first, number_names
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.hook_points import Captured, capture
from clearhead.interpret.maps.outcome import OutputNames
from clearhead.interpret.maps.recording import AttentionRecord, recording
from clearhead.interpret.maps.token_texts import label_tokens

TOP = 5
"""Number of most probable outputs that are listed for each token."""


@dataclass(frozen=True)
class Forward:
    """Captured forward pass of a model on one text.

    Args:
        module: replica of the model that ran.
        source, target: inputs of the first stack and of the decoder of a two-stack model, one row each.
        seen: captured activations of every address.
        records: recorded attentions by stack with source, such as "decoder.memory", and depth.
        tokens: name of a stack -> display texts of the tokens that it reads.
        names: names of the outputs. None means that the outputs have no probabilities.
        written: display texts of the tokens that the decoder writes at each step; empty if it writes no text.
    """

    module: Transformer
    source: core.Sequence
    target: core.Sequence | None
    seen: Captured
    records: dict[tuple[str, int], AttentionRecord]
    tokens: dict[str, tuple[str, ...]]
    names: OutputNames | None = None
    written: tuple[str, ...] = ()

    @classmethod
    def of(cls, maps: AttentionMaps) -> Forward:
        """Run the model of attention maps once more, and capture all activations.

        Args:
            maps: attention maps of a text.
        """
        inputs = maps.inputs
        first = "decoder" if maps.module.encoder is None else "encoder"
        tokenizer = maps.tokenizers.target if first == "decoder" else maps.tokenizers.source
        tokens = {first: number_names(label_tokens(tokenizer, inputs.source.ids[0].tolist()))}
        if inputs.target is not None:
            tokens["decoder"] = number_names(label_tokens(maps.tokenizers.target, inputs.target.ids[0].tolist()))
        names = None
        with suppress(InputError):  # the model outputs vectors or numbers, without probabilities
            names = maps.output_names
        forward = cls.run(maps.module, inputs.source, inputs.target, tokens, names)
        return replace(forward, written=number_names(label_tokens(maps.tokenizers.target, maps.written_ids or ())))

    @classmethod
    def run(
        cls,
        module: Transformer,
        source: core.Sequence,
        target: core.Sequence | None,
        tokens: dict[str, tuple[str, ...]],
        names: OutputNames | None = None,
    ) -> Forward:
        """Run a model and capture all activations.

        Args:
            module: model, of which a replica runs in evaluation mode.
            source, target, tokens, names: see `Forward`.
        """
        module = replica(module)
        with torch.no_grad(), capture(module, "**") as seen, recording(module) as records:
            module(source, target)
        by_place = {(record.stack, record.layer): record for record in records}
        return cls(module, source, target, seen, by_place, tokens, names)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks of the model by name ("encoder", "decoder"), in the order in which they run."""
        return {name: getattr(self.module, name) for name in self.tokens}

    def at(self, address: str, depth: int = 0, *, has_batch: bool = True) -> Tensor:
        """Return an activation of the text without the batch axis.

        Args:
            address: address of the activation.
            depth: number of layers of its stack that ran before the activation was computed.
            has_batch: True if the activation has a batch axis; the router of a mixture of experts has none.
        """
        activation = next(record.tensor for record in self.seen[address] if record.depth == depth)
        return activation[0] if has_batch else activation

    def ids(self, stack: str) -> Tensor:
        """Return the token ids [T] that a stack reads."""
        sequence = self.source if self.target is None or stack == "encoder" else self.target
        return sequence.ids[0]

    def queries(self, stack: str, keys: str | None) -> tuple[str, ...]:
        """Return the row labels of a layer step: input tokens, or in cross-attention the tokens that are written.

        Args:
            stack: stack of the layer.
            keys: stack whose tokens are the keys of the attention. None means that the step has no attention.
        """
        return self.written if self.written and keys not in (None, stack) else self.tokens[stack]

    def record(self, stack: str, source: str, depth: int) -> AttentionRecord:
        """Return the recorded attention of a stack to a source ("self" or "memory") at a depth."""
        return self.records[f"{stack}.{source}", depth]


def sections(forward: Forward) -> Iterator[ExplanationSection]:
    """Yield the explanation's sections of a forward pass, in the order of computation, each with its values.

    Args:
        forward: captured forward pass.
    """
    for name, stack in forward.stacks.items():
        rows = forward.tokens[name]
        values = tuple(_embedding(forward, name, stack.embedding))
        yield ExplanationSection("embedding", f"{name}.embedding", rows, values, stack=name)
        for depth, index in enumerate(stack.order):
            layer = stack.layers[index]
            assert isinstance(layer, Layer)
            for number, step in enumerate(layer.steps):
                assert isinstance(step, Step)
                yield _step(forward, name, depth, f"{name}.layers.{index}.steps.{number}", step)
        last = f"{name}.layers.{stack.order[-1]}.after"
        after_layers = [
            *_norm(forward, f"{name}.final_norm", stack.final_norm, "final norm", last, len(stack.order) - 1)
        ]
        if after_layers:
            yield ExplanationSection("after the layers", name, rows, tuple(after_layers), stack=name)
    if forward.module.head is not None:
        name = list(forward.tokens)[-1]
        is_pooled = forward.module.head.is_pooled
        values = tuple(_head(forward))
        yield ExplanationSection("head", "head", ("the text",) if is_pooled else forward.tokens[name], values)


def _embedding(forward: Forward, stack: str, embedding: Embedding) -> Iterator[Value]:
    ids, address = forward.ids(stack), f"{stack}.embedding"
    rows_TD = embedding.rows.weight[ids].detach()
    forward_code = code_of(Embedding.forward)
    yield Value("token", "table[id], the row of each token", rows_TD, "", code_of(Table.forward))
    if embedding.scale != 1.0:
        yield Value("scaled token", f"token * {embedding.scale:.6g}", rows_TD * embedding.scale, "", forward_code)
    yield from _norm(forward, f"{address}.word_norm", embedding.word_norm, "word norm", "the token")
    projection = embedding.projection
    projected = []
    if isinstance(projection, nn.Linear):
        projected = [_linear(forward, f"{address}.projection", projection, "projection", "the vector above")]
    terms = ["token"]
    if embedding.segments is not None:
        terms.append("segment")
        segments_TD = forward.at(f"{address}.segments")
        yield Value("segment", "segments[segment]", segments_TD, f"{address}.segments", code_of(Table.forward))
    if embedding.position is not None:
        terms.append("position")
        position = embedding.position
        kind = "positions[position], learned" if isinstance(position, LearnedPosition) else "sin and cos of position"
        code = code_of(type(position).forward)
        positions_TD = forward.at(f"{address}.position").expand(len(ids), -1)
        yield Value("position", kind, positions_TD, f"{address}.position", code)
    if embedding.project_at == "before_norm":
        yield from projected
    yield from _norm(forward, f"{address}.norm", embedding.norm, "norm of the embedding", " + ".join(terms))
    if embedding.project_at == "after_norm":
        yield from projected
    is_plain = isinstance(embedding.norm, nn.Identity) and not projected
    formula = f"x = {' + '.join(terms)}" if is_plain else "x, the embedding as the first layer reads it"
    yield Value("embedded", formula, forward.at(f"{stack}.embedded"), f"{stack}.embedded", forward_code)


def _step(forward: Forward, stack: str, depth: int, address: str, step: Step) -> ExplanationSection:
    before, after = f"{address}.before", f"{address}.after"
    values = [Value("before", "x, the residual stream", forward.at(before, depth), before)]
    values += _norm(forward, f"{address}.pre", step.pre, "norm before the branches", "x", depth)
    titles, keys = [], None
    for number, branch in enumerate(step.branches):
        assert isinstance(branch, Branch)
        read = "x" if isinstance(step.pre, nn.Identity) and isinstance(branch.pre, nn.Identity) else "n"
        function = branch.function
        if isinstance(function, Attention):
            is_memory = function.spec.source == "memory"
            keys = "encoder" if is_memory else stack
            titles.append("cross-attention" if is_memory else "self-attention")
        else:
            titles.append("feed-forward" if isinstance(function, FeedForward | MixtureOfExperts) else "custom module")
        values += _branch(forward, f"{address}.branches.{number}", branch, (read, stack, depth))
    total = "x + out" if len(step.branches) == 1 else "x + the outputs of the branches"
    code = code_of(Step.forward)
    if not isinstance(step.out, nn.Identity):
        total, code = _norm_formula(step.out, total), _norm_code(step.out)
    values.append(Value("after", f"x = {total}", forward.at(after, depth), after, code))
    title = f"layer {depth}, step {address.rpartition('.')[2]}: {' and '.join(titles)}"
    return ExplanationSection(title, address, forward.queries(stack, keys), tuple(values), depth, stack, keys)


def _branch(forward: Forward, address: str, branch: Branch, reads: tuple[str, str, int]) -> Iterator[Value]:
    (read, stack, depth), function = reads, branch.function
    yield from _norm(forward, f"{address}.pre", branch.pre, "norm", "x", depth)
    if isinstance(function, Attention):
        source = function.spec.source
        record, keys = forward.record(stack, source, depth), "encoder" if source == "memory" else stack
        yield from _attention(forward, f"{address}.function", record, read, forward.tokens[keys])
    else:
        yield from _feed_forward(forward, f"{address}.function", (function, read), depth)
    yield from _norm(forward, f"{address}.post", branch.post, "norm of the branch", "out", depth)
    if branch.scale != 1.0:
        numbers_TD, code = forward.at(address, depth), code_of(Branch.forward)
        yield Value("scaled branch", f"out * {branch.scale:.6g}", numbers_TD, address, code)


def _attention(
    forward: Forward, address: str, record: AttentionRecord, read: str, keys: tuple[str, ...]
) -> Iterator[Value]:
    attention = record.attention
    depth, size, heads = record.layer, attention.spec.head_size, record.num_heads
    is_memory = attention.spec.source == "memory"
    for name in ("query", "key", "value"):
        linear = getattr(attention, name)
        source = "memory" if is_memory and name != "query" else read
        projected_HTE = _by_head(heads_first(forward.at(f"{address}.{name}", depth), size), heads)
        formula = _linear_formula(source, name[0], linear) + f", {heads} heads of {size}"
        code = code_of(type(attention).forward)
        yield Value(name, formula, projected_HTE, f"{address}.{name}", code, is_of_keys=name != "query")
        yield from _prepared_value(record, name)
    mask, bias = record.mask(), record.bias()
    formula = f"s = q . k * {attention.scale:.6g}"
    if attention.spec.soft_cap is not None:
        formula += f", capped by {attention.spec.soft_cap:g} * tanh(s / {attention.spec.soft_cap:g})"
    if bias is not None:
        formula += " + bias"
        bias_HTS = bias[0].expand(heads, -1, -1)
        yield Value("bias", _bias_formula(attention), bias_HTS, "", code_of(type(attention).bias), keys)
    if mask is not None:
        formula += "; -inf where the mask hides the key"
        mask_TS = mask[0].expand(-1, len(record.query_BHTE[0, 0]), -1)[0].float()
        yield Value("mask", f"1 = may attend: {_mask_words(attention)}", mask_TS, "", _mask_code(attention), keys)
    if attention.score_step is not None:
        formula += f", then {type(attention.score_step).__name__}"
    scores_HTS = forward.at(f"{address}.scores", depth)
    yield Value("scores", formula, scores_HTS, f"{address}.scores", code_of(Attention.scores), keys)
    weights_HTS = forward.at(f"{address}.weights", depth)
    formula = "w = exp(s) / sum of exp(s) over the keys" + ("" if attention.sink is None else " and the sink")
    code = code_of(attention_weights)
    if attention.weight_step is not None:
        formula, code = f"w = {type(attention.weight_step).__name__}(s)", code_of(type(attention.weight_step).forward)
    yield Value("weights", formula, weights_HTS, f"{address}.weights", code, keys)
    mixed_HTE = forward.at(f"{address}.mixed", depth)
    yield Value("mixed", "m = sum over the keys of w * value", mixed_HTE, f"{address}.mixed", code_of(Attention.attend))
    formula = _linear_formula("all heads of m, side by side", "o", attention.out)
    yield Value("out", formula, forward.at(address, depth), address, code_of(Attention.merge))


def _prepared_value(record: AttentionRecord, name: str) -> Iterator[Value]:
    """Yield the queries, keys or values after clipping, norm and rotation, if the attention has any of these steps."""
    attention, changes = record.attention, []
    if attention.spec.clip is not None:
        changes.append(f"clipped to +-{attention.spec.clip:g}")
    code = code_of(type(attention).prepare)
    if name != "value" and isinstance(getattr(attention, f"{name}_norm"), Norm):
        changes.append("normed")
    if name != "value" and attention.spec.position is not None:
        changes.append("rotated by the position")
        code = code_of(rotate)
    points = {
        "query": ("queries", record.query_BHTE),
        "key": ("keys", record.key_BKSE),
        "value": ("values", record.value_BKSE),
    }
    point, numbers = points[name]
    if changes:
        numbers_HTE = _by_head(numbers[0], record.num_heads)
        yield Value(
            f"prepared {name}",
            " and ".join(changes),
            numbers_HTE,
            f"{record.address}.{point}",
            code,
            is_of_keys=name != "query",
        )


def _feed_forward(forward: Forward, address: str, reads: tuple[nn.Module, str], depth: int) -> Iterator[Value]:
    function, read = reads
    out_TD = forward.at(address, depth)
    code = code_of(type(function).forward)
    if isinstance(function, FeedForward):
        up = _linear_formula(read, "up", function.up)
        yield Value("up", up, forward.at(f"{address}.up", depth), f"{address}.up", code)
        shape, inner = function.spec.activation, "up"
        kind = shape if isinstance(shape, str) else f"clamped gate (limit {shape.limit:g}, alpha {shape.alpha:g})"
        if function.gate is not None:
            gate_TF = forward.at(f"{address}.gate", depth)
            yield Value("gate", _linear_formula(read, "gate", function.gate), gate_TF, f"{address}.gate", code)
        formula = f"h = {kind}({inner})" if function.gate is None else f"h = {kind}(gate) * up"
        inner_TF = forward.at(f"{address}.dropout", depth)
        yield Value("inner", formula, inner_TF, f"{address}.dropout", code_of(activate))
        yield Value("out", _linear_formula("h", "down", function.down), out_TD, address, code)
    elif isinstance(function, MixtureOfExperts):
        router_TX = forward.at(f"{address}.router", depth, has_batch=False)
        columns = tuple(f"expert {index}" for index in range(router_TX.shape[-1]))
        formula = _linear_formula(read, "router", function.router)
        yield Value("router", formula, router_TX, f"{address}.router", code, columns)
        share_TX = router_TX.softmax(-1, dtype=torch.promote_types(router_TX.dtype, torch.float32))
        least_T1 = share_TX.topk(function.spec.top_k, dim=-1).values[:, -1:]
        share_TX = share_TX.where(share_TX >= least_T1, 0.0)
        formula = f"softmax(router), the {function.spec.top_k} largest"
        if function.spec.router.normalize:
            share_TX, formula = share_TX / share_TX.sum(-1, keepdim=True), f"{formula}, divided by their sum"
        yield Value("shares", formula, share_TX, "", code, columns)
        yield Value("out", "sum over the experts of share * expert(n)", out_TD, address, code)
    else:
        yield Value("out", type(function).__name__, out_TD, address, code)


def _head(forward: Forward) -> Iterator[Value]:
    head = forward.module.head
    assert head is not None
    for number, layer in enumerate(head.layers):
        address = f"head.layers.{number}"
        record = forward.seen[address][0].tensor
        numbers = record if record.dim() == 2 else record[0]
        code = code_of(type(layer).forward)
        if isinstance(layer, Norm):
            yield Value("norm", _norm_formula(layer, "x"), numbers, address, code_of(type(layer).normalize))
        elif isinstance(layer, Linear):
            tied = ", the rows of the embedding's table" if layer.weight is None else ""
            formula = _add_bias_term(f"x Wᵀ{tied}", layer.bias)
            yield Value("linear", formula, numbers, address, code)
        elif isinstance(layer, Pool):
            yield Value("pool", f"one vector for the text, by {' and '.join(layer.modes)}", numbers, address, code)
        else:
            assert isinstance(layer, Pointwise)
            kind = forward.module.spec.head
            assert kind is not None
            yield Value("function", _pointwise(kind.layers[number]), numbers, address, code)
    logits = forward.seen["logits"][0].tensor
    logits_TV = logits if logits.dim() == 2 else logits[0]
    yield from _predictions(forward, logits_TV)


def _predictions(forward: Forward, logits_TV: Tensor) -> Iterator[Value]:
    names = forward.names
    if names is None:
        return
    shares_TV = names.probabilities(logits_TV.float())
    top_TK = shares_TV.topk(min(TOP, shares_TV.shape[-1]), dim=-1)
    notes = [
        "  ".join(f"{names.display_name(index)} {share:.3f}" for share, index in zip(row, ids, strict=True))
        for row, ids in zip(top_TK.values.tolist(), top_TK.indices.tolist(), strict=True)
    ]
    kind = "p = 1 / (1 + exp(-logit))" if names.are_independent else "p = exp(logit) / sum of exp(logits)"
    code = code_of(OutputNames.probabilities)
    yield Value("probabilities", kind, shares_TV, "", code, notes=tuple(notes))


def _norm(forward: Forward, address: str, norm: nn.Module, name: str, read: str, depth: int = 0) -> Iterator[Value]:
    if not isinstance(norm, nn.Identity):
        depth = depth if ".layers." in address else 0
        read = "x" if read.endswith(".after") else read
        yield Value(name, f"n = {_norm_formula(norm, read)}", forward.at(address, depth), address, _norm_code(norm))


def _norm_code(norm: nn.Module) -> Code:
    return code_of(type(norm).normalize if isinstance(norm, Norm) else type(norm).forward)


def _norm_formula(norm: nn.Module, read: str) -> str:
    if not isinstance(norm, Norm):
        return f"{type(norm).__name__}({read})"
    weight = " * (1 + weight)" if norm.has_unit_offset else " * weight"
    weight = "" if norm.weight is None else weight
    x = read if read.isalpha() else f"({read})"
    if isinstance(norm, LayerNorm):
        bias = "" if norm.bias is None else " + bias"
        return f"({x} - mean) / sqrt(variance + {norm.eps:g}){weight}{bias}"
    return f"{x} / sqrt(mean of squares + {norm.eps:g}){weight}"


def _linear(forward: Forward, address: str, linear: nn.Linear, name: str, read: str) -> Value:
    numbers = forward.at(address)
    return Value(name, _linear_formula(read, name[0], linear), numbers, address, None)


def _linear_formula(read: str, name: str, linear: nn.Linear) -> str:
    x = read if read.isalpha() else f"({read})"
    return _add_bias_term(f"{x} W_{name}ᵀ", linear.bias)


def _add_bias_term(product: str, bias: Tensor | None) -> str:
    return product if bias is None else f"{product} + b"


def _by_head(x_KSE: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for every query head that shares it."""
    return x_KSE.repeat_interleave(heads // len(x_KSE), dim=0)


def _bias_formula(attention: Attention) -> str:
    match attention.spec.score_bias:
        case spec.Alibi():
            return "- slope of the head * distance between key and query"
        case spec.Disentangled():
            return "query and key against the vectors of their distance"
        case _:
            return "table[bucket of the distance between key and query]"


def _mask_words(attention: Attention) -> str:
    if attention.spec.source == "memory":
        return "real tokens of the memory"
    match mask := attention.spec.mask:
        case spec.Causal():
            return "keys up to the query"
        case spec.Window():
            return f"at most {mask.before} tokens before the query and {mask.after} after it"
        case _:
            return "real tokens"


def _mask_code(attention: Attention) -> Code:
    is_memory = attention.spec.source == "memory"
    return code_of(type(attention).mask) if is_memory else code_of(Masking.build)


def _pointwise(layer: object) -> str:
    match layer:
        case spec.Activation():
            return f"{layer.function}(x)"
        case spec.SoftCap():
            return f"{layer.value:g} * tanh(x / {layer.value:g})"
        case _:
            return "x / |x|"
