"""What records share: addresses, steps of the usual kinds, words for activations, heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from clearhead import spec
from clearhead.hf.mapping.family import Address, Fixed, Key, Values, Variant
from clearhead.hf.mapping.tensor_rules import module_rule
from clearhead.task import Repeats

AnyNorm = spec.LayerNorm | spec.RMSNorm
AnyFunction = spec.Attention | spec.FeedForward | spec.MixtureOfExperts

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

# How fresh weights of checkpoint families are drawn
INITIALIZATION = spec.Normal(scale_branches=False)


def branch(stack: str, step: int, index: int = 0) -> str:
    """The address of a branch in every layer of a stack."""
    return f"{stack}.layers.{{layer}}.steps.{step}.branches.{index}"


def function(stack: str, step: int, index: int = 0) -> str:
    """The address of the function of a branch in every layer of a stack."""
    return f"{branch(stack, step, index)}.function"


def out(stack: str, step: int) -> str:
    """The address of the norm that ends a step in every layer of a stack."""
    return f"{stack}.layers.{{layer}}.steps.{step}.out"


def count_layers(stack: str) -> Address:
    """How many layers a stack has."""
    return lambda model: len(getattr(model, stack).depths)


def is_tied(model: spec.Model) -> bool | None:
    """Whether the map that ends a head is a table; None where there is no such map, or it is of whole sequences."""
    layers = model.head.layers if model.head else ()
    maps = [one for one in layers if isinstance(one, spec.Linear)]
    if not maps or any(isinstance(one, spec.Pool) for one in layers):
        return None
    return maps[-1].weight is not None


def tying(default: bool) -> Key:
    """The key that says whether the head uses the word table; where a file is read, its tensors decide."""
    return Key("tie_word_embeddings", default, is_tied)


def defaults(keys: Sequence[Key], values: Mapping[str, Any]) -> tuple[Key, ...]:
    """The same keys with the defaults of another class."""
    by_name = {key.name: key for key in keys}
    for name, default in values.items():
        by_name[name] = replace(by_name[name], default=default, is_nullable=by_name[name].default is None)
    return tuple(by_name.values())


def pre(norm: AnyNorm | None, what: AnyFunction, dropout: float = 0.0, post: AnyNorm | None = None) -> spec.Step:
    """A step of one branch that norms what the branch reads."""
    return spec.Step(branches=(spec.Branch(function=what, pre=norm, post=post, dropout=dropout),))


def after(norm: AnyNorm, what: AnyFunction, dropout: float = 0.0) -> spec.Step:
    """A step of one branch that norms the stream after the sum."""
    return spec.Step(branches=(spec.Branch(function=what, dropout=dropout),), out=norm)


def biases(has: bool) -> spec.Biases:
    """A bias in every projection of attention, or in none."""
    return spec.Biases(query=has, key=has, value=has, out=has)


# --- heads ----------------------------------------------------------------------------------------------------


def nothing(values: Values) -> None:
    """No head: the states are what is given."""
    return None


def words(
    table: str, size: str = "vocab_size", *, bias: bool = False, scale: Callable[[Values], float] | None = None
) -> Callable[[Values], spec.Head]:
    """Scores of the vocabulary by one map."""

    def head(values: Values) -> spec.Head:
        weight = spec.Reference(path=table) if values["tie_word_embeddings"] else None
        factor = scale(values) if scale else 1.0
        return spec.Head(layers=(spec.Linear(size=values[size], bias=bias, weight=weight, scale=factor),))

    return head


def pooled(
    by: Literal["first", "mean", "last"], *inner: spec.HeadLayer, bias: bool = True
) -> Callable[[Values], spec.Head]:
    """Scores of labels for a sequence."""

    def head(values: Values) -> spec.Head:
        return spec.Head(layers=(spec.Pool(by=by), *inner, spec.Linear(size=values.num_labels, bias=bias)))

    return head


def each_token(values: Values) -> spec.Head:
    """Scores of labels for every token."""
    return spec.Head(layers=(spec.Linear(size=values.num_labels),))


def bounds(values: Values) -> spec.Head:
    """Two scores for every token: as the first of an answer, and as its last."""
    return spec.Head(layers=(spec.Linear(size=2),))


CAUSAL = Fixed("is_causal", (True,), "tokens would see what is after them")
"""What every decoder refuses."""


def writing(
    name: str,
    head: Callable[[Values], spec.Head] | None = None,
    *,
    bias: bool = False,
    output: str = "lm_head",
) -> Variant:
    """The class of a decoder that writes, as most families have it.

    Args:
        name: of the class.
        head: over the vocabulary; None: one map.
        bias: of that map.
        output: what the map is called.
    """
    made = head or words("decoder.embedding.table", bias=bias)
    return Variant((name,), "generate", made, (module_rule(output, "head.layers.0"),), output=f"{output}.weight")


def classifying(name: str) -> Variant:
    """The class of a decoder whose last state says the label of a text, as most families have it."""
    return Variant((name,), "classify", pooled("last", bias=False), (module_rule("score", "head.layers.1"),))


def tagging(
    name: str,
    *,
    by: str = "classifier",
    prefix: str | None = None,
    spare: tuple[str, ...] = (),
    has_decoder: bool = True,
) -> Variant:
    """The class that labels every token, as most families have it.

    Args:
        name: of the class.
        by: what its map is called.
        prefix, spare, has_decoder: as in `Variant`.
    """
    rules = (module_rule(by, "head.layers.0"),)
    return Variant((name,), "tag", each_token, rules, prefix=prefix, spare=spare, has_decoder=has_decoder)


def bare(name: str, *, spare: tuple[str, ...] = ()) -> Variant:
    """The class without a head, whose tensors have no prefix."""
    return Variant((name,), "embed", nothing, is_bare=True, spare=spare)


def answering(
    name: str, *, prefix: str | None = None, spare: tuple[str, ...] = (), repeats: Repeats | None = None
) -> Variant:
    """The class that finds answers in a text, as most families have it.

    Args:
        name: of the class.
        prefix, spare, repeats: as in `Variant`.
    """
    rules = (module_rule("qa_outputs", "head.layers.0"),)
    return Variant((name,), "answer", bounds, rules, prefix=prefix, spare=spare, repeats=repeats)
