"""Helpers for addresses in a spec: find stacks, token embeddings and branch functions, and update nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import Any, Literal, TypeVar

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.spec.addresses import nearest_address, select_addresses

Side = Literal["encoder", "decoder"]
AnyNode = TypeVar("AnyNode", bound=spec.Node)


def update_nodes(node: AnyNode, updates: Mapping[str, Mapping[str, Any]], path: str = "") -> AnyNode:
    """Return a copy of a spec node with new values for some fields; `updates` has them by node address."""

    def change(path: str, node: spec.Node) -> spec.Node:
        return node.model_copy(update=updates[path]) if path in updates else node

    return spec.map_nodes(node, change, path)


def redirect_references(node: AnyNode, rename: Callable[[str], str], path: str = "") -> AnyNode:
    """Return a copy of a spec in which references to shared modules have paths that `rename` returns."""

    def change(_: str, node: spec.Node) -> spec.Node:
        if isinstance(node, spec.Reference):
            return node.model_copy(update={"path": rename(node.path)})
        return node

    return spec.map_nodes(node, change, path)


def stack_of(model: spec.Model, name: Side | None, *, what: str) -> tuple[Side, spec.Stack]:
    """Return one stack of a model with its name.

    Args:
        model: the spec.
        name: the name of the stack. None means the only one.
        what: the plural noun for the edited thing, such as "layers", for messages.

    Raises:
        InputError: the name is missing with two stacks, or the model has no stack of this name.
    """
    stacks = model.stacks
    if name is None and len(stacks) > 1:
        raise InputError(f"the model has two stacks: choose whose {what} with stack='encoder' or stack='decoder'")
    side = next(iter(stacks)) if name is None else name
    if side not in stacks:
        raise InputError(f"the model has no stack '{side}'; it has {' and '.join(stacks)}")
    return side, stacks[side]


def word_table(model: spec.Model, side: str) -> tuple[str, spec.Table]:
    """Return the address and the spec node of the token embedding of a stack, which another stack may own."""
    table: spec.Table | spec.Reference = getattr(model, side).embedding.table
    path = table.path if isinstance(table, spec.Reference) else f"{side}.embedding.table"
    owner = dict(spec.walk(model))[path]
    assert isinstance(owner, spec.Table), "a validated reference leads to a table"
    return path, owner


def token_output(head: spec.Head | None) -> tuple[int, spec.Linear] | None:
    """Return index and spec node of the head layer that computes logits for every token; None if there is none."""
    layers = head.layers if head is not None else ()
    linears = [(index, layer) for index, layer in enumerate(layers) if isinstance(layer, spec.Linear)]
    return None if not linears or any(isinstance(layer, spec.Pool) for layer in layers) else linears[-1]


def branch_functions(model: spec.Model, kind: type[AnyNode]) -> dict[str, AnyNode]:
    """Return the nodes of one class that are functions of residual branches, such as attentions, by address."""
    return {path: node for path, node in spec.walk(model) if path.endswith(".function") and isinstance(node, kind)}


def match_addresses(
    model: spec.Model, numbers_by_pattern: Mapping[str, Collection[int]], candidates: Collection[str], what: str
) -> dict[str, set[int]]:
    """Return the numbers of heads or neurons for each address that a pattern matches.

    Args:
        model: the spec.
        numbers_by_pattern: the numbers of heads or neurons, by pattern. A pattern matches addresses of functions, or of
            nodes with one function.
        candidates: the addresses of the functions.
        what: the noun for such a function in messages, such as "attention".

    Raises:
        InputError: a pattern matches nothing, or a node has several functions; the message names every fault.
    """
    faults: list[str] = []
    numbers: dict[str, set[int]] = {}
    for pattern, wanted in numbers_by_pattern.items():
        matches = select_addresses(pattern, candidates)
        holders: dict[str, list[str]] = {}
        for address in () if matches else candidates:
            for holder in select_addresses(pattern, list(accumulate(address.split("."), "{}.{}".format)))[:1]:
                holders.setdefault(holder, []).append(address)
        if not matches and not holders:
            faults.append(_explain_unmatched(model, pattern, candidates, what))
        for holder, inside in holders.items():
            if len(inside) > 1:
                faults.append(f"{holder} has {len(inside)} of these: choose one of {', '.join(inside)}")
        for address in matches or [inside[0] for inside in holders.values()]:
            numbers.setdefault(address, set()).update(wanted)
    refuse(faults)
    return numbers


def _explain_unmatched(model: spec.Model, pattern: str, candidates: Collection[str], what: str) -> str:
    """Return the message for a pattern that matches no address, with the nearest address."""
    depth = re.match(r"(encoder|decoder)\.layers\.(\d+)", pattern)
    if depth is not None:
        stack: spec.Stack | None = getattr(model, depth.group(1))
        number = int(depth.group(2))
        if stack is not None and stack.sharing is not None and len(stack.layers) <= number < len(stack.sharing):
            shared_layer = f"{depth.group(1)}.layers.{stack.sharing[number]}"
            return (
                f"{pattern}: depth {number} runs {shared_layer}, which other depths run too: use this address "
                "to change all of them"
            )
    hint = nearest_address(pattern, candidates)
    return f"{pattern}: no {what} is there{hint}; they are at addresses like {next(iter(candidates), '-')}"


def check_numbers(address: str, wanted: Collection[int], count: int, what: str) -> list[str]:
    """Return the faults in the numbers of heads or neurons to remove, or an empty list."""
    wrong = sorted(number for number in wanted if not 0 <= number < count)
    if wrong:
        return [f"{address}: there is no {what} {wrong[0]}; the {count} are numbered from 0"]
    if len(set(wanted)) == count:
        return [f"{address}: all {count} {what}s would be removed: keep one, or remove the layer with keep_layers"]
    return []


def refuse(faults: Collection[str]) -> None:
    """Raise one `InputError` for all faults, if there are any."""
    if faults:
        raise InputError.from_faults(list(faults))
