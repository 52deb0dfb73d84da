"""The interval of paired turns holds the true ratio as often as it says, and a planted slowdown is told."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[3] / "benchmarks" / "pairing.py"


def load_pairing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pairing", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pairing"] = module  # its data classes look their module up
    spec.loader.exec_module(module)
    return module


pairing = load_pairing()


@pytest.mark.parametrize("num", range(1, 40))
def test_the_interval_is_the_narrowest_that_holds_the_median_often_enough(num: int) -> None:
    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(num, below) for below in range(rank + 1)) / 2**num

    rank = pairing.interval_rank(num)
    assert (rank is None) == (num < 6)
    if rank is not None:
        assert coverage(rank) >= 0.95 > coverage(rank + 1)


@pytest.mark.parametrize("num", [6, 12, 31])
def test_the_interval_holds_the_true_ratio_in_95_of_100_runs(num: int) -> None:
    draw, held = random.Random(7), 0
    for _ in range(2000):
        # A machine whose speed drifts, with heavy tails: both turns of a pair share the drift.
        drift = [math.exp(draw.gauss(0, 0.5)) for _ in range(num)]
        first, second = (
            [ratio * factor * math.exp(0.1 * draw.gauss(0, 1) ** 3) for factor in drift] for ratio in (1.3, 1.0)
        )
        ratio = pairing.Ratio.of(first, second)
        held += ratio.low <= 1.3 <= ratio.high
    assert held / 2000 >= 0.94


def test_a_ratio_pairs_turns_and_not_medians() -> None:
    first, second = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    ratio = pairing.Ratio.of(first, second)
    assert (ratio.median, ratio.low, ratio.high, ratio.verdict) == (0.5, 0.5, 0.5, "smaller")
    assert ratio.falls_short(0.98)
    assert pairing.Ratio.of(second, first).verdict == "larger"


@pytest.mark.parametrize(("num", "noise"), [(5, 0.0), (12, 0.2)])
def test_nothing_is_claimed_without_an_interval_beyond_1(num: int, noise: float) -> None:
    draw = random.Random(3)
    first = [1.001 * math.exp(draw.gauss(0, noise)) for _ in range(num)]
    ratio = pairing.Ratio.of(first, [1.0] * num)
    assert ratio.verdict == "no difference shown"
    assert not ratio.falls_short(0.98)


def test_sides_with_unequal_turns_are_refused() -> None:
    with pytest.raises(ValueError):
        pairing.Ratio.of([1.0, 2.0], [1.0])


def test_a_spread_says_how_many_figures_it_is_of() -> None:
    values = [3.0, 1.0, 2.0]
    assert str(pairing.Spread.of(values)) == f"{statistics.median(values):.4g} (1 to 3, n = 3)"
