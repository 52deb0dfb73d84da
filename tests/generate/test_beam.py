"""Beam search against oracles: the plain rules, all sequences there are, and a model that answers as told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError, RunFailure
from clearhead.generate.options import SearchOptions
from clearhead.generate.results import Continuation
from clearhead.generate.search.beam import best_extensions, top_log_probabilities
from tests.generate.oracle import (
    BOS,
    EOS,
    PAD,
    NextLogits,
    PrefixModel,
    Problem,
    every_sequence,
    plain_beam_search,
    random_logits,
    use_prefix_caches,
)
from tests.generate.tiny import translate_ids

SOURCES = [(3,), (4, 5, 3, 3, 3), (5, 5), (3, 4, 5, 6, 3, 4, 5), (6, 4, 3)]


@pytest.fixture(autouse=True)
def _prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    use_prefix_caches(monkeypatch)


def search(
    next_logits: NextLogits, vocab: int, sources: list[tuple[int, ...]], options: SearchOptions
) -> list[list[Continuation]]:
    model = PrefixModel(next_logits, vocab)
    return translate_ids(model, sources, options)


def assert_same(actual: list[Continuation], expected: list[Continuation]) -> None:
    assert [c.ids for c in actual] == [c.ids for c in expected]
    assert [c.stop_reason for c in actual] == [c.stop_reason for c in expected]
    assert [c.score for c in actual] == pytest.approx([c.score for c in expected], rel=1e-5, abs=1e-5)
    assert [c.log_probability for c in actual] == pytest.approx(
        [c.log_probability for c in expected], rel=1e-5, abs=1e-5
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    beams=st.integers(1, 7),
    n_best=st.integers(1, 7),
    lengths=st.tuples(st.integers(0, 5), st.none() | st.integers(0, 11)),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.5]),
    vocab=st.sampled_from([4, 7, 13]),
    end_bonus=st.sampled_from([-4.0, 0.0, 2.0, 5.0]),
)
def test_search_follows_the_plain_rules_run_to_the_limit(
    beams: int, n_best: int, lengths: tuple[int, int | None], alpha: float, vocab: int, end_bonus: float
) -> None:
    """So neither the early stop, nor leaving the batch, nor batch mates change a result."""
    shortest, more = lengths
    options = SearchOptions(
        beam_size=beams,
        n_best=min(n_best, beams),
        min_length=shortest,
        max_length=None if more is None else max(shortest, 1) + more,
        length_penalty=alpha,
        batch_size=3,
    )
    with pytest.MonkeyPatch.context() as patch:
        use_prefix_caches(patch)
        next_logits = random_logits(vocab, end_bonus=end_bonus)
        for source, actual in zip(SOURCES, search(next_logits, vocab, SOURCES, options), strict=True):
            assert_same(actual, plain_beam_search(Problem(next_logits, source, options)))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("min_length", [0, 3])
def test_wide_beam_finds_the_best_of_all_sequences(length_penalty: float, min_length: int) -> None:
    options = SearchOptions(
        beam_size=400, n_best=11, max_length=4, min_length=min_length, length_penalty=length_penalty
    )
    next_logits = random_logits(7)
    for source, actual in zip(SOURCES, search(next_logits, 7, SOURCES, options), strict=True):
        assert_same(actual, every_sequence(Problem(next_logits, source, options)))


def test_narrow_beam_misses_what_a_wide_one_finds() -> None:
    """Otherwise the oracles above could agree by answering a question that is too easy."""
    next_logits = random_logits(7)
    narrow, wide = (search(next_logits, 7, SOURCES, SearchOptions(beam_size=beams, max_length=6)) for beams in (1, 400))
    pairs = [(few[0].score, many[0].score) for few, many in zip(narrow, wide, strict=True)]
    assert all(few <= many + 1e-6 for few, many in pairs)
    assert any(few < many - 1e-3 for few, many in pairs)


def test_beam_one_is_the_greedy_loop() -> None:
    next_logits = random_logits(13)
    for source, actual in zip(SOURCES, search(next_logits, 13, SOURCES, SearchOptions(beam_size=1)), strict=True):
        ids: tuple[int, ...] = ()
        while not ids or ids[-1] != EOS:
            logits = list(next_logits(source, (BOS, *ids)))
            logits[PAD] = logits[BOS] = float("-inf")
            ids = (*ids, logits.index(max(logits))) if len(ids) + 1 < 2 * len(source) + 10 else (*ids, EOS)
        assert actual[0].ids == ids


def never_ends(_source: tuple[int, ...], _prefix: tuple[int, ...]) -> list[float]:
    return [0.0, 0.0, -20.0, 5.0, 3.0, 1.0, 0.0]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_hypotheses_cut_off_at_the_limit_are_marked_and_ended(beam_size: int) -> None:
    (actual,) = search(never_ends, 7, [(3, 3)], SearchOptions(beam_size=beam_size, n_best=beam_size, max_length=6))
    assert len(actual) == beam_size and all(
        c.stop_reason == "length" and len(c.ids) == 6 and c.ids[-1] == EOS for c in actual
    )
    assert actual[0].ids == (3, 3, 3, 3, 3, EOS)


def test_beams_that_hold_no_hypothesis_are_not_cut_off() -> None:
    """Two tokens for a beam of three, and no end in the first step, leave one beam empty."""

    def two_tokens(_source: tuple[int, ...], _prefix: tuple[int, ...]) -> list[float]:
        return [0.0, 0.0, -20.0, 5.0, 3.0]

    options = SearchOptions(beam_size=3, n_best=3, min_length=2, max_length=2)
    (actual,) = search(two_tokens, 5, [(3,)], options)
    assert [(c.ids, c.stop_reason) for c in actual] == [((3, EOS), "length"), ((4, EOS), "length")]


def test_hypotheses_cut_off_are_left_out_where_one_has_ended() -> None:
    """An endless loop of sure tokens would beat the honest end on its score, so it must not compete."""

    def loops_after_four(_source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        if len(prefix) == 1:
            return [-9.0, -9.0, -1.0, -9.0, 1.0]
        return [-30.0, -30.0, -7.0, -30.0, 5.0]

    (actual,) = search(loops_after_four, 5, [(3,)], SearchOptions(beam_size=2, max_length=40))
    assert actual[0].ids == (EOS,) and actual[0].stop_reason == "end"
    looped = -12.13 / 40
    assert looped > actual[0].score


def test_lengths_are_honoured_and_special_ids_never_generated() -> None:
    options = SearchOptions(beam_size=5, n_best=5, min_length=4, max_length=6)
    loud = random_logits(11, end_bonus=4.0)

    def special_ids_first(source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        logits = list(loud(source, prefix))
        logits[PAD] = logits[BOS] = 5.0
        return logits

    for actual in search(special_ids_first, 11, SOURCES, options):
        assert all(4 <= len(c.ids) <= 6 for c in actual)
        assert not {PAD, BOS} & {i for c in actual for i in c.ids}
        assert all(EOS not in c.ids[:-1] for c in actual)


def test_start_token_that_is_also_the_end_token_still_ends() -> None:
    next_logits = random_logits(7, end_bonus=3.0)
    model = PrefixModel(next_logits, 7)
    options = SearchOptions(beam_size=3)
    (actual,) = translate_ids(model, [(3, 4)], options, start=EOS)
    assert actual[0].ids[-1] == EOS and actual[0].stop_reason == "end"


def test_n_best_is_sorted_and_distinct() -> None:
    for actual in search(random_logits(7), 7, SOURCES, SearchOptions(beam_size=7, n_best=7)):
        assert len({c.ids for c in actual}) == len(actual) == 7
        assert [c.score for c in actual] == sorted((c.score for c in actual), reverse=True)


def test_fewer_candidates_come_back_where_fewer_exist() -> None:
    options = SearchOptions(beam_size=5, n_best=5, max_length=2)
    (actual,) = search(random_logits(5), 5, [(3,)], options)
    assert {c.ids for c in actual} == {(EOS,), (3, EOS), (4, EOS)}


def test_first_step_decodes_one_row_for_each_sentence_and_finished_sentences_leave() -> None:
    def ends_after_source_length(source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        return [-50.0, -50.0, 9.0 if len(prefix) >= len(source) else -50.0, 1.0, 0.0]

    model = PrefixModel(ends_after_source_length, 5)
    sources = [(3,) * 2, (3,) * 5, (3,) * 3]
    translate_ids(model, sources, SearchOptions(beam_size=2, length_penalty=0.0))
    assert model.rows_per_call == [3, 6, 4, 2, 2]


def test_equal_scores_are_ordered_by_length_and_ids() -> None:
    def indifferent(_source: tuple[int, ...], _prefix: tuple[int, ...]) -> list[float]:
        return [0.0] * 5

    options = SearchOptions(beam_size=50, n_best=7, max_length=3, length_penalty=1.0)
    (actual,) = search(indifferent, 5, [(3,)], options)
    tokens = (3, 4)
    expected = [(EOS,), *((a, EOS) for a in tokens), *((a, b, EOS) for a in tokens for b in tokens)]
    assert [c.ids for c in actual] == expected


def test_output_that_is_not_a_number_stops_the_search() -> None:
    def breaks(_source: tuple[int, ...], prefix: tuple[int, ...]) -> list[float]:
        return [0.0, 0.0, -9.0, float("nan") if len(prefix) == 3 else 1.0]

    with pytest.raises(RunFailure, match="target token 3 is not a number"):
        search(breaks, 4, [(3,)], SearchOptions(beam_size=2))


def test_lengths_beyond_the_positions_are_refused() -> None:
    model = PrefixModel(random_logits(5), 5, max_positions=7)
    with pytest.raises(InputError, match="max_length is 11, but the model's decoder has 7 positions"):
        translate_ids(model, [(3,)], SearchOptions(max_length=11))


def test_top_log_probabilities_are_those_of_the_whole_vocabulary() -> None:
    logits = torch.randn(5, 23) * 3
    logits[2, 1] = 200.0
    expected = logits.double().log_softmax(1)
    banned = torch.tensor([1, 7])
    allowed = expected.clone()
    allowed[:, banned] = -torch.inf
    log_probs, ids, normaliser = top_log_probabilities(logits.clone(), banned, 3)
    torch.testing.assert_close(log_probs.double(), allowed.topk(3).values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(expected.gather(1, ids), log_probs.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normaliser, logits.logsumexp(1))


def test_equal_sums_keep_their_order_however_many_they_are() -> None:
    ids = torch.arange(7 * 23).view(7, 23)
    best = best_extensions(torch.zeros(7, 23), ids, torch.zeros(1, 7), 150)
    assert best.ids_MC[0].tolist() == list(range(150))


def test_equal_sums_go_to_the_better_parent() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    best = best_extensions(log_probs, torch.tensor([[3, 4], [5, 6]]), torch.tensor([[-1.0, -1.5]]), 3)
    assert best.ids_MC.tolist() == [[3, 5, 4]]
    assert best.parents_MC.tolist() == [[0, 1, 0]]
    assert best.sums_MC.tolist() == [[-2.0, -2.0, -3.0]]
