"""Each key of each family's config set to wrong types: a report that names it comes out, and nothing else."""

from __future__ import annotations

import os
import random
from functools import cache
from types import UnionType
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.mapping import config as configs
from clearhead.checkpoints.hf.mapping.family import Family, Key
from clearhead.core import build
from tests.parity.architectures.harness import Case, all_cases

TYPES = sorted(registry.all_families())
NESTED: tuple[Any, ...] = ([], {}, [[]], [None], {"a": {}}, ["a"], [-1], [[0, "a"]])
VALUES: tuple[Any, ...] = (None, True, -1, 0, 0.5, 1e300, 10**9, 10**39, "", "a", *NESTED)
# Inside of objects: what is no positive number.
NO_NUMBERS: tuple[Any, ...] = (True, -1, 0, "1", [], {}, [[1]])
ROTATION = ("rope_scaling", "rope_parameters")


@cache
def first_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for case in all_cases():
        cases.setdefault(case.model_type, case)
    return cases


def outcome(family: Family, config: dict[str, Any]) -> str:
    """Read a config as loading does, as far as an empty module; return the report, or nothing."""
    parsed = configs.parse(family, config)
    if parsed.faults:
        return "; ".join(parsed.faults)
    try:
        build(family.spec_of(parsed.values, family.variants[0]), device="meta")
    except (InputError, RuntimeError, ArithmeticError) as error:
        return f"refused: {error}"
    return ""


def is_of_kind(key: Key, value: Any) -> bool:
    """Whether a value has the type that a key says."""
    if value is None:
        return key.default is None or key.is_nullable
    kind = type(key.default) if key.kind is None else key.kind
    if isinstance(kind, UnionType):
        return isinstance(value, str | list)
    kind = get_origin(kind) or (dict if issubclass(kind, BaseModel) else kind)
    if kind is int and type(value) is int:
        return value >= 0 or (key.default is not None and key.default < 0)
    return type(value) in ((int, float) if kind is float else (kind,))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_value_of_another_type_is_refused_by_name_and_nothing_else_fails(model_type: str) -> None:
    family, case = registry.all_families()[model_type], first_cases()[model_type]
    honest = {"model_type": model_type, **case.config}
    assert outcome(family, honest) == ""
    for key in family.keys:
        # A few of them for each key; all with VALUES=99.
        few = random.Random(f"{model_type} {key.name}").sample(
            VALUES, min(len(VALUES), int(os.environ.get("VALUES", 5)))
        )
        for value in few:
            config = {name: honest[name] for name in honest if name not in key.aliases} | {key.name: value}
            report = outcome(family, config)
            assert is_of_kind(key, value) or key.name in report, (key.name, value, report)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_the_objects_of_rotary_positions_are_typed(kind: str) -> None:
    family, honest = registry.all_families()["llama"], {"model_type": "llama", **first_cases()["llama"].config}
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "attention_factor", "rope_theta")
    for name in (*numbers, "short_factor", "original_max_position_embeddings"):
        for value in NO_NUMBERS:
            for key in ROTATION:
                report = outcome(family, honest | {key: {"rope_type": kind, name: value}})
                assert name in report or (name == "short_factor" and value == []), (name, value, report)
