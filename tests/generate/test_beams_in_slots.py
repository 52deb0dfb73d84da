"""Beam search in slots gives the results of beam search in a running batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clearhead.core import Transformer
from clearhead.generate.continuation import GenerateRequest, RequestStarter, check_limits
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.processors import BannedIds, NoRepeatNGram, Processor, RepetitionPenalty
from clearhead.generate.results import Continuation, Sentence
from clearhead.generate.running import Generated, RunningBatch, run_queue
from clearhead.generate.search.beam import Search
from clearhead.generate.slots.batch import SlotSize
from clearhead.generate.slots.beams import BeamBatch, DeviceBeams
from tests.generate.recording import record_steps
from tests.generate.tiny import BOS, EOS, PAD, some_prompts, some_sources, tiny_decoder, tiny_model
from tests.laws.host_reads import refuse_host_reads


@pytest.fixture(autouse=True)
def without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Search` compute as on a GPU."""
    monkeypatch.setattr("clearhead.fast.logits.function", lambda *_, **__: None)
    record_steps(monkeypatch, least=1)


def run(batch: RunningBatch, request: GenerateRequest, *, budget: int = 10**6, most: int | None = None) -> list[Any]:
    """Run a request in a batch and return the candidates or the failure of each of its sentences."""
    starter = RequestStarter(batch.module, request, check_limits(batch.module, request), with_text=False)
    costs, done = [len(prompt) for prompt in request.prompts], list[Generated]()
    if request.sources is not None:
        costs = [len(source) for source in request.sources]
    for step in run_queue(batch, costs, starter._start_groups, budget=budget, most=most):
        done += [event.sequence for event in step if event.is_done]
    assert not batch.members
    assert all(isinstance(sequence, Sentence) for sequence in done)
    ordered = sorted(done, key=lambda sequence: sequence.prompt)
    return [sequence.candidates or str(sequence.failure) for sequence in ordered if isinstance(sequence, Sentence)]


def assert_alike(actual: list[list[Continuation]], expected: list[list[Continuation]]) -> None:
    """Compare ids and reasons exactly, scores up to the rounding of the model's logits."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert [(each.ids, each.stop_reason) for each in ours] == [(each.ids, each.stop_reason) for each in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.score == pytest.approx(other.score, rel=1e-5, abs=1e-5)
            assert mine.log_probability == pytest.approx(other.log_probability, rel=1e-5, abs=1e-5)


CASES: dict[str, tuple[SearchOptions, GenerationConfig]] = {
    "usual": (SearchOptions(beam_size=4, n_best=3, max_length=20), GenerationConfig()),
    "greedy": (SearchOptions(beam_size=1, max_length=20), GenerationConfig()),
    "wide": (SearchOptions(beam_size=11, n_best=5, max_length=13), GenerationConfig()),
    "until enough": (SearchOptions(beam_size=3, max_length=20, early_stopping=True), GenerationConfig()),
    "until better": (SearchOptions(beam_size=3, max_length=20, early_stopping=False), GenerationConfig()),
    "short": (SearchOptions(beam_size=3, max_length=20, length_penalty=-1.0), GenerationConfig()),
    "least": (SearchOptions(beam_size=3, max_length=20, min_length=7), GenerationConfig()),
    "limit": (SearchOptions(beam_size=3, max_length=7), GenerationConfig()),
    "processors": (
        SearchOptions(
            beam_size=4, max_length=20, repetition_penalty=1.3, no_repeat_ngram_size=2, encoder_no_repeat_ngram_size=2
        ),
        GenerationConfig(
            forced_bos_id=5, forced_eos_id=EOS, banned_first_ids=(4,), banned_sequences=((3, 4), (5, 6, 3))
        ),
    ),
    "several ends": (SearchOptions(beam_size=3, n_best=2, max_length=20), GenerationConfig(eos_ids=(EOS, 4))),
}


LATE_ENDS = {"greedy": -2.0, "short": -4.0, "limit": -4.0}
"""Bonus of the end token in cases that would end too early for slots."""


def request_of(name: str, kind: str) -> tuple[Transformer, GenerateRequest]:
    """Return a model and a request for translations of sources of different lengths."""
    options, config = CASES[name]
    module, sources = tiny_model(kind, seed=3, end_bonus=LATE_ENDS.get(name, 0.5)), some_sources(11, 9)
    return module, GenerateRequest([[BOS]] * 11, options, EOS, PAD, (BOS, PAD), sources, config=config)


@pytest.mark.parametrize("name", CASES)
def test_translations_in_slots_are_those_of_the_running_batch(name: str) -> None:
    """Sentences of different lengths join and leave, so groups are freed, used again and moved."""
    kind = ("original", "modern")[[*CASES].index(name) % 2]
    module, request = request_of(name, kind)
    expected = run(RunningBatch(module), request)
    batch = BeamBatch(module, SlotSize(6 * request.options.num_rows + 1, 32, 32))
    assert_alike(run(batch, request, most=5), expected)
    slots = batch._beam_slots
    assert slots is not None and slots.graphs.num_replays > 0, "the searches did not run in slots"
    batch.close()


def test_continuations_of_prompts_in_slots_are_those_of_the_running_batch() -> None:
    """Prompts of different lengths, which compete without an end token at their limits."""
    for kind, changes in (("original", {}), ("modern", {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2})):
        module, prompts = tiny_decoder(kind, seed=5, end_bonus=1.0), some_prompts(7, 9)
        options = GenerateOptions(beam_size=3, num_return_sequences=2, max_new_tokens=13, **changes)
        request = GenerateRequest(prompts, options, EOS, PAD, (BOS, PAD))
        expected = run(RunningBatch(module), request)
        batch = BeamBatch(module, SlotSize(13, 64))
        assert_alike(run(batch, request, most=3), expected)
        assert batch._beam_slots is not None and batch._beam_slots.graphs.num_replays > 0


def test_searches_with_other_numbers_of_beams_run_beside_the_slots() -> None:
    """Slots have one number of beams while a search runs in them; a search after it has ended takes others."""
    (module, request), (_, other) = request_of("usual", "original"), request_of("least", "original")
    batch, expected = BeamBatch(module, SlotSize(24, 32, 32)), run(RunningBatch(module), other)
    with torch.inference_mode():
        starter = RequestStarter(module, request, check_limits(module, request), with_text=False)
        batch.join([starter.start([0, 1])])
        late = RequestStarter(module, other, check_limits(module, other), with_text=False)
        batch.join([late.start(range(11))])
        sentences = list(batch.members[0].sequences)
        while batch.members:
            batch.step()
    assert_alike([sentence.candidates for sentence in sentences if isinstance(sentence, Sentence)], expected)
    slots = batch._beam_slots
    assert slots is not None and slots.beams == 4
    assert_alike(run(batch, other), expected)
    assert batch._beam_slots is not None and batch._beam_slots.beams == 3


def test_a_sentence_leaves_its_slots_before_it_has_ended() -> None:
    """The other sentences get the same results, and the group is free for another one."""
    module, request = request_of("least", "modern")
    expected = run(RunningBatch(module), request)
    batch, sentences = BeamBatch(module, SlotSize(64, 32, 32)), dict[int, Sentence]()
    with torch.inference_mode():
        starter = RequestStarter(module, request, check_limits(module, request), with_text=False)
        starts = starter._start_groups(list(range(11)))
        sentences = {sentence.prompt: sentence for start in starts for sentence in start.member.sequences}
        batch.join(starts)
        batch.step()
        batch.step()
        batch.drop(sentences[4])
        while batch.members:
            batch.step()
    del sentences[4], expected[4]
    assert_alike([sentences[number].candidates for number in sorted(sentences)], expected)


def test_a_sentence_whose_logits_are_not_numbers_fails_alone() -> None:
    """The failure names the token, one step late."""
    module, request = request_of("usual", "original")
    with torch.no_grad():
        module.encoder.embedding.table.weight[9] = torch.nan
    expected = run(RunningBatch(module), request)
    assert any(isinstance(result, str) for result in expected) and any(isinstance(each, list) for each in expected)
    actual = run(BeamBatch(module, SlotSize(64, 32, 32)), request)
    assert [each for each in actual if isinstance(each, str)] == [each for each in expected if isinstance(each, str)]
    assert_alike(*([each for each in some if isinstance(each, list)] for some in (actual, expected)))


@pytest.mark.parametrize("chain", [[BannedIds((3, 5), stop=4)], [RepetitionPenalty(1.2), NoRepeatNGram(2)]])
def test_a_step_on_meta_reads_nothing_of_the_host(chain: list[Processor]) -> None:
    """Tensors of `meta` have no values, so nothing can depend on them."""
    device, options = torch.device("meta"), SearchOptions(beam_size=4)
    beams = DeviceBeams(8, 20, 13, device, beams=4, num_extensions=8)
    search = Search(
        [Sentence(0, 9), Sentence(1, 9)], (EOS,), options, torch.zeros(2, 3, dtype=torch.int64), chain=chain
    )
    search.move_to_host()
    search.chain, search.prefix_RT = chain, torch.zeros(8, 4, dtype=torch.int64, device=device)
    search.sums_MB = torch.zeros(2, 4, device=device)
    beams.join_search(range(8), search)
    for dtype in (torch.float32, torch.bfloat16):
        logits_RV = torch.empty(8, 13, dtype=dtype, device=device)
        with refuse_host_reads():
            beams.choose(logits_RV)
