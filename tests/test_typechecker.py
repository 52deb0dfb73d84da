"""The import hook of the tests refuses wrong types and shapes of arguments and results, in any kind of call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from jaxtyping import Float, TypeCheckError
from torch import Tensor, zeros

from clearhead.core.kernels.positions import rotate
from tests.typechecker import add_checks


@add_checks
def check_pair(x: Float[Tensor, "rows width"], y: Float[Tensor, " rows"], *, more: int = 0) -> Float[Tensor, " width"]:
    """Call itself with other sizes, and return a result that may be wrong."""
    if more == 1:
        check_pair(zeros(11, 13), zeros(11))
    return x[0, : 2 if more == 2 else None]


@add_checks
def check_count(number: int, words: list[str] | None = None) -> Later | None:
    return Later() if number == 1 else words  # type: ignore[return-value]


class Later:
    """A class that an annotation above names before its definition."""


@add_checks
def check_size(rows: int) -> Float[Tensor, "{rows} 3"]:
    return zeros(5, 3)


@add_checks
def check_generator(count: int) -> Iterator[int]:
    yield from range(count)


@add_checks
@dataclasses.dataclass
class Record:
    number: int
    table: Float[Tensor, "rows rows"]


WRONG: dict[str, Callable[[], object]] = {
    "type": lambda: check_count("1"),
    "items": lambda: check_count(2, [3]),
    "result": lambda: check_count(3, ["a"]),
    "dtype": lambda: check_pair(zeros(3, 5).long(), zeros(3)),
    "number of axes": lambda: check_pair(zeros(3, 5, 7), zeros(3)),
    "two arguments": lambda: check_pair(zeros(3, 5), zeros(7)),
    "argument and result": lambda: check_pair(zeros(3, 5), zeros(3), more=2),
    "axis by the name of an argument": lambda: check_size(7),
    "argument of a generator": lambda: check_generator("3"),
    "field": lambda: Record("1", zeros(3, 3)),
    "shape of a field": lambda: Record(1, zeros(3, 5)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_annotations_do_not_name_is_refused(name: str) -> None:
    with pytest.raises(TypeCheckError):
        WRONG[name]()


def test_what_they_name_passes_and_sizes_of_a_call_are_its_own() -> None:
    assert check_pair(zeros(3, 5), zeros(3), more=1).shape == (5,)
    assert check_pair(zeros(7, 2), zeros(7)).shape == (2,)
    assert isinstance(check_count(1, ["a"]), Later) and check_count(2) is None
    assert check_size(5).shape == (5, 3) and list(check_generator(3)) == [0, 1, 2]
    assert Record(1, zeros(7, 7)).number == 1


def test_the_package_is_checked() -> None:
    with pytest.raises(TypeCheckError):
        rotate(zeros(2, 3, 5, 6), zeros(2, 1, 7, 3), zeros(2, 1, 5, 3))
