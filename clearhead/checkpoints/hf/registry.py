"""The registry of families: every one in `families/`, found by walking that package."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from clearhead.base.errors import InputError, nearest
from clearhead.checkpoints.hf import families
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Variant

# The families that most libraries read are tried first when a model is saved.
_FIRST = ("llama", "gpt2", "bert", "modernbert", "marian", "bart", "t5")


@cache
def all_families() -> Mapping[str, Family]:
    """Every family by its model type."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(families.__path__):
        for family in importlib.import_module(f"{families.__name__}.{info.name}").FAMILIES:
            assert family.model_type not in found, f"two families for {family.model_type}"
            found[family.model_type] = family
    return found


def saved_first() -> list[Family]:
    """Return every family, those that most libraries read before the others."""
    known = all_families()
    return [known[name] for name in dict.fromkeys((*_FIRST, *known))]


def find(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.

    Raises:
        InputError: the config has no model type, or one that is not known; the nearest known ones are named.
    """
    model_type = config.get("model_type")
    known = all_families()
    if not isinstance(model_type, str):
        raise InputError("config.json has no model_type")
    if model_type not in known:
        raise InputError(
            f"config.json: model_type '{model_type}' is not known{nearest(model_type, known)}; "
            f"known are {', '.join(sorted(known))}"
        )
    return known[model_type]


def variant(family: Family, config: Mapping[str, Any], names: frozenset[str]) -> Variant:
    """Return the variant that a config names; where it names none, the first whose own tensors are all in the file.

    A class of two forms is two variants, which are told apart by their tensors.

    Raises:
        InputError: the class is not supported.
    """
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        raise InputError("config.json: architectures must be a list of class names")
    by_class: dict[str, list[Variant]] = {}
    for one in family.variants:
        for name in one.classes:
            by_class.setdefault(name, []).append(one)
    if classes:
        if classes[0] not in by_class:
            hint = nearest(classes[0], by_class)
            raise InputError(
                f"config.json: the class '{classes[0]}' of {family.model_type} is not supported{hint}; "
                f"supported are {', '.join(by_class)}"
            )
        forms = by_class[classes[0]]
        return next((one for one in forms if _is_held(one, names)), forms[0])
    for one in family.variants:
        if _is_held(one, names):
            return one
    return next(
        (one for one in family.variants if one.is_bare and family.prefix and not _prefixed(family, names)),
        family.variants[0],
    )


def headless(family: Family) -> Variant:
    """Return the class without a head, of the encoder alone where there is one; other heads are unused in it.

    Raises:
        InputError: the family has no such class.
    """
    own = [one for one in family.variants if one.head is blocks.no_head]
    if not own:
        raise InputError(f"config.json: {family.model_type} has no class without a head")
    chosen = next((one for one in own if not one.has_decoder), own[0])
    heads = (rf"{re.escape(name)}(\..+)?" for one in family.variants for rule in one.rules for name in rule.theirs)
    return replace(chosen, unused=(*chosen.unused, *heads))


def _is_held(variant: Variant, names: frozenset[str]) -> bool:
    """Whether a file has a tensor for every rule of a variant's head that it must have."""
    own = [rule.theirs for rule in variant.rules if rule.theirs[0] != variant.output and not rule.zeros]
    return bool(own) and all(
        any(have == name or have.startswith(f"{name}.") for name in theirs for have in names) for theirs in own
    )


def _prefixed(family: Family, names: frozenset[str]) -> bool:
    return any(name.startswith(family.prefix) for name in names)
