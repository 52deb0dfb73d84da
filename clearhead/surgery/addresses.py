"""Places in a spec: references that follow, stacks by name, and what is found by the pattern of an address."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from clearhead import spec
from clearhead.errors import InputError, nearest

Side = Literal["encoder", "decoder"]
AnyNode = TypeVar("AnyNode", bound=spec.Node)
Wanted = TypeVar("Wanted", bound=spec.Node)


def redirect_references(node: AnyNode, rename: Callable[[str], str], path: str = "") -> AnyNode:
    """Return a tree whose references name other paths."""

    def change(_: str, part: spec.Node) -> spec.Node:
        if isinstance(part, spec.Reference | spec.TableHeads):
            return part.model_copy(update={"path": rename(part.path)})
        return part

    return spec.map_nodes(node, change, path)


def stack_of(model: spec.Model, name: Side | None, *, what: str) -> tuple[Side, spec.Stack]:
    """Return the stack that is meant.

    Args:
        model: what has it.
        name: of the stack; None: the only one.
        what: what is to be done, for the message.

    Raises:
        InputError: there are two and none is named, or the model has none of that name.
    """
    found: dict[Side, spec.Stack] = {}
    if model.encoder is not None:
        found["encoder"] = model.encoder
    if model.decoder is not None:
        found["decoder"] = model.decoder
    if name is None:
        if len(found) > 1:
            raise InputError(f"the model has two stacks: say whose {what}, stack='encoder' or stack='decoder'")
        return next(iter(found.items()))
    if name not in found:
        raise InputError(f"the model has no stack '{name}'; it has {' and '.join(found)}")
    return name, found[name]


def with_stacks(model: spec.Model, stacks: Mapping[str, spec.Stack | None]) -> spec.Model:
    """Return the model with other stacks, by name."""
    return model.model_copy(update=dict(stacks))


def branch_functions(model: spec.Model, kind: type[Wanted]) -> dict[str, Wanted]:
    """Return the functions of branches that are of a kind, by address."""
    return {path: node for path, node in spec.walk(model) if path.endswith(".function") and isinstance(node, kind)}


def match_addresses(
    model: spec.Model, given: Mapping[str, Collection[int]], found: Mapping[str, spec.Node], what: str
) -> dict[str, set[int]]:
    """Return which numbers are meant at which address.

    Args:
        model: what the addresses are of.
        given: numbers by pattern: the address of such a function with * for any part of it, or one that holds one.
        found: the functions in question, by address.
        what: what such a function is, for messages.

    Raises:
        InputError: patterns that match nothing, or the place of several functions; every fault is named.
    """
    faults: list[str] = []
    numbers: dict[str, set[int]] = {}
    for pattern, wanted in given.items():
        direct = [address for address in found if fnmatchcase(address, pattern)]
        places: dict[str, list[str]] = {}
        for address in found:
            parts = address.split(".")
            for end in range(1, len(parts)):
                if fnmatchcase(".".join(parts[:end]), pattern) and end == pattern.count(".") + 1:
                    places.setdefault(".".join(parts[:end]), []).append(address)
        if not direct and not places:
            faults.append(_unmatched(model, pattern, found, what))
        for place, inside in places.items() if not direct else ():
            if len(inside) > 1:
                faults.append(f"{place} holds {len(inside)} of these: name one of {', '.join(inside)}")
        for address in direct or [inside[0] for inside in places.values()]:
            numbers.setdefault(address, set()).update(wanted)
    if faults:
        raise InputError.from_faults(faults)
    return numbers


def _unmatched(model: spec.Model, pattern: str, found: Mapping[str, spec.Node], what: str) -> str:
    """Say why a pattern matches nothing; where layers share weights, a depth is not an address."""
    depth = re.match(r"(encoder|decoder)\.layers\.(\d+)", pattern)
    if depth is not None:
        stack: spec.Stack | None = getattr(model, depth.group(1))
        number = int(depth.group(2))
        if stack is not None and stack.sharing is not None and len(stack.layers) <= number < len(stack.sharing):
            own = f"{depth.group(1)}.layers.{stack.sharing[number]}"
            return f"{pattern}: depth {number} runs {own}, which other depths run too; name that one to change all"
    return (
        f"{pattern}: no {what} is there{nearest(pattern, found)}; they are at addresses like {next(iter(found), '-')}"
    )


def check_numbers(address: str, wanted: Collection[int], count: int, what: str) -> list[str]:
    """List what is wrong with the numbers of parts that are to be removed."""
    wrong = sorted(number for number in wanted if not 0 <= number < count)
    if wrong:
        return [f"{address}: there is no {what} {wrong[0]}; the {count} are numbered from 0"]
    if len(set(wanted)) == count:
        return [f"{address}: all {count} {what}s would be removed; keep one, or leave out the layer with keep_layers"]
    return []
