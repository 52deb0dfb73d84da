"""Laws of the recorded beam search: it is the search itself, and every candidate's fate follows from the rules."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.results import Continuation
from clearhead.generate.search.recorder import BANNED, BELOW, FORCED_END, LATE_END, BeamRecorder, ConsideredToken
from tests.generate.oracle import BOS, EOS, PAD, NextLogits, PrefixModel, Problem, random_logits, use_prefix_caches
from tests.generate.tiny import some_prompts, some_sources, tiny_decoder, tiny_model, translate_ids
from tests.laws.test_hook_points import operations

SOURCE = (4, 5, 3, 3, 3)


def record(
    next_logits: NextLogits, vocab: int, options: SearchOptions
) -> tuple[list[Continuation], tuple[ConsideredToken, ...]]:
    """Search one sentence with a recorder, and check that the search without it finds the same."""
    recorder = BeamRecorder(options.length_penalty, num_pruned=2)
    with pytest.MonkeyPatch.context() as patch:
        use_prefix_caches(patch)
        model = PrefixModel(next_logits, vocab)
        (plain,) = translate_ids(model, [SOURCE], options)
        (actual,) = translate_ids(model, [SOURCE], options, recorder=recorder)
    assert actual == plain
    return actual, recorder.list_candidates([result.ids for result in actual])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    beams=st.integers(1, 5),
    n_best=st.integers(1, 5),
    lengths=st.tuples(st.integers(0, 4), st.none() | st.integers(0, 7)),
    alpha=st.sampled_from([0.0, 1.0, 2.5]),
    vocab=st.sampled_from([4, 7, 13]),
    end_bonus=st.sampled_from([-4.0, 0.0, 3.0]),
    early=st.booleans(),
)
def test_every_candidate_follows_from_the_rules(
    beams: int, n_best: int, lengths: tuple[int, int | None], alpha: float, vocab: int, end_bonus: float, early: bool
) -> None:
    shortest, more = lengths
    options = SearchOptions(
        beam_size=beams,
        n_best=min(n_best, beams),
        min_length=shortest,
        max_length=None if more is None else max(shortest, 1) + more,
        length_penalty=alpha,
        early_stopping=early,
    )
    next_logits = random_logits(vocab, end_bonus=end_bonus)
    results, considered = record(next_logits, vocab, options)
    problem, known = Problem(next_logits, SOURCE, options), {entry.ids: entry for entry in considered}
    assert len(known) == len(considered), "each candidate once"
    for entry in considered:
        parent = known.get(entry.ids[:-1])
        assert (parent is None) == (len(entry.ids) == 1) and (parent is None or parent.state == "kept")
        assert entry.total == pytest.approx((parent.total if parent else 0.0) + entry.log_probability, abs=1e-9)
        assert entry.log_probability == pytest.approx(problem.log_probs(entry.ids[:-1])[entry.ids[-1]], abs=1e-4)
        assert entry.score == pytest.approx(entry.total / len(entry.ids) ** alpha, abs=1e-9)
        assert (entry.reason == "") == (entry.state == "kept")
        assert (entry.reason == BANNED) == (
            entry.state == "pruned" and entry.ids[-1] not in problem.choices(entry.ids[:-1])
        )
    # The paths of the results, with their scores.
    assert {entry.rank: (entry.ids, entry.score, entry.total) for entry in considered if entry.rank is not None} == {
        rank: (result.ids, pytest.approx(result.score), result.log_probability) for rank, result in enumerate(results)
    }
    assert all(entry.state == "finished" for entry in considered if entry.rank is not None)
    check_steps(considered, options)


def check_steps(considered: tuple[ConsideredToken, ...], options: SearchOptions) -> None:
    """In each step the best live on, and what ends does not block them."""
    for length in range(1, max(len(entry.ids) for entry in considered) + 1):
        step = [entry for entry in considered if len(entry.ids) == length]
        kept_totals = [entry.total for entry in step if entry.state == "kept"]
        below = [entry.total for entry in step if entry.reason == BELOW]
        assert len(kept_totals) <= options.beam_size
        if kept_totals and below:
            assert max(below) <= min(kept_totals) + 1e-5
        finished = [entry.total for entry in step if entry.state == "finished" and entry.reason != FORCED_END]
        late = [entry.total for entry in step if entry.reason == LATE_END]
        if finished and late:
            assert max(late) <= min(finished) + 1e-5
        for parent in {entry.ids[:-1] for entry in step}:
            pruned = [entry for entry in step if entry.ids[:-1] == parent and entry.reason in (BANNED, BELOW, LATE_END)]
            assert len(pruned) <= 2
        survivors = {entry.ids[:-1] for entry in considered if len(entry.ids) == length + 1}
        assert survivors == {entry.ids for entry in step if entry.state == "kept"}, "what was kept was extended"


@pytest.mark.parametrize(
    "changes", [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 1}], ids=["plain", "chain"]
)
def test_continued_prompts_are_recorded(changes: dict[str, float]) -> None:
    options = GenerateOptions(beam_size=3, num_return_sequences=3, max_new_tokens=4, **changes)
    prompt = some_prompts(1, longest=5, vocab=11)[0]
    module = tiny_decoder("modern", seed=2, vocab=11, end_bonus=0.5)
    plain = GenerateRequest([prompt], options, EOS, PAD, (PAD, BOS))
    recorder = BeamRecorder(1.0)
    (actual,) = generate_ids(module, GenerateRequest([prompt], options, EOS, PAD, (PAD, BOS), recorder=recorder))
    assert actual == generate_ids(module, plain)[0]
    considered = recorder.list_candidates([entry.ids for entry in actual])
    ranked = {entry.rank: entry for entry in considered if entry.rank is not None}
    assert [ranked[rank].ids for rank in range(3)] == [entry.ids for entry in actual]
    assert [ranked[rank].score for rank in range(3)] == pytest.approx([entry.score for entry in actual])
    check_ranked_cut_off(actual, ranked)
    if changes:
        repeated = [entry for entry in considered if entry.ids[-1] in (*prompt, *entry.ids[:-1])]
        assert repeated and all(entry.reason == BANNED for entry in repeated)
    assert all(math.isfinite(entry.total) for entry in considered)


def test_what_stands_for_no_text_takes_no_place_of_a_candidate() -> None:
    options = GenerateOptions(beam_size=3, max_new_tokens=4)
    prompt = some_prompts(1, longest=5, vocab=11)[0]
    module = tiny_decoder("modern", seed=2, vocab=11, end_bonus=0.5)
    shown = []
    for hidden in ((), (PAD, BOS)):
        recorder = BeamRecorder(1.0, num_pruned=2, hidden=hidden)
        (actual,) = generate_ids(module, GenerateRequest([prompt], options, EOS, PAD, (PAD, BOS), recorder=recorder))
        shown.append(recorder.list_candidates([entry.ids for entry in actual]))
    plain, without = shown
    assert any(entry.ids[-1] in (PAD, BOS) for entry in plain) and not any(
        entry.ids[-1] in (PAD, BOS) for entry in without
    )
    assert len(without) == len(plain), "others take their places"
    assert [entry for entry in plain if entry.state != "pruned"] == [
        entry for entry in without if entry.state != "pruned"
    ]


def check_ranked_cut_off(continuations: list[object], ranked: dict[int, ConsideredToken]) -> None:
    reasons = {entry.stop_reason: ranked[rank].reason for rank, entry in enumerate(continuations)}  # type: ignore[attr-defined]
    assert reasons.get("end", "end") in ("end", "ends with an end token")
    assert reasons.get("length", "cut off at the length limit") == "cut off at the length limit"


def test_a_search_without_a_recorder_computes_nothing_for_it() -> None:
    """The normaliser of the candidates is not a log-softmax, which only the recorder takes."""
    module, source = tiny_model("modern", seed=3), some_sources(1, longest=7)[0]
    options = SearchOptions(beam_size=2, max_length=5)
    plain = operations(lambda: translate_ids(module, [source], options))
    watched = operations(lambda: translate_ids(module, [source], options, recorder=BeamRecorder(1.0)))
    assert sum(plain.values()) < sum(watched.values())
    assert not [name for name in plain if "log_softmax" in name] and [name for name in watched if "log_softmax" in name]


def test_a_recorder_notes_one_sentence() -> None:
    module = tiny_model("modern", seed=3)
    with torch.inference_mode(), pytest.raises(AssertionError, match="one sentence"):
        options = SearchOptions(beam_size=2, max_length=5)
        translate_ids(module, some_sources(2, longest=7), options, recorder=BeamRecorder(1.0))
