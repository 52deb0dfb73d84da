"""Weights of a hand-written attention: their roles, derived from names and shapes or given by the user.

Every projection becomes a weight [out, in] and a bias. If names and shapes are ambiguous, all assignments are returned.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.apps.check.handwritten.report import CannotCompare
from clearhead.base.errors import InputError

Role = str
ROLES = ("query", "key", "value", "out")
_LETTERS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_FUSED = re.compile(r"qkv|kqv|in_proj(?!ection)|c_attn|query_?key_?value")
_FUSED_PAIR = re.compile(r"(^|_)(w_?|to_?)?(kv|key_?value)")
_OUT = re.compile(r"proj|unify|dense|fc|linear")
_AROUND = r"(?:w|to|lin|linear|proj|b|mat)?"
_TOKEN = re.compile(
    rf"^{_AROUND}(q|k|v|o|query|queries|key|keys|value|values|out|output)(?:s|w|proj|lin|linear|layer|net|weights?|heads?|fc|b)?$"
)


@dataclass(frozen=True)
class LinearMap:
    """Linear map, such as a projection: weight [out, in] and bias [out]; None means no bias."""

    weight: Tensor
    bias: Tensor | None = None


LinearMaps = Mapping[Role, LinearMap]


def role_of(name: str) -> Role | None:
    """Return the role of a weight by its name: qkv, kv, query, key, value or out; None if the name shows none."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if _FUSED.search(name):
        return "qkv"
    if _FUSED_PAIR.search(name):
        return "kv"
    for token in re.split(r"[^a-z]+", name):
        if match := _TOKEN.match(token):
            return _LETTERS[match[1][0]]
    return None


@dataclass
class _Leaf:
    """One weight of a module with its bias. If heads have separate weights, a role such as query has one per head."""

    name: str
    weight: Tensor
    bias: Tensor | None
    is_linear: bool


def _leaves(candidate: nn.Module) -> list[_Leaf]:
    """Return the weights with at least two axes and their biases, in the order of registration."""
    leaves, taken = [], set()
    for path, module in candidate.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        weight = parameters.get("weight")
        if weight is not None and weight.dim() == 2:
            leaves.append(_Leaf(path or "weight", weight, parameters.get("bias"), isinstance(module, nn.Linear)))
            continue
        for name, tensor in parameters.items():
            if tensor.dim() >= 2 and id(tensor) not in taken and not re.match(r"b(ias)?_|bias", name, re.IGNORECASE):
                bias = _find_bias(name, parameters)
                taken |= {id(tensor), id(bias)}
                leaves.append(_Leaf(f"{path}.{name}".strip("."), tensor, bias, False))
    return leaves


def _find_bias(name: str, parameters: Mapping[str, Tensor]) -> Tensor | None:
    names = (name.replace("weight", "bias"), re.sub(r"^[wW]", "b", name), f"{name}_bias", re.sub(r"^W", "B", name))
    return next((parameters[bias_name] for bias_name in names if bias_name != name and bias_name in parameters), None)


@dataclass(frozen=True)
class WeightAssignment:
    """Possible assignment of an attention's weights to the roles query, key, value and out.

    Args:
        projections: linear maps by role: query, key, value, and out if there is an output projection.
        note: description of the assignment, for the report.
        extra: names of weights that an attention does not have.
    """

    projections: LinearMaps
    note: str
    extra: tuple[str, ...] = ()


def read_weights(candidate: nn.Module, width: int, heads: int) -> list[WeightAssignment]:
    """Return the possible assignments of an attention's weights to query, key, value and out, the most likely first.

    Raises:
        CannotCompare: the weights are not those of an attention, or their roles are not clear.
    """
    leaves = _leaves(candidate)
    if not leaves:
        raise CannotCompare("it has no weights; pass them as parameters={'query': ..., ...}")
    groups: dict[Role, list[_Leaf]] = {}
    nameless = []
    for leaf in leaves:
        role = role_of(leaf.name)
        if role in (None, "out"):
            nameless.append(leaf)
        else:
            groups.setdefault(role, []).append(leaf)
    if not groups and len(nameless) in (3, 4):
        return _permute_roles(nameless, width, heads)
    if not groups and len(nameless) == 2:
        wide = [leaf for leaf in nameless if 3 * width in leaf.weight.shape]
        groups |= {"qkv": wide} if wide else {}
        for leaf in wide:
            nameless.remove(leaf)
    _refuse_missing(groups, leaves)
    fits = [leaf for leaf in nameless if _is_out(leaf, width)]
    if len(fits) > 1:
        fits = [leaf for leaf in fits if role_of(leaf.name) == "out" or _OUT.search(leaf.name)][-1:]
    if fits:
        groups["out"] = fits
    extra = _extra_weights(candidate, leaves, [leaf for leaf in nameless if leaf not in fits])
    return _assign_groups(groups, extra, width, heads)


def _extra_weights(candidate: nn.Module, leaves: Sequence[_Leaf], unused: Sequence[_Leaf]) -> list[str]:
    """Return the names of weights that an attention does not have, such as those of a norm."""
    known = {id(tensor) for leaf in leaves for tensor in (leaf.weight, leaf.bias)}
    return [
        *(leaf.name for leaf in unused),
        *(name for name, parameter in candidate.named_parameters() if id(parameter) not in known),
    ]


def _permute_roles(leaves: Sequence[_Leaf], width: int, heads: int) -> list[WeightAssignment]:
    """Return all assignments of three nameless weights to query, key and value; a fourth is the output projection."""
    assignments = []
    for order in itertools.permutations(("query", "key", "value")):
        groups = {role: [leaf] for role, leaf in zip((*order, "out"), leaves, strict=False)}
        assignments += _assign_groups(groups, [], width, heads)
    return assignments


def _refuse_missing(groups: Mapping[Role, list[_Leaf]], leaves: Sequence[_Leaf]) -> None:
    needed: tuple[Role, ...] = ("query", "key", "value")
    if "kv" in groups:
        needed = ("query",)
    missing = [role for role in needed if role not in groups and "qkv" not in groups]
    if missing:
        names = ", ".join(leaf.name for leaf in leaves[:6])
        raise CannotCompare(
            f"it is not clear which weights make {' and '.join(missing)}: the names are {names}; "
            "pass parameters={'query': my.q, 'key': my.k, 'value': my.v, 'out': my.o}"
        )


def _is_out(leaf: _Leaf, width: int) -> bool:
    shape = leaf.weight.shape
    return width in (shape[0], shape[-1]) and (leaf.weight.dim() < 3 or shape[-1] == width)


def assign_weights(parameters: Mapping[str, Any], width: int, heads: int) -> list[WeightAssignment]:
    """Return the possible assignments of weights that the user passed by role, such as query=layer.

    Args:
        parameters: modules with weight and bias, tensors, or lists with one entry per head, by role: query, key, value
            and out, or qkv. Bias tensors have the role with _bias as name.
        width, heads: number of features and of heads of the attention.

    Raises:
        InputError: a name is not known, query or qkv is missing, or a value has no weight of at least two axes.
    """
    known = {*ROLES, "qkv", "kv", *(f"{role}_bias" for role in (*ROLES, "qkv", "kv"))}
    groups: dict[Role, list[_Leaf]] = {}
    for name, value in parameters.items():
        if name not in known:
            raise InputError(f"parameters: '{name}' is not known; expected query, key, value and out, or qkv and out")
        if name.endswith("_bias"):
            continue
        items = list(value) if isinstance(value, nn.ModuleList | list | tuple) else [value]
        for item in items:
            weight = item if isinstance(item, Tensor) else getattr(item, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() < 2:
                raise InputError(f"parameters: '{name}' must be a linear layer or a tensor of at least two axes")
            bias = parameters.get(f"{name}_bias") if isinstance(item, Tensor) else getattr(item, "bias", None)
            groups.setdefault(name, []).append(_Leaf(name, weight, bias, isinstance(item, nn.Linear)))
    if "qkv" not in groups and not {"query"} <= set(groups) & set(ROLES):
        raise InputError("parameters: expected query, key, value and out, or qkv and out")
    return _assign_groups(groups, [], width, heads)


def _assign_groups(
    groups: Mapping[Role, list[_Leaf]], extra: Sequence[str], width: int, heads: int
) -> list[WeightAssignment]:
    """Return the assignments of weights by role; tensors may be transposed, and fused weights have any order."""
    every = [leaf for leaves in groups.values() for leaf in leaves]
    assignments = []
    is_raw = not all(leaf.is_linear for leaf in every)
    for is_flipped in (True, False)[not is_raw :]:
        flat = _flatten_groups(groups, width, is_flipped)
        if len(flat) == len(groups):
            for projections, note in _unfuse(flat, heads):
                assignments.append(WeightAssignment(projections, note, tuple(extra)))
    unique = [assignment for assignment in assignments if _fits(assignment.projections, width, heads)]
    shown = ", ".join(f"{leaf.name} {list(leaf.weight.shape)}" for leaf in every)
    if not unique:
        raise CannotCompare(f"the shapes of its weights do not fit width {width} and {heads} heads: {shown}")
    return unique


def _flatten_groups(groups: Mapping[Role, list[_Leaf]], width: int, is_flipped: bool) -> dict[Role, LinearMap]:
    """Return one projection [out, in] per role; roles whose weights do not fit this direction are left out."""
    flat: dict[Role, LinearMap] = {}
    for role, leaves in groups.items():
        parts = [_matrix(leaf, role, width, is_flipped and not leaf.is_linear) for leaf in leaves]
        matrices = [matrix for matrix in parts if matrix is not None]
        # Other tensors with such names, such as extra keys that a module appends, are no projections.
        if len(matrices) == len(leaves) and len({matrix.weight.shape for matrix in matrices}) == 1:
            flat[role] = _join_heads(matrices, role, width)
    return flat


def _matrix(leaf: _Leaf, role: Role, width: int, is_flipped: bool) -> LinearMap | None:
    """Return a weight as a matrix [out, in], transposed if `is_flipped`; None if it has too many axes."""
    weight, bias = leaf.weight.detach(), None if leaf.bias is None else leaf.bias.detach().flatten()
    if weight.dim() == 3:
        if role == "out":
            weight = weight.flatten(0, 1).T if weight.shape[2] == width else weight.flatten(1)
        elif weight.shape[1] == width and is_flipped:
            weight = weight.transpose(1, 2).flatten(0, 1)
        elif weight.shape[0] == width:
            weight = weight.flatten(1).T
        else:
            weight = weight.flatten(0, 1)
    elif is_flipped:
        weight = weight.T
    return None if weight.dim() != 2 else LinearMap(weight, bias)


def _join_heads(parts: Sequence[LinearMap], role: Role, width: int) -> LinearMap:
    """Concatenate the projections of single heads into one projection."""
    if len(parts) == 1:
        return parts[0]
    axis = 1 if role == "out" and parts[0].weight.shape[0] == width else 0
    biases = [projection.bias for projection in parts if projection.bias is not None]
    return LinearMap(
        torch.cat([projection.weight for projection in parts], axis), torch.cat(biases) if biases else None
    )


def _unfuse(flat: Mapping[Role, LinearMap], heads: int) -> Iterator[tuple[dict[Role, LinearMap], str]]:
    if "kv" in flat:
        for order in (("key", "value"), ("value", "key")):
            pair = _parts(flat["kv"], 2, 1)
            rest = {role: projection for role, projection in flat.items() if role != "kv"}
            yield {**rest, **dict(zip(order, pair, strict=True))}, f"one weight of {' and '.join(order)}"
        return
    if "qkv" not in flat:
        yield dict(flat), "weights found by their names"
        return
    rest = {role: projection for role, projection in flat.items() if role != "qkv"}
    if flat["qkv"].weight.shape[0] % (3 * heads):
        return
    rows = flat["qkv"].weight.shape[0] // 3
    sizes = {"[q|k|v]": 1, "[q|k|v] within each head": heads, "[q, k, v] of each feature": rows}
    for roles in itertools.permutations(("query", "key", "value")):
        for note, groups in sizes.items():
            parts = _parts(flat["qkv"], 3, groups)
            letters = {ord(letter): role[0] for letter, role in zip("qkv", roles, strict=True)}
            shown = note.translate(letters) if groups == 1 else note
            yield {**rest, **dict(zip(roles, parts, strict=True))}, f"one weight {shown}"


def _parts(fused: LinearMap, count: int, groups: int) -> list[LinearMap]:
    """Split a fused projection, such as qkv, into `count` projections; its rows are [groups][count][rest]."""

    def split(tensor: Tensor | None) -> list[Tensor | None]:
        if tensor is None:
            return [None] * count
        return [tensor.unflatten(0, (groups, count, -1))[:, i].flatten(0, 1) for i in range(count)]

    weights, biases = split(fused.weight), split(fused.bias)
    return [LinearMap(weight, bias) for weight, bias in zip(weights, biases, strict=True) if weight is not None]


def _fits(projections: LinearMaps, width: int, heads: int) -> bool:
    if not {"query", "key", "value"} <= set(projections):
        return False
    query, key, value = (projections[role].weight for role in ("query", "key", "value"))
    size, rest = divmod(query.shape[0], heads)
    if rest or query.shape[1] != width or key.shape[0] != value.shape[0] or key.shape[0] % max(size, 1):
        return False
    groups = key.shape[0] // size
    if not groups or heads % groups:
        return False
    return "out" not in projections or projections["out"].weight.shape[1] == query.shape[0]
