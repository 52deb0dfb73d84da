"""Beam search behind prompts: the best of all continuations, greedy with one beam, alone as in a batch."""

from __future__ import annotations

import pytest
import torch

from clearhead import core as ch
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import prefill_prompts
from clearhead.generate.processors import BannedIds, apply, repetition_processors
from clearhead.generate.results import Continuation, Sentence
from clearhead.generate.running import PrefilledMember
from clearhead.generate.search.beam import Search
from tests.generate.tiny import (
    BOS,
    EOS,
    PAD,
    next_logits,
    run_search,
    some_prompts,
    some_sources,
    tiny_decoder,
    tiny_model,
)

KINDS = ("original", "modern")


def generate(
    module: ch.Transformer, prompts: list[list[int]], options: GenerateOptions, sources: list[list[int]] | None = None
) -> list[list[Continuation]]:
    return generate_ids(module, GenerateRequest(prompts, options, EOS, PAD, (PAD, BOS), sources))


def every_continuation(
    module: ch.Transformer, prompt: list[int], options: GenerateOptions, source: list[int] | None = None
) -> list[tuple[float, tuple[int, ...]]]:
    """All sequences that end, or are cut off at the limit, best first."""
    chain = repetition_processors(options, torch.tensor([source or prompt]))
    done, live = [], {(): 0.0}
    for step in range(options.max_new_tokens):
        extended = {}
        for ids, total in live.items():
            seen = [*prompt, *ids]
            log_probs = next_logits(module, seen, source)[None].log_softmax(1)
            row = apply(chain, log_probs, torch.tensor([seen]))[0].tolist()
            banned = {PAD, BOS, EOS} if step < options.min_new_tokens else {PAD, BOS}
            extended |= {(*ids, i): total + p for i, p in enumerate(row) if i not in banned and p > -float("inf")}
        done += [(ids, total) for ids, total in extended.items() if ids[-1] == EOS]
        live = {ids: total for ids, total in extended.items() if ids[-1] != EOS}
    done += list(live.items())
    return sorted(((total / len(ids) ** options.length_penalty, ids) for ids, total in done), reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"length_penalty": 0.0},
        {"length_penalty": 2.0, "min_new_tokens": 1},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1},
    ],
    ids=["sums", "long", "no repetition"],
)
def test_wide_beam_finds_the_best_of_all_continuations(kind: str, changes: dict[str, float]) -> None:
    """Prompts of unequal length, vocabulary of 7, three tokens: ended ones and cut-off ones compete."""
    options = GenerateOptions(beam_size=130, num_return_sequences=11, max_new_tokens=3, **changes)
    module = tiny_decoder(kind, seed=2, vocab=7, end_bonus=0.5)
    prompts = some_prompts(3, longest=5, vocab=7)
    for prompt, actual in zip(prompts, generate(module, prompts, options), strict=True):
        expected = every_continuation(module, prompt, options)[:11]
        assert [result.ids for result in actual] == [ids for _, ids in expected]
        assert [result.score for result in actual] == pytest.approx([score for score, _ in expected], abs=1e-4)
        assert [result.stop_reason for result in actual] == [
            "end" if ids[-1] == EOS else "length" for _, ids in expected
        ]


def test_both_ends_are_among_the_best() -> None:
    """Otherwise the law above could hold for a search that forgets one kind."""
    module = tiny_decoder("modern", seed=2, vocab=7, end_bonus=0.5)
    options = GenerateOptions(beam_size=130, num_return_sequences=11, max_new_tokens=3)
    reasons = {result.stop_reason for some in generate(module, some_prompts(3, 5, vocab=7), options) for result in some}
    assert reasons == {"end", "length"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_beam_is_greedy_search(kind: str) -> None:
    module = tiny_decoder(kind, seed=1, end_bonus=1.0)
    prompts = some_prompts(5, longest=11)
    greedy = generate(module, prompts, GenerateOptions(max_new_tokens=11))
    with torch.inference_mode():
        start = prefill_prompts(module, prompts, pad_id=PAD)
        actual = run_search(
            module,
            lambda: PrefilledMember(
                Search(
                    [Sentence(number, 11) for number in range(5)],
                    (EOS,),
                    SearchOptions(beam_size=1),
                    start.ids,
                    chain=[BannedIds((PAD, BOS))],
                    open_ended=True,
                ),
                start.cache,
                start.logits,
            ),
        )
    assert [result.ids for (result,) in actual] == [result.ids for (result,) in greedy]
    assert [result.stop_reason for (result,) in actual] == [result.stop_reason for (result,) in greedy]
    scores = [result.score for (result,) in greedy]
    assert [result.score for (result,) in actual] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_batched_is_single(kind: str) -> None:
    """Prompts are padded on the left and finish at different steps."""
    module = tiny_decoder(kind, seed=1, end_bonus=2.0)
    prompts = some_prompts(5, longest=11)
    options = GenerateOptions(
        beam_size=3,
        num_return_sequences=2,
        max_new_tokens=11,
        no_repeat_ngram_size=3,
        length_penalty=0.6,
        encoder_no_repeat_ngram_size=2,
    )
    together = generate(module, prompts, options)
    alone = [generate(module, [prompt], options)[0] for prompt in prompts]
    assert [[result.ids for result in some] for some in together] == [[result.ids for result in some] for some in alone]
    assert len({len(some[0].ids) for some in together}) > 1, "all ended together"
    flat = [result.score for some in alone for result in some]
    assert [result.score for some in together for result in some] == pytest.approx(flat, abs=1e-4)


def test_beams_over_two_stacks_find_the_best_of_all() -> None:
    module = tiny_model("modern", seed=2, end_bonus=0.5)
    sources = some_sources(2, longest=5)
    options = GenerateOptions(beam_size=130, num_return_sequences=5, max_new_tokens=3, encoder_no_repeat_ngram_size=1)
    for source, actual in zip(sources, generate(module, [[BOS]] * 2, options, sources), strict=True):
        expected = every_continuation(module, [BOS], options, source)[:5]
        assert [result.ids for result in actual] == [ids for _, ids in expected]


def test_positions_limit_a_search() -> None:
    module = tiny_decoder("original", seed=1, positions=11, end_bonus=-99.0)
    (actual,) = generate(module, [[BOS, 3, 4]], GenerateOptions(beam_size=3))
    assert len(actual[0].ids) == 9 and actual[0].stop_reason == "length"
