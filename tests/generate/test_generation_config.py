"""What a checkpoint's files say about generation: read whole, and done as the library that wrote them does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions, SearchOptions, resolve_options
from tests.generate.tiny import BOS, EOS, PAD, tiny_decoder

peer = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")

PROMPT = 5


def rules(**settings: object) -> GenerationConfig:
    return GenerationConfig.from_settings(settings, source="g.json")


def test_files_are_read_whole() -> None:
    actual = rules(
        decoder_start_token_id=2,
        bos_token_id=0,
        eos_token_id=[2, 7],
        pad_token_id=1,
        forced_bos_token_id=0,
        forced_eos_token_id=[2],
        suppress_tokens=[5],
        bad_words_ids=[[3], [8, 9], [7]],
        begin_suppress_tokens=[4],
        max_length=62,
        min_length=11,
        num_beams=4,
        length_penalty=2.0,
        no_repeat_ngram_size=3,
        temperature=0.7,
        transformers_version="5.23.0",
    )
    assert (actual.decoder_start_id, actual.bos_id, actual.eos_ids, actual.pad_id) == (2, 0, (2, 7), 1)
    assert (actual.forced_bos_id, actual.forced_eos_id) == (0, 2)
    assert (actual.banned_ids, actual.banned_sequences, actual.banned_first_ids) == ((5,), ((3,), (8, 9)), (4,))
    assert actual.options == {"beam_size": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3}
    assert (actual.max_length, actual.min_length, actual.unsupported) == (62, 11, ())
    assert "ends with 2, 7" in actual.lines() and "beam_size 4" in actual.lines()


def test_chance_counts_only_where_it_is_asked_for() -> None:
    assert rules(top_p=0.9).options == {}
    assert rules(top_p=0.9, do_sample=True).options == {"top_p": 0.9, "temperature": 1.0}
    greedy = rules(do_sample=False, top_p=0.9)
    assert greedy.options == {"temperature": 0}
    sampled = rules(top_p=0.9, top_k=7, do_sample=True)
    assert sampled.options == {"top_p": 0.9, "top_k": 7, "temperature": 1.0}


def call(config: GenerationConfig, **call_options: Any) -> GenerateOptions:
    return resolve_options(GenerateOptions, call_options, config.settings(has_encoder=False, max_positions=None))


def test_a_call_goes_before_the_settings_and_those_without_effect_are_dropped() -> None:
    greedy, sampled = rules(do_sample=False, top_p=0.9), rules(top_p=0.9, top_k=7, do_sample=True)
    assert call(greedy) == GenerateOptions(temperature=0)
    assert call(greedy, top_k=3, seed=5) == GenerateOptions(temperature=0.8, top_k=3, seed=5)
    assert call(sampled, temperature=0) == GenerateOptions(temperature=0)
    assert call(sampled, beam_size=3) == GenerateOptions(beam_size=3)
    assert call(sampled, top_k=3, seed=5) == GenerateOptions(temperature=1.0, top_k=3, top_p=0.9, seed=5)
    assert call(rules(num_beams=4, length_penalty=2.0)) == GenerateOptions(beam_size=4, length_penalty=2.0)
    assert call(rules(num_beams=4, length_penalty=2.0), beam_size=1, temperature=0) == GenerateOptions(temperature=0)
    with pytest.raises(InputError, match="seed is 5, which has no effect here: greedy search does not use it"):
        call(sampled, temperature=0, seed=5)
    with pytest.raises(InputError, match="beam_size must be a whole number of at least 1, not '3'"):
        call(sampled, beam_size="3")


def test_lengths_of_the_files_give_way_to_the_call() -> None:
    config = rules(max_length=62, min_length=11, num_beams=3)
    settings = config.settings(has_encoder=True, max_positions=50)
    assert resolve_options(GenerateOptions, {}, settings) == GenerateOptions(
        beam_size=3, max_new_tokens=62, min_new_tokens=10
    )
    assert resolve_options(GenerateOptions, {"max_new_tokens": 7}, settings).min_new_tokens == 7
    assert resolve_options(SearchOptions, {"n_best": 4}, settings) == SearchOptions(
        beam_size=4, n_best=4, max_length=50, min_length=11
    )
    assert resolve_options(SearchOptions, {"max_length": 7}, settings) == SearchOptions(
        beam_size=3, max_length=7, min_length=7
    )
    assert resolve_options(SearchOptions, {}, {}) == SearchOptions(beam_size=5)
    # What the files ask for alone is no mistake of the caller.
    assert call(rules(min_new_tokens=300)).min_new_tokens == 100


def test_what_is_not_done_is_told_and_what_is_wrong_is_named() -> None:
    assert rules(encoder_repetition_penalty=1.3, typical_p=1.0).unsupported == ("encoder_repetition_penalty",)
    assert rules(penalty_alpha=0.6, top_k=4).unsupported == ("penalty_alpha",)
    assert rules(penalty_alpha=0, top_k=4).unsupported == ()
    assert rules(do_sample=True, num_beams=3).unsupported == ("do_sample together with num_beams",)
    with pytest.raises(
        InputError, match=r"(?s)eos_token_id: expected .*integer.*or expected .*bad_words_ids\.0: expected"
    ):
        rules(eos_token_id="</s>", bad_words_ids=[[]])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": -1}, {"num_beams": 0.5}, {"num_beams": float("nan")}, {"num_beams": 10**9}, {"num_beams": "4"},
        {"num_return_sequences": 10**5}, {"max_length": 10**9}, {"max_new_tokens": -1}, {"temperature": -0.1},
        {"top_p": 1.5}, {"repetition_penalty": 0}, {"eos_token_id": -2}, {"suppress_tokens": [2**40]},
        {"bad_words_ids": [[]]}, {"do_sample": "yes"}, {"early_stopping": 1}, {"top_p": 0}, {"length_penalty": -10.5},
        {"length_penalty": 10.5}, {"num_beams": 1001}, {"num_beams": 1024}, {"max_new_tokens": 0},
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"g.json: {next(iter(settings))}[:.]"):
        rules(**settings)


def test_a_setting_that_asks_for_too_much_names_the_option_that_may() -> None:
    with pytest.raises(InputError, match=r"num_return_sequences: .* got 2000; correct it there; num_ret.* may ask"):
        rules(num_return_sequences=2000)
    with pytest.raises(InputError, match=r"num_beams: expected less than or equal to 1000, got 2000$"):
        rules(num_beams=2000)


@pytest.mark.parametrize(
    "settings",
    [
        {"decoder_start_token_id": 29}, {"pad_token_id": 29}, {"forced_bos_token_id": 29}, {"suppress_tokens": [29]},
        {"bad_words_ids": [[1, 29]]},
    ],
)  # fmt: skip
def test_an_id_beyond_the_vocabulary_is_named(settings: dict[str, object]) -> None:
    assert rules(**settings).within(30, "g.json") == rules(**settings)
    with pytest.raises(InputError, match=rf"{next(iter(settings))} = 29 is outside the vocabulary"):
        rules(**settings).within(29, "g.json")


def test_a_start_or_an_end_beyond_the_vocabulary_is_as_if_it_were_absent() -> None:
    config = rules(bos_token_id=29, eos_token_id=[2, 40], forced_eos_token_id=29, max_length=7)
    assert config.within(41, "g.json") == config
    limited = config.within(29, "g.json")
    assert limited.left_out == ("bos_token_id = 29", "eos_token_id = 40", "forced_eos_token_id = 29")
    assert replace(limited, left_out=()) == rules(eos_token_id=2, max_length=7)
    assert "not in the vocabulary: eos_token_id = 40" in limited.lines()


@pytest.mark.parametrize("length", [PROMPT, PROMPT + 1, PROMPT + 10])
def test_logits_change_as_they_do_elsewhere(length: int) -> None:
    logits = torch.randn(3, 29)
    ids = torch.randint(3, 9, (3, length))
    ours = rules(
        forced_bos_token_id=11, forced_eos_token_id=2, begin_suppress_tokens=[5, 6], bad_words_ids=[[3, 4], [4, 5, 3]]
    )
    changed = logits
    for processor in ours.processors(PROMPT, 11):
        changed = processor(changed, ids)
    theirs = peer.NoBadWordsLogitsProcessor([[3, 4], [4, 5, 3]], eos_token_id=torch.tensor([2]))(ids, logits)
    if length == PROMPT:
        theirs = peer.ForcedBOSTokenLogitsProcessor(11)(ids[:, :1], theirs)
    theirs = peer.ForcedEOSTokenLogitsProcessor(PROMPT + 11, 2)(ids, theirs)
    theirs = peer.SuppressTokensAtBeginLogitsProcessor([5, 6], PROMPT + 1)(ids, theirs)
    assert torch.equal(changed, theirs)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_every_end_token_ends_and_what_is_forced_comes(beam_size: int) -> None:
    module = tiny_decoder("modern", 3)
    prompts = [[index] for index in (BOS, 3, 4, 8)]
    config = GenerationConfig(eos_ids=(EOS, 5, 7), forced_bos_id=11, forced_eos_id=9, banned_first_ids=(3,))
    request = GenerateRequest(
        prompts, GenerateOptions(max_new_tokens=7, beam_size=beam_size), EOS, PAD, banned=[BOS], config=config
    )
    for (continuation,) in generate_ids(module, request):
        assert continuation.ids[0] == 11
        assert all(index not in config.eos_ids for index in continuation.ids[:-1])
        assert (
            continuation.ids[-1] in config.eos_ids if continuation.stop_reason == "end" else continuation.ids[-1] == 9
        )
        assert (continuation.stop_reason == "length") == (
            len(continuation.ids) == 7 and continuation.ids[-1] not in config.eos_ids
        )


def test_a_greatest_length_counts_the_prompt() -> None:
    module = tiny_decoder("modern", 3)
    request = GenerateRequest([[BOS, 3, 4], [BOS]], GenerateOptions(), 12, PAD, config=GenerationConfig(max_length=6))
    assert [
        len(continuation.ids)
        for (continuation,) in generate_ids(module, request)
        if continuation.stop_reason == "length"
    ] == [3, 5]
    with pytest.raises(InputError, match="prompt 1 has 3 tokens, but the checkpoint's max_length is 3"):
        short = GenerationConfig(max_length=3)
        generate_ids(module, GenerateRequest([[BOS, 3, 4]], GenerateOptions(), 12, PAD, config=short))
