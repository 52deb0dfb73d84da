"""Registry of families: all records of the modules in `families/`."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from clearhead.base.errors import InputError, did_you_mean
from clearhead.checkpoints.hf import families
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Variant

# Families that most libraries read; saving tries them first.
_FIRST = ("llama", "gpt2", "bert", "modernbert", "marian", "bart", "t5")


@cache
def all_families() -> Mapping[str, Family]:
    """Return all families by model type."""
    by_type: dict[str, Family] = {}
    for info in pkgutil.iter_modules(families.__path__):
        for family in importlib.import_module(f"{families.__name__}.{info.name}").FAMILIES:
            assert family.model_type not in by_type, f"two families for {family.model_type}"
            by_type[family.model_type] = family
    return by_type


def list_export_families() -> list[Family]:
    """Return all families in the order in which saving tries them: first those that most libraries read."""
    known = all_families()
    return [known[name] for name in dict.fromkeys((*_FIRST, *known))]


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family that `model_type` in config.json names.

    Raises:
        InputError: the config has no model type, or its model type is not known.
    """
    model_type = config.get("model_type")
    known = all_families()
    if not isinstance(model_type, str):
        raise InputError("config.json has no model_type: add the one of the model's family, such as llama")
    if model_type not in known:
        raise InputError(
            f"config.json: model_type '{model_type}' is not known{did_you_mean(model_type, known)}; "
            f"known are {', '.join(sorted(known))}"
        )
    return known[model_type]


def choose_variant(family: Family, config: Mapping[str, Any], names: frozenset[str]) -> Variant:
    """Return the variant that a config names, or else the first whose head tensors are all in the file.

    A class with two forms has two variants, and its tensors decide between them.

    Raises:
        InputError: the class is not supported.
    """
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(item, str) for item in classes):
        raise InputError("config.json: architectures must be a list of class names")
    by_class: dict[str, list[Variant]] = {}
    for candidate in family.variants:
        for name in candidate.classes:
            by_class.setdefault(name, []).append(candidate)
    if classes:
        if classes[0] not in by_class:
            hint = did_you_mean(classes[0], by_class)
            raise InputError(
                f"config.json: the class '{classes[0]}' of {family.model_type} is not supported{hint}; "
                f"supported are {', '.join(by_class)}"
            )
        forms = by_class[classes[0]]
        return next((candidate for candidate in forms if _is_held(candidate, names)), forms[0])
    for candidate in family.variants:
        if _is_held(candidate, names):
            return candidate
    return next(
        (
            candidate
            for candidate in family.variants
            if candidate.is_bare and family.prefix and not _has_prefix(family, names)
        ),
        family.variants[0],
    )


def headless_variant(family: Family) -> Variant:
    """Return the class without a head, if possible that of the encoder alone; it ignores tensors of heads.

    Raises:
        InputError: the family has no such class.
    """
    bare_variants = [candidate for candidate in family.variants if candidate.head is blocks.no_head]
    if not bare_variants:
        raise InputError(f"config.json: {family.model_type} has no class without a head, which pooling needs")
    chosen = next((candidate for candidate in bare_variants if not candidate.has_decoder), bare_variants[0])
    heads = (
        rf"{re.escape(name)}(\..+)?"
        for candidate in family.variants
        for rule in candidate.rules
        for name in rule.theirs
    )
    return replace(chosen, unused=(*chosen.unused, *heads))


def _is_held(variant: Variant, names: frozenset[str]) -> bool:
    """Return whether a file has all tensors that the head of a variant needs."""
    needed = [rule.theirs for rule in variant.rules if rule.theirs[0] != variant.output and not rule.zeros]
    return bool(needed) and all(
        any(stored == name or stored.startswith(f"{name}.") for name in theirs for stored in names) for theirs in needed
    )


def _has_prefix(family: Family, names: frozenset[str]) -> bool:
    return any(name.startswith(family.prefix) for name in names)
