"""Positions against the formulas of the papers, written out number by number.

Legend: T tokens, E head size.
"""

from __future__ import annotations

import math

import pytest
import torch

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.kernels.positions import (
    alibi_bias,
    distance_row,
    relative_bucket,
    rotary_angles,
    rotate,
    sinusoidal_table,
    token_positions,
)


@pytest.mark.parametrize("theta", [10000.0, 37.0])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal_layouts(layout: str, theta: float) -> None:
    table = sinusoidal_table(13, 10, spec.Sinusoidal(layout=layout, theta=theta))
    for position in range(13):
        for pair in range(5):
            angle = position / theta ** (2 * pair / 10)
            columns = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + 5)
            assert table[position, columns[0]].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, columns[1]].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_angles_stay_exact_far_out() -> None:
    assert sinusoidal_table(9974, 6, spec.Sinusoidal())[9973, 0].item() == pytest.approx(math.sin(9973), abs=1e-6)
    with pytest.raises(InputError, match=r"width must be even, .*got 7"):
        sinusoidal_table(3, 7, spec.Sinusoidal())


def slopes_of(num_heads: int) -> torch.Tensor:
    return torch.tensor(spec.Alibi().head_slopes(num_heads))


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (8, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]),
        # The released code: those of 8 heads, then every other one of 16.
        (12, [2.0**-k for k in range(1, 9)] + [2.0**-k for k in (0.5, 1.5, 2.5, 3.5)]),
        (1, [2.0**-8]),
    ],
)
def test_alibi_slopes_are_those_of_the_released_code(num_heads: int, slopes: list[float]) -> None:
    torch.testing.assert_close(slopes_of(num_heads), torch.tensor(slopes), atol=1e-7, rtol=1e-6)


def test_alibi_is_minus_slope_times_distance() -> None:
    query, key = torch.tensor([[5, 6], [2, 9]]), torch.tensor([[0, 5, 8], [3, 3, 1]])
    bias = alibi_bias(query, key, 3, spec.Alibi())
    assert bias.shape == (2, 3, 2, 3)
    for b in range(2):
        for head, slope in enumerate(slopes_of(3).tolist()):
            for i in range(2):
                for j in range(3):
                    distance = abs(int(query[b, i]) - int(key[b, j]))
                    assert bias[b, head, i, j].item() == pytest.approx(-slope * distance)


def test_rounded_alibi_is_slope_times_position_in_bfloat16() -> None:
    """Models trained in bfloat16 round the position itself, too."""
    query, key = torch.arange(2040, 2043)[None], torch.arange(2043)[None]
    bias = alibi_bias(query, key, 12, spec.Alibi(rounding="bfloat16"))
    expected = slopes_of(12)[..., None].bfloat16() * torch.arange(2043)
    assert bias.dtype == torch.float32
    assert torch.equal(bias[0, :, 1], expected.float())
    exact = slopes_of(12)[:, None] * torch.arange(2043)
    assert (bias[0, :, 1] - exact).abs().max() > 1.0


def published_bucket(relative: int, count: int, max_distance: int, bidirectional: bool) -> int:
    """The rule of arXiv 1910.10683 and its code for one pair: exact buckets nearby, logarithmic buckets far away."""
    offset = 0
    if bidirectional:
        count //= 2
        offset = count if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(0, -relative)
    exact = count // 2
    if distance < exact:
        return offset + distance
    steps = math.log(distance / exact) / math.log(max_distance / exact) * (count - exact)
    # The code works in float32; a tiny number is added where the quotient should be a whole number.
    return offset + min(count - 1, exact + math.floor(steps + 1e-6))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "max_distance"), [(32, 128), (32, 131), (8, 19), (20, 61), (4, 7)])
def test_buckets_follow_the_rule_of_the_paper(count: int, max_distance: int, bidirectional: bool) -> None:
    relative = torch.arange(-307, 308)
    actual = relative_bucket(relative, count, max_distance, bidirectional)
    expected = [published_bucket(int(r), count, max_distance, bidirectional) for r in relative]
    wrong = [int(r) for r, bucket, other in zip(relative, actual.tolist(), expected, strict=True) if bucket != other]
    # A whole quotient may fall on either side in float32, as it does in the released code.
    assert all(published_log_is_whole(r, count, max_distance, bidirectional) for r in wrong), wrong
    assert set(actual.tolist()) <= set(range(count))


def published_log_is_whole(relative: int, count: int, max_distance: int, bidirectional: bool) -> bool:
    count = count // 2 if bidirectional else count
    exact = count // 2
    steps = math.log(abs(relative) / exact) / math.log(max_distance / exact) * (count - exact)
    return abs(steps - round(steps)) < 1e-5


def test_known_buckets() -> None:
    """32 buckets up to distance 128, as in T5: 16 in each direction, 8 of them exact."""
    key_after_query = {1: 17, 7: 23, 8: 24, 127: 31, 500: 31, 0: 0, -1: 1, -7: 7, -8: 8, -500: 15}
    actual = relative_bucket(torch.tensor(list(key_after_query)), 32, 128, True)
    assert actual.tolist() == list(key_after_query.values())
    past = {0: 0, 5: 0, -1: 1, -15: 15, -16: 16, -127: 31, -500: 31}
    assert relative_bucket(torch.tensor(list(past)), 32, 128, False).tolist() == list(past.values())


def test_short_distances_have_separate_rows() -> None:
    table = spec.DistanceTable(span=3)
    actual = distance_row(torch.arange(-5, 6), table)
    assert actual.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 5], "clamped to the first and the last row"


@pytest.mark.parametrize(("buckets", "maximum"), [(6, 17), (10, 41), (256, 512)])
def test_long_distances_share_the_buckets_of_transformers(buckets: int, maximum: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distance = torch.arange(-3 * maximum, 3 * maximum + 1)
    table = spec.DistanceTable(span=buckets, buckets=buckets, max_distance=maximum)
    expected = make_log_bucket_position(distance, buckets, maximum).long() + buckets
    assert torch.equal(distance_row(distance, table), expected.clamp(0, 2 * buckets - 1))


def test_rotary_scores_depend_only_on_the_difference_of_positions() -> None:
    query, key = torch.randn(1, 3, 1, 10), torch.randn(1, 3, 1, 10)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated = [
            rotate(x, *rotary_angles(torch.tensor([[position]]), spec.Rotary(), 10, None))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return (rotated[0] * rotated[1]).sum(-1)

    torch.testing.assert_close(score(5, 2), score(104, 101), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(score(2, 5), score(0, 3), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(score(7, 7), (query * key).sum(-1), atol=1e-5, rtol=1e-5)
    assert (score(5, 2) - score(2, 5)).abs().max() > 1e-2, "left and right differ"


def test_rotation_pairs_halves_and_leaves_the_rest() -> None:
    x = torch.randn(1, 1, 5, 11)
    rotated = rotate(x, *rotary_angles(torch.arange(5)[None], spec.Rotary(theta=29.0, size=6), 11, None))
    assert torch.equal(rotated[..., 6:], x[..., 6:])
    for position in range(5):
        for pair in range(3):
            angle = position * 29.0 ** (-2 * pair / 6)
            number = complex(x[0, 0, position, pair], x[0, 0, position, pair + 3]) * complex(
                math.cos(angle), math.sin(angle)
            )
            assert rotated[0, 0, position, pair].item() == pytest.approx(number.real, abs=1e-5)
            assert rotated[0, 0, position, pair + 3].item() == pytest.approx(number.imag, abs=1e-5)


def test_positions_count_the_real_tokens_before() -> None:
    real = torch.tensor([[False, False, True, True, True], [True, True, False, True, False]])
    documents = torch.tensor([[8, 8, 8, 2, 2], [5, 5, 6, 6, 6]])
    cpu = torch.device("cpu")
    assert token_positions(None, None, 5, cpu).tolist() == [[0, 1, 2, 3, 4]]
    assert token_positions(real, None, 5, cpu)[real].tolist() == [0, 1, 2, 0, 1, 2]
    assert token_positions(None, documents, 5, cpu).tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert token_positions(real, documents, 5, cpu)[real].tolist() == [0, 0, 1, 0, 1, 0]
    assert token_positions(real, documents, 5, cpu).min() >= 0
