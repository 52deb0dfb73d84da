"""Search options: one report of all faults, and the limits that they set."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.generate.options import SearchOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_size", 0),
        ("n_best", 0),
        ("max_length", 0),
        ("min_length", -1),
        ("batch_size", 0),
        ("batch_tokens", 0),
        ("length_penalty", -10.1),
        ("length_penalty", math.nan),
        ("length_penalty", math.inf),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be .* got {value}"):
        SearchOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("beam_size", "5"), ("beam_size", 2.0), ("n_best", True), ("length_penalty", "1")]
)
def test_value_of_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    """The value is set after construction, which the type checker of the tests would refuse."""
    options = SearchOptions()
    object.__setattr__(options, name, value)
    with pytest.raises(InputError, match=f"^{name} must be .* got {value!r}"):
        options.__post_init__()


def test_all_faults_are_in_one_report() -> None:
    with pytest.raises(InputError) as caught:
        SearchOptions(beam_size=0, length_penalty=-11.0, min_length=-3)
    assert all(name in str(caught.value) for name in ("3 faults", "beam_size", "length_penalty", "min_length"))


def test_contradictions_are_all_named() -> None:
    with pytest.raises(InputError) as caught:
        SearchOptions(beam_size=3, n_best=5, max_length=7, min_length=11)
    assert all(name in str(caught.value) for name in ("2 faults", "n_best is 5", "min_length is 11"))


def test_default_limit_is_twice_the_source_plus_ten_within_the_positions() -> None:
    options = SearchOptions()
    assert options.target_limit(7, None) == 24
    assert options.target_limit(7, 13) == 13
    assert SearchOptions(max_length=5).target_limit(7, 13) == 5
    assert SearchOptions(min_length=31).target_limit(7, None) == 31
