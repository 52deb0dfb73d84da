"""Arguments of a hand-written module or function: their roles, such as query, by name and position."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.report import CannotCompare
from clearhead.apps.check.handwritten.weights import role_of

_HEADS = {"heads", "num_heads", "n_heads", "h", "n_head", "nhead", "num_attention_heads", "head_count"}
_WIDTH = {"width", "d_model", "dim", "embed_dim", "hidden_size", "n_embd", "d", "embed_size", "emb_dim", "model_dim"}
_MEMORY = re.compile(r"memory|^mem|context|enc|^kv|other|source|^src|cross|^y$")
_MASK = re.compile("mask|block|padding|^pad|keep|visible|allowed")
_LETTERS = {"q": "query", "k": "key", "v": "value", "query": "query", "key": "key", "value": "value",
            "queries": "query", "keys": "key", "values": "value"}  # fmt: skip
_INPUT_OF = re.compile(r"^(?:x_?)?(q|k|v|query|key|value|queries|keys|values)(?:_?(?:in|input|x|seq|states?))?$")

ADDED = ("additive",)
MASK_NAMES: Mapping[str, tuple[str, ...]] = {
    "attn_mask": ("attend", "block", "additive"), "key_padding_mask": ("block", "attend"),
    "attention_mask": ("attend", "ones", "additive"), "attn_bias": ADDED, "attention_bias": ADDED,
}  # fmt: skip
"""Meanings of masks by argument name, as in PyTorch and transformers."""


@dataclass(frozen=True)
class Argument:
    """Argument of a hand-written module or function, with its role.

    Args:
        name: name of the argument in the signature.
        role: query, key, value, memory, mask, heads, width, rotation, or a weight such as "weight query".
        is_required: True if the argument has no default.
    """

    name: str
    role: str
    is_required: bool


def function_of(candidate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that runs when the candidate is called: `forward` of a module, or the function itself."""
    return candidate.forward if isinstance(candidate, nn.Module) else candidate


def parameters_of(candidate: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters in the candidate's signature, without *args and **kwargs.

    Raises:
        CannotCompare: the signature cannot be read.
    """
    try:
        parameters = list(inspect.signature(function_of(candidate)).parameters.values())
    except (TypeError, ValueError):
        raise CannotCompare("its signature cannot be read") from None
    return [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def attention_arguments(candidate: Callable[..., Any]) -> list[Argument]:
    """Return the arguments of an attention with their roles, such as query or mask.

    Raises:
        CannotCompare: a required argument has no known role.
    """
    parameters = parameters_of(candidate)
    weights = (
        _weight_names([parameter.name for parameter in parameters]) if not isinstance(candidate, nn.Module) else {}
    )
    arguments: list[Argument] = []
    for parameter in parameters:
        required = parameter.default is parameter.empty
        role = weights.get(parameter.name) or _role(parameter.name, [argument.role for argument in arguments], required)
        if isinstance(parameter.default, bool | float):
            role = None  # a switch, such as need_weights or is_causal
        if role is None and required:
            raise CannotCompare(f"no known value fits its argument '{parameter.name}'; give it a default")
        if role is not None:
            arguments.append(Argument(parameter.name, role, required))
    roles = [entry.role for entry in arguments]
    if "query" not in roles:
        raise CannotCompare("it takes no argument that could be the input: name the input x or query")
    return arguments


def _weight_names(names: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a function that are weights or biases, as a dict of name and role ("weight query")."""
    roles = {}
    for name in names:
        role = role_of(name)
        if role is not None and not _INPUT_OF.match(name.lower()) and "mask" not in name.lower():
            is_bias = re.search(r"bias|^b_?[qkvo]|_b$", name.lower()) is not None
            roles[name] = f"{'bias' if is_bias else 'weight'} {role}"
    return roles if sum(kind.startswith("weight") for kind in roles.values()) >= 1 else {}


def _role(name: str, before: Sequence[str], required: bool) -> str | None:
    low = name.lower()
    inputs = [role for role in before if role in ("query", "key", "value", "memory")]
    if _MASK.search(low) or low in MASK_NAMES:
        return "mask"
    if low in _HEADS:
        return "heads"
    if low in _WIDTH and not (low == "d" and not before):
        return "width"
    if low == "position_embeddings":
        return "rotation"
    if low in ("need_weights", "return_weights", "training", "dropout", "p", "dropout_p"):
        return None
    if named := _INPUT_OF.match(low):
        return _LETTERS[named[1]]
    if not inputs:
        return "memory" if re.match(r"enc|memory", low) else "query"
    if _MEMORY.search(low) and (required or "memory" not in inputs):
        return "memory"
    if "memory" in inputs and "query" not in inputs:
        return "query"
    if not required:
        return None
    return {1: "memory", 2: "value"}.get(len(inputs)) if "memory" not in inputs or len(inputs) == 2 else None


@dataclass(frozen=True)
class CallInputs:
    """Inputs of one call of an attention. An absent mask is passed as None only to arguments without a default."""

    query: Tensor
    memory: Tensor | None = None
    mask: Tensor | None = None
    mask_name: str | None = None


def call_arguments(
    candidate: Callable[..., Any], arguments: Sequence[Argument], inputs: CallInputs, numbers: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments for calling an attention on the given inputs.

    Args:
        candidate: the module or function.
        arguments: arguments of the candidate with their roles.
        inputs: inputs of the call.
        numbers: number of heads, width, and weights by role.
    """
    source = inputs.query if inputs.memory is None else inputs.memory
    values: dict[str, Any] = {}
    for argument in arguments:
        if argument.role == "query":
            values[argument.name] = inputs.query
        elif argument.role in ("key", "value") or (
            argument.role == "memory" and (inputs.memory is not None or argument.is_required)
        ):
            values[argument.name] = source
        elif argument.role == "mask" and (argument.is_required or argument.name == inputs.mask_name):
            values[argument.name] = inputs.mask if argument.name == inputs.mask_name else None
        elif argument.role == "rotation":
            size = numbers["width"] // numbers["heads"]
            shape = (len(inputs.query), inputs.query.shape[1], size)
            values[argument.name] = (
                torch.ones(shape, dtype=inputs.query.dtype),
                torch.zeros(shape, dtype=inputs.query.dtype),
            )
        elif argument.role in numbers and (
            argument.is_required or argument.role not in ("heads", "width") or argument.role == "heads"
        ):
            values[argument.name] = numbers[argument.role]
    positional = [
        parameter.name
        for parameter in parameters_of(candidate)
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.name in values
    ]
    return [values.pop(name) for name in positional], values
