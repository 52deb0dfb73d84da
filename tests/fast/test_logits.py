"""Draws by the compiled kernel, beside the definition: sorted logits, their running sum, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.fast.logits import draw_tokens

LARGE = 50_257


@dataclass(frozen=True)
class Shape:
    divisor: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def probabilities(logits_V: Tensor, banned_X: Tensor, shape: Shape) -> Tensor:
    """The definition, in fp64; of equal logits at the border of top_p those with the higher ids stay."""
    x_V = (logits_V.float() / shape.divisor).index_fill(0, banned_X, -torch.inf)
    if shape.top_k:
        least = x_V.sort(descending=True).values[min(shape.top_k, len(x_V)) - 1]
        x_V = x_V.masked_fill(x_V < least, -torch.inf)
    if shape.top_p < 1:
        sorted_V, order_V = x_V.sort(stable=True)
        removed_V = sorted_V.double().softmax(0).cumsum(0).float() <= torch.tensor(1.0 - shape.top_p).float()
        removed_V[-1] = False
        x_V = x_V.masked_fill(removed_V[order_V.argsort()], -torch.inf)
    found_V = x_V.double().softmax(0)
    found_V = found_V.masked_fill(found_V.float() < shape.min_p * found_V.float().max(), 0.0)
    return found_V / found_V.sum()


def draw(logits_V: Tensor, uniform_R: Tensor, banned_X: Tensor, shape: Shape) -> Tensor:
    tokens = draw_tokens(logits_V.expand(len(uniform_R), -1), uniform_R, banned_X, **vars(shape))
    assert tokens is not None, "the kernels serve these logits"
    return tokens


def border(logits_V: Tensor, banned_X: Tensor, shape: Shape) -> float:
    """How far the nearest running sum, or share of the highest probability, is from where a filter cuts."""
    whole_V = probabilities(logits_V, banned_X, Shape(shape.divisor, shape.top_k))
    sums_V = whole_V.sort().values.cumsum(0)
    nearest = float((sums_V - (1.0 - shape.top_p)).abs().min()) if shape.top_p < 1 else 1.0
    return min(nearest, float((whole_V / whole_V.max() - shape.min_p).abs().min()) if shape.min_p else 1.0)


shapes = st.builds(
    Shape,
    divisor=st.sampled_from([1.0, 0.7, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 7, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
)
logits = st.one_of(
    st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=70),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=70),
    st.lists(st.sampled_from([-torch.inf, 0.0, 1.0, 1e-6, 90.0]), min_size=1, max_size=40),
    st.integers(1, 200).map(lambda size: [0.0] * size),
)


@given(logits=logits, banned=st.lists(st.integers(0, 69), max_size=5), shape=shapes)
@settings(deadline=None, max_examples=300)
def test_the_ids_that_stay_are_those_of_the_sorted_definition(
    logits: list[float], banned: list[int], shape: Shape
) -> None:
    logits_V = torch.tensor(logits)
    banned_X = torch.tensor([index for index in banned if index < len(logits)], dtype=torch.int64)
    open_V = logits_V.index_fill(0, banned_X, -torch.inf)
    if bool((open_V == -torch.inf).all()):
        assert draw(logits_V, torch.tensor([0.5], dtype=torch.float64), banned_X, shape).tolist() == [-1]
        return
    # Equal numbers make exact sums; elsewhere a sum that rounding moves over the border is no mistake.
    is_even = len(open_V[open_V > -torch.inf].unique()) == 1
    assume(is_even or border(logits_V, banned_X, shape) > 1e-6)
    expected_V = probabilities(logits_V, banned_X, shape)
    possible = (expected_V > 1e-30).nonzero()[:, 0]
    ends = expected_V.cumsum(0)[possible]
    middles = ends - expected_V[possible] / 2
    clear = expected_V[possible] > 1e-6  # rarer ones have no middle that fp32 weights keep
    actual = draw(logits_V, middles[clear], banned_X, shape)
    assert actual.tolist() == possible[clear].tolist()
    edges = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert all(float(expected_V[token]) > 0 for token in draw(logits_V, edges, banned_X, shape).tolist())


def test_ids_that_a_row_does_not_have_are_no_places_in_memory() -> None:
    logits_V, uniform_R = torch.zeros(5), torch.tensor([0.1, 0.9], dtype=torch.float64)
    beyond_X = torch.tensor([5, 2**40, -1])
    expected = draw(logits_V, uniform_R, beyond_X[:0], Shape())
    assert torch.equal(draw(logits_V, uniform_R, beyond_X, Shape()), expected)


@pytest.mark.parametrize(
    "shape", [Shape(0.8, 0, 0.95), Shape(1.0, 0, 0.5), Shape(1.2, 5000, 0.9, 0.01), Shape(1.0, 50)]
)
@pytest.mark.parametrize("spread", ["level", "nearly level", "flat", "peaked", "clusters", "outlier", "half"])
def test_a_large_vocabulary_is_drawn_from_as_the_definition_says(spread: str, shape: Shape) -> None:
    torch.manual_seed(3)
    noise = torch.randn(LARGE)
    logits_V = {
        "level": torch.zeros(LARGE),
        "nearly level": 3.0 + noise * 1e-6,
        "flat": noise,
        "peaked": noise * 6,
        "clusters": noise.round() + noise * 1e-6,
        "outlier": noise.index_fill(0, torch.tensor([7]), -1e30),
        "half": (noise * 2).bfloat16(),
    }[spread]
    banned_X, uniform_R = torch.tensor([0, 5, 5]), torch.rand(64, dtype=torch.float64)
    expected_V = probabilities(logits_V, banned_X, shape)
    ends = expected_V.cumsum(0)
    tokens = draw(logits_V, uniform_R, banned_X, shape)
    assert bool((expected_V[tokens] > 0).all())
    # The draw is in the part of the id that was drawn, up to rounding of the sums.
    assert bool((uniform_R <= ends[tokens] + 2e-6).all())
    assert bool((uniform_R >= ends[tokens] - expected_V[tokens] - 2e-6).all())
