"""Laws of the learning rate: the published figure, the warm-up, the fall, the end, and what a plateau remembers."""

from __future__ import annotations

import json

import pytest

from clearhead.base.errors import InputError
from clearhead.training.optim.schedules import (
    RULES,
    SCHEDULES_WITH_AN_END,
    SCHEDULES_WITH_WARMUP,
    Schedule,
    build_schedule,
)

PEAK, WARMUP, STEPS, WIDTH = 0.003, 97, 1009, 64
KINDS = (*RULES, "plateau")
STRAIGHT: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "paper")


def make(kind: str, *, warmup: int = WARMUP, steps: int | None = STEPS) -> Schedule:
    return build_schedule(kind, learning_rate=PEAK, warmup=warmup, steps=steps, width=WIDTH)


def test_the_papers_schedule_gives_the_papers_rates() -> None:
    base = build_schedule("paper", learning_rate=1.0, warmup=4000, steps=None, width=512)
    assert base(1) == pytest.approx(1.746928e-7, rel=1e-6)
    assert base(4000) == pytest.approx(6.987712e-4, rel=1e-6)
    assert base(100_000) == pytest.approx(1.397542e-4, rel=1e-6)
    assert max(range(1, 20_000, 7), key=base) == pytest.approx(4000, abs=7)
    assert build_schedule("paper", learning_rate=2.0, warmup=4000, steps=None, width=512)(37) == 2 * base(37)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_rises_in_a_straight_line_to_its_peak_and_never_again(kind: str) -> None:
    schedule = make(kind)
    rates = [schedule(step) for step in range(1, STEPS + 1)]
    peak = rates[WARMUP - 1]
    assert rates[:WARMUP] == pytest.approx([peak * step / WARMUP for step in range(1, WARMUP + 1)], rel=1e-12)
    assert max(rates) == peak
    assert all(later <= earlier for earlier, later in zip(rates[WARMUP - 1 :], rates[WARMUP:], strict=False))
    assert min(rates[:-1]) > 0


@pytest.mark.parametrize("kind", STRAIGHT)
def test_the_peak_is_the_learning_rate(kind: str) -> None:
    assert make(kind)(WARMUP) == pytest.approx(PEAK, rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("wsd", "linear")])
def test_the_rate_is_continuous_where_the_warm_up_ends(kind: str) -> None:
    schedule = make(kind)
    assert abs(schedule(WARMUP + 1) - schedule(WARMUP)) < 1.01 * schedule(WARMUP) / WARMUP


@pytest.mark.parametrize("kind", SCHEDULES_WITH_AN_END)
def test_the_rate_ends_at_zero_and_stays_there(kind: str) -> None:
    schedule = make(kind)
    assert schedule(STEPS) == pytest.approx(0.0, abs=1e-15)
    assert schedule(10 * STEPS) == pytest.approx(0.0, abs=1e-15)


def test_values_on_the_way() -> None:
    warmup, steps = 100, 1100
    shape = {kind: make(kind, warmup=warmup, steps=steps) for kind in KINDS}
    assert shape["cosine"](600) == pytest.approx(PEAK / 2)
    assert shape["cosine"](350) == pytest.approx(PEAK * (0.5 + 0.5**1.5))
    assert shape["linear"](350) == pytest.approx(0.75 * PEAK)
    assert shape["inverse-sqrt"](400) == pytest.approx(PEAK / 2)
    assert shape["wsd"](900) == PEAK
    assert shape["wsd"](950) == pytest.approx(PEAK / 2)
    assert shape["constant"](10**6) == shape["plateau"](10**6) == PEAK


def test_inverse_square_root_is_the_papers_shape() -> None:
    paper, inverse = make("paper"), make("inverse-sqrt")
    ratios = [inverse(step) / paper(step) for step in (1, 5, WARMUP, 500, 10_007)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_is_a_function_of_the_step(kind: str) -> None:
    schedule, other = make(kind), make(kind)
    forwards = [schedule(step) for step in range(0, STEPS, 11)]
    backwards = [other(step) for step in reversed(range(0, STEPS, 11))]
    assert forwards == backwards[::-1]
    assert schedule(0) == schedule(1) > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SCHEDULES_WITH_WARMUP])
def test_without_a_warm_up_the_first_step_is_near_the_peak(kind: str) -> None:
    assert make(kind, warmup=0)(1) == pytest.approx(PEAK, rel=0.01)


def test_a_plateau_halves_the_rate_after_three_misses_too_many() -> None:
    schedule = make("plateau")
    losses = [3.0, 2.0, 2.0, 2.5, 2.1]
    for loss in losses:
        schedule.observe(loss)
        assert schedule(500) == PEAK
    schedule.observe(2.2)
    assert schedule(500) == PEAK / 2
    for loss in (1.0, 1.5, 1.5, 1.5):
        schedule.observe(loss)
        assert schedule(500) == PEAK / 2
    schedule.observe(0.99999)
    assert schedule(500) == PEAK / 4
    assert schedule(1) == pytest.approx(PEAK / 4 / WARMUP)


def test_a_plateau_works_also_below_zero() -> None:
    falling, level = make("plateau"), make("plateau")
    for loss in (-1.0, -2.0, -3.0, -4.0, -5.0):
        falling.observe(loss)
        level.observe(-1.0)
    assert falling(500) == PEAK
    assert level(500) == PEAK / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_state_continues_as_if_nothing_happened(kind: str) -> None:
    losses = [3.0, 2.0, 2.0, 2.5, 2.1, 2.2, 2.0, 2.0, 2.0, 2.0, 1.0]
    whole, first, second = make(kind), make(kind), make(kind)
    for loss in losses[:4]:
        first.observe(loss)
    second.load_state(json.loads(json.dumps(first.state())))
    for loss in losses[4:]:
        second.observe(loss)
    for loss in losses:
        whole.observe(loss)
    assert second.state() == whole.state()
    assert second(700) == whole(700)


def test_only_a_plateau_listens_to_validations() -> None:
    for kind in KINDS:
        schedule = make(kind)
        before = schedule(500)
        for _ in range(20):
            schedule.observe(1.0)
        assert (schedule(500) != before) == (kind == "plateau")


def test_a_schedule_with_an_end_needs_enough_steps() -> None:
    for kind in SCHEDULES_WITH_AN_END:
        with pytest.raises(InputError, match="number of steps"):
            make(kind, steps=None)
        with pytest.raises(InputError, match="more steps than its warmup"):
            make(kind, steps=WARMUP)
