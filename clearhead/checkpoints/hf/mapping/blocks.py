"""Helpers for the records of families: addresses in a spec, config keys, layers, heads, and transformers classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

from clearhead import spec
from clearhead.checkpoints.hf.mapping.family import Address, Fixed, Key, Values, Variant
from clearhead.checkpoints.hf.mapping.tensor_rules import Rule, module_rule, tensor_rule
from clearhead.spec.tasks.record import Repeats

AnyNorm = spec.LayerNorm | spec.RMSNorm
AnyFunction = spec.Attention | spec.FeedForward | spec.MixtureOfExperts
DecoderTask = Literal["generate", "classify", "tag", "answer", "embed"]
MakeHead = Callable[[Values], spec.Head]


class AttentionFields(TypedDict, total=False):
    """Optional fields of `spec.Attention`, without `num_heads` and `head_size`."""

    source: Literal["self", "memory"]
    num_kv_heads: int
    mask: spec.Mask
    position: spec.Rotary | None
    score_bias: spec.ScoreBias | None
    scale: float | None
    bias: spec.Biases
    query_key_norm: spec.QueryKeyNorm | None
    soft_cap: float | None
    clip: float | None
    sink: bool
    dropout: float


class EmbeddingFields(TypedDict, total=False):
    """Optional fields of `spec.Embedding`, without its table."""

    width: int | None
    projection: spec.Projection | None
    scale: float
    scale_rounding: Literal["none", "weights"]
    num_segments: int
    position: spec.Learned | spec.Sinusoidal | None
    norm: AnyNorm | None
    dropout: float


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
    "tanh": "tanh",
}
INITIALIZATION = spec.Normal(scale_branches=False)
CAUSAL = Fixed("is_causal", (True,), "bidirectional attention is not supported")
"""Config key `is_causal`, which every decoder family refuses if its value is not true."""
RESIDUAL_BEFORE_NORM = Fixed(
    "apply_residual_connection_post_layernorm", (False,), "branches added to the normed stream are not supported"
)


# --- addresses ------------------------------------------------------------------------------------------------


def branch(stack: str, step: int, index: int = 0) -> str:
    """Return the address of a residual branch, with {layer} for the number of the layer."""
    return f"{stack}.layers.{{layer}}.steps.{step}.branches.{index}"


def function(stack: str, step: int, index: int = 0) -> str:
    """Return the address of the attention or feed-forward network of a residual branch, with {layer} for the layer."""
    return f"{branch(stack, step, index)}.function"


def out(stack: str, step: int) -> str:
    """Return the address of the norm after a residual sum, with {layer} for the number of the layer."""
    return f"{stack}.layers.{{layer}}.steps.{step}.out"


def step_norm_rules(theirs: str, stack: str, step: int) -> tuple[Rule, ...]:
    """Return the tensor rules for a norm that has one checkpoint name, whether it is post-norm or pre-norm."""
    return module_rule(theirs, out(stack, step)), module_rule(theirs, f"{branch(stack, step)}.pre")


FEED_FORWARD = "decoder.layers.0.steps.-1.branches.-1.function"
"""Address of a decoder's feed-forward network in the first layer, in parallel with attention or after it."""


def count_layers(stack: str) -> Address:
    """Return a function that gets a spec and returns the number of layers of its stack, encoder or decoder."""
    return lambda model: len(getattr(model, stack).depths)


def is_parallel(model: spec.Model) -> bool:
    """Return whether a decoder's layers compute attention and feed-forward network in parallel."""
    return model.decoder is not None and len(model.decoder.layers[0].steps) == 1


def in_head(kind: type[spec.Node], field: str) -> Address:
    """Return a function that gets a spec and returns `field` of its head's first layer of the class `kind`, or None."""
    return lambda model: next((getattr(layer, field) for layer in _layers(model) if isinstance(layer, kind)), None)


def _layers(model: spec.Model) -> Sequence[spec.HeadLayer]:
    return model.head.layers if model.head else ()


# --- keys -----------------------------------------------------------------------------------------------------


def derive(
    base: Sequence[Key], defaults: Mapping[str, Any], *others: Key, without: Sequence[str] = ()
) -> tuple[Key, ...]:
    """Return the config keys of a family: those of `base` with new `defaults`, minus `without`, plus `others`."""
    keys = {key.name: key for key in base if key.name not in without}
    for name, default in defaults.items():
        keys[name] = replace(keys[name], default=default, is_nullable=keys[name].default is None)
    return tuple((keys | {key.name: key for key in others}).values())


def is_tied(model: spec.Model) -> bool | None:
    """Return whether the head's last linear layer is tied to the token embedding; None if it scores no vocabulary."""
    linears = [layer for layer in _layers(model) if isinstance(layer, spec.Linear)]
    if not linears or any(isinstance(layer, spec.Pool) for layer in _layers(model)):
        return None
    return linears[-1].weight is not None


def tying(default: bool) -> Key:
    """Return the config key `tie_word_embeddings`. When a checkpoint is loaded, its tensors decide instead."""
    return Key("tie_word_embeddings", default, is_tied)


# --- layers ---------------------------------------------------------------------------------------------------


def pre(norm: AnyNorm | None, node: AnyFunction, dropout: float = 0.0, post: AnyNorm | None = None) -> spec.Step:
    """Return a pre-norm residual step: x + dropout(post(node(norm(x))))."""
    return spec.Step(branches=(spec.Branch(function=node, pre=norm, post=post, dropout=dropout),))


def after(norm: AnyNorm, node: AnyFunction, dropout: float = 0.0) -> spec.Step:
    """Return a post-norm residual step: norm(x + dropout(node(x)))."""
    return spec.Step(branches=(spec.Branch(function=node, dropout=dropout),), out=norm)


def layer(norm: AnyNorm | None, *nodes: AnyFunction, dropout: float = 0.0, post: AnyNorm | None = None) -> spec.Layer:
    """Return a pre-norm layer of sequential residual steps, one for each node, such as attention and feed-forward."""
    return spec.Layer(steps=tuple(pre(norm, node, dropout, post) for node in nodes))


def parallel(norm: AnyNorm, *nodes: AnyFunction, dropout: float = 0.0, is_shared: bool = True) -> spec.Layer:
    """Return a pre-norm layer whose nodes run in parallel, with one norm for all nodes or one for each node."""
    branch_norm, shared_norm = (None, norm) if is_shared else (norm, None)
    branches = tuple(spec.Branch(function=node, pre=branch_norm, dropout=dropout) for node in nodes)
    return spec.Layer(steps=(spec.Step(branches=branches, pre=shared_norm),))


def biases(has: bool) -> spec.Biases:
    """Return the biases of attention: a bias in every projection, or no bias."""
    return spec.Biases(query=has, key=has, value=has, out=has)


def attention(width: int, heads: int, **fields: Unpack[AttentionFields]) -> spec.Attention:
    """Return attention with one key head per query head; `fields` set other fields of `spec.Attention`."""
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": heads, "head_size": width // heads}
    return spec.Attention(**(sizes | dict(fields)))


def one_stack(
    side: Literal["encoder", "decoder"],
    hidden_size: int,
    vocab_size: int,
    layers: Sequence[spec.Layer],
    final_norm: AnyNorm | None = None,
    **fields: Unpack[EmbeddingFields],
) -> spec.Model:
    """Return the spec of an encoder or decoder alone, without a head; `fields` set fields of its embedding."""
    table: dict[str, Any] = {"table": spec.Table(rows=vocab_size)}
    embedding = spec.Embedding(**(table | dict(fields)))
    stack = spec.Stack(width=hidden_size, embedding=embedding, layers=tuple(layers), final_norm=final_norm)
    return spec.Model.model_validate({side: stack, "initialization": INITIALIZATION})


# --- heads ----------------------------------------------------------------------------------------------------


def no_head(values: Values) -> None:
    """Return None as the head, for a class whose outputs are hidden states."""
    return None


def lm_head(
    table: str, size: str = "vocab_size", *, bias: bool = False, scale: Callable[[Values], float] | None = None
) -> MakeHead:
    """Return a function that makes an LM head: one linear layer, with a soft cap if the config has one."""

    def head(values: Values) -> spec.Head:
        weight = spec.Reference(path=table) if values["tie_word_embeddings"] else None
        factor, cap = scale(values) if scale else 1.0, values.get("final_logit_softcapping")
        linear = spec.Linear(size=values[size], bias=bias, weight=weight, scale=factor)
        return spec.Head(layers=(linear,) if cap is None else (linear, spec.SoftCap(value=cap)))

    return head


def pooling_head(by: Literal["first", "last"], *inner: spec.HeadLayer, bias: bool = True) -> MakeHead:
    """Return a function that makes a head for text classification: a pool, `inner` layers and one linear layer."""

    def head(values: Values) -> spec.Head:
        return spec.Head(layers=(spec.Pool(by=by), *inner, spec.Linear(size=values.num_labels, bias=bias)))

    return head


def mlp_head(by: Literal["first", "last"], width: str, activation: str) -> MakeHead:
    """Return a function that makes a classification head: a pool, and two linear layers with an activation between.

    `width` is the config key with the width of the first layer.
    """

    def head(values: Values) -> spec.Head:
        inner = spec.Activation.model_validate({"function": activation})
        return pooling_head(by, spec.Linear(size=values[width]), inner)(values)

    return head


def token_head(values: Values) -> spec.Head:
    """Return the head with scores of labels for every token."""
    return spec.Head(layers=(spec.Linear(size=values.num_labels),))


def span_head(values: Values) -> spec.Head:
    """Return the head with two scores for every token: as the start and as the end of an answer."""
    return spec.Head(layers=(spec.Linear(size=2),))


# --- classes --------------------------------------------------------------------------------------------------


def base_model(name: str, *, unused: tuple[str, ...] = ()) -> Variant:
    """Return the record of a class without a head, such as BertModel; its tensor names have no prefix."""
    return Variant((name,), "embed", no_head, is_bare=True, unused=unused)


def mask_filling(
    classes: tuple[str, ...],
    head: MakeHead,
    prefix: str,
    *,
    dense: str = "dense",
    norm: str = "LayerNorm",
    unused: tuple[str, ...] = (),
) -> Variant:
    """Return the record of a class for masked language modelling, such as BertForMaskedLM.

    The head has a linear layer, an activation and a norm before the output layer."""
    rules = (
        module_rule(f"{prefix}.{dense}", "head.layers.0"),
        module_rule(f"{prefix}.{norm}", "head.layers.2"),
        tensor_rule(f"{prefix}.decoder.weight", "head.layers.3.weight"),
        tensor_rule((f"{prefix}.bias", f"{prefix}.decoder.bias"), "head.layers.3.bias"),
    )
    return Variant(classes, "fill", head, rules, output=f"{prefix}.decoder.weight", unused=unused)


def sequence_classification(
    name: str,
    head: MakeHead,
    dense: str = "classifier.dense",
    output: str = "classifier.out_proj",
    *,
    unused: tuple[str, ...] = (),
    prefix: str | None = None,
    repeats: Repeats | None = None,
) -> Variant:
    """Return the record of a class such as RobertaForSequenceClassification: two linear layers on a pooled state."""
    rules = (module_rule(dense, "head.layers.1"), module_rule(output, "head.layers.3"))
    classes = (f"{name}ForSequenceClassification",)
    return Variant(classes, "classify", head, rules, unused=unused, prefix=prefix, repeats=repeats)


def seq2seq_classification(name: str, repeats: Repeats, prefix: str | None = None) -> Variant:
    """Return the record of a class such as BartForSequenceClassification.

    The decoder reads the source text again, and its last state is classified."""
    names = ("classification_head.dense", "classification_head.out_proj")
    return sequence_classification(name, mlp_head("last", "d_model", "tanh"), *names, prefix=prefix, repeats=repeats)


def token_classification(
    name: str,
    *,
    output: str = "classifier",
    prefix: str | None = None,
    unused: tuple[str, ...] = (),
    has_decoder: bool = True,
) -> Variant:
    """Return the record of a class that labels every token, such as BertForTokenClassification."""
    rules = (module_rule(output, "head.layers.0"),)
    classes = (f"{name}ForTokenClassification",)
    return Variant(classes, "tag", token_head, rules, prefix=prefix, unused=unused, has_decoder=has_decoder)


def question_answering(
    name: str, *, prefix: str | None = None, unused: tuple[str, ...] = (), repeats: Repeats | None = None
) -> Variant:
    """Return the record of a class for extractive question answering, such as BertForQuestionAnswering."""
    rules = (module_rule("qa_outputs", "head.layers.0"),)
    classes = (f"{name}ForQuestionAnswering",)
    return Variant(classes, "answer", span_head, rules, prefix=prefix, unused=unused, repeats=repeats)


def token_tasks(name: str, unused: tuple[str, ...] = ()) -> tuple[Variant, ...]:
    """Return the variants of an encoder: ForTokenClassification, ForQuestionAnswering and the model without a head."""
    return (
        token_classification(name, unused=unused),
        question_answering(name, unused=unused),
        base_model(f"{name}Model", unused=unused),
    )


def decoder_variants(
    name: str,
    *tasks: DecoderTask,
    causal_lm: str = "ForCausalLM",
    head: MakeHead | None = None,
    bias: bool = False,
    output: str = "lm_head",
    tag_output: str = "classifier",
    answer_prefix: str | None = None,
) -> tuple[Variant, ...]:
    """Return the records of a decoder's classes, such as BloomForCausalLM and BloomForSequenceClassification.

    Args:
        name: the start of the class names, such as "Bloom".
        tasks: the tasks whose classes are returned. No task means all five tasks.
        causal_lm: the end of the name of the class that generates text.
        head: the function that makes the LM head. None means one linear layer.
        bias: True if the LM head of one linear layer has a bias.
        output, tag_output: the names of the layers that score the vocabulary and the labels of tokens.
        answer_prefix: the prefix of tensors in the class for question answering. None means the family's prefix.
    """
    vocabulary = head or lm_head("decoder.embedding.table", bias=bias)
    lm_rules = (module_rule(output, "head.layers.0"),)
    score_rules = (module_rule("score", "head.layers.1"),)
    labels = pooling_head("last", bias=False)
    every = {
        "generate": Variant((f"{name}{causal_lm}",), "generate", vocabulary, lm_rules, output=f"{output}.weight"),
        "classify": Variant((f"{name}ForSequenceClassification",), "classify", labels, score_rules),
        "tag": token_classification(name, output=tag_output),
        "answer": question_answering(name, prefix=answer_prefix),
        "embed": base_model(f"{name}Model"),
    }
    return tuple(every[task] for task in tasks or every)
