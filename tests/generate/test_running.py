"""Laws of the running batch: a request has the same result whoever joins and leaves beside it, in whatever order."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from clearhead import core as ch
from clearhead.generate.continuation import GenerateRequest, RequestStarter, generate_ids
from clearhead.generate.options import GenerateOptions
from clearhead.generate.results import GeneratedSequence, Sentence
from clearhead.generate.running import RunningBatch
from tests.generate.tiny import BOS, EOS, PAD, some_prompts, some_sources, tiny_decoder, tiny_model

GREEDY = GenerateOptions(max_new_tokens=9)
OPTIONS = [
    GREEDY,
    GenerateOptions(max_new_tokens=13, temperature=1.2, top_p=0.9, seed=3, num_return_sequences=2),
    GenerateOptions(max_new_tokens=11, beam_size=3, num_return_sequences=2, length_penalty=0.7),
    GenerateOptions(max_new_tokens=7, repetition_penalty=1.3),
    GenerateOptions(max_new_tokens=12, min_new_tokens=5),
    dataclasses.replace(GREEDY, max_new_tokens=3),
]


def requests_for(module: ch.Transformer) -> list[GenerateRequest]:
    count = 2 * len(OPTIONS)
    sources = some_sources(count, longest=7, seed=2) if module.encoder is not None else None
    prompts = [[BOS]] * count if sources else some_prompts(count, longest=13, seed=2)
    return [
        GenerateRequest([prompt], OPTIONS[number % len(OPTIONS)], EOS, PAD, (PAD, BOS), sources and [sources[number]])
        for number, prompt in enumerate(prompts)
    ]


def run(
    module: ch.Transformer, requests: list[GenerateRequest], arrivals: list[int], left: dict[int, int] | None = None
) -> tuple[dict[int, list[tuple[tuple[int, ...], float]]], int]:
    """Let each request join after its number of steps, and some leave; return results, and the most rows of a step."""
    batch, rows, most, step = RunningBatch(module), [], 0, 0
    collected: dict[int, list] = {number: [] for number in range(len(requests))}
    owner: dict[int, int] = {}
    while step <= max(arrivals) or batch.members:
        joining = [number for number, arrival in enumerate(arrivals) if arrival == step]
        with torch.inference_mode():
            starting = []
            for number in joining:
                limit = requests[number].options.max_new_tokens
                starting.append(RequestStarter(module, requests[number], [limit], with_text=False).start([0]))
                for sequence in starting[-1].member.sequences:
                    owner[id(sequence)] = number
                    rows.append(sequence)
            progress = batch.join(starting) if starting else []
            for sequence in rows:
                if (left or {}).get(owner[id(sequence)]) == step:
                    batch.drop(sequence)
            most = max(most, batch.num_rows)
            progress += batch.step() if batch.members else []
        for event in progress:
            if event.is_done:
                collected[owner[id(event.sequence)]].append(event.sequence)
        step += 1
    return {number: results(sequences) for number, sequences in collected.items()}, most


def results(sequences: list[GeneratedSequence | Sentence]) -> list[tuple[tuple[int, ...], float]]:
    rows = sorted(
        (sequence for sequence in sequences if isinstance(sequence, GeneratedSequence)), key=lambda row: row.number
    )
    candidates = [
        candidate for sentence in sequences if isinstance(sentence, Sentence) for candidate in sentence.candidates
    ]
    return [(tuple(row.ids), row.log_probability) for row in rows] + [(c.ids, c.log_probability) for c in candidates]


@pytest.mark.parametrize("name", ["decoder", "modern", "original"])
def test_results_depend_on_nobody_else(name: str) -> None:
    make = tiny_decoder if name == "decoder" else tiny_model
    module = make("modern" if name == "decoder" else name, seed=1, end_bonus=0.5).double()
    requests = requests_for(module)
    expected = {
        number: [(result.ids, result.log_probability) for result in generate_ids(module, request)[0]]
        for number, request in enumerate(requests)
    }
    order = random.Random(5)
    for turn in range(3):
        arrivals = [order.randrange(9) for _ in requests]
        left = {} if turn < 2 else {1: 5, 2: 6, 6: 7}
        actual, most = run(module, requests, arrivals, left)
        assert most > 5, "they did not share a batch"
        for number, wanted in expected.items():
            if number in left and not actual[number]:
                continue
            assert [ids for ids, _ in actual[number]] == [ids for ids, _ in wanted], number
            assert [total for _, total in actual[number]] == pytest.approx([total for _, total in wanted], abs=1e-9)
    assert any(not actual[number] for number in left), "nobody left early"


def test_a_row_without_numbers_ends_alone() -> None:
    """A request whose outputs are no numbers fails, and those beside it do not."""
    module = tiny_decoder("modern", seed=1, end_bonus=-9.0)
    good = GenerateRequest([[BOS, 3]], GREEDY, EOS, PAD, (PAD, BOS))
    bad = dataclasses.replace(good, banned=tuple(range(30)), options=GREEDY, eos_id=EOS)
    starting = [RequestStarter(module, request, [9], with_text=False).start([0]) for request in (good, bad)]
    rows = [start.member.sequences[0] for start in starting]
    starting[1] = dataclasses.replace(starting[1], logits=torch.full_like(starting[1].logits, torch.nan))
    batch = RunningBatch(module)
    with torch.inference_mode():
        batch.join(starting)
        while batch.members:
            batch.step()
    assert rows[1].failure is not None and rows[0].failure is None
    assert tuple(rows[0].ids) == generate_ids(module, good)[0][0].ids


def test_a_sentence_without_numbers_ends_alone() -> None:
    """A search fails for the sentence whose outputs are no numbers, and goes on for the others."""
    module = tiny_decoder("modern", seed=1, end_bonus=-9.0)
    options = GenerateOptions(max_new_tokens=5, beam_size=2)
    both = GenerateRequest([[BOS, 3], [BOS, 4]], options, EOS, PAD, (PAD, BOS))
    with torch.inference_mode():
        start = RequestStarter(module, both, [5, 5], with_text=False).start([0, 1])
        start.logits[1] = torch.nan
        first, second = start.member.sequences
        batch = RunningBatch(module)
        batch.join([start])
        while batch.members:
            batch.step()
    assert second.failure is not None and not second.candidates
    assert (
        first.best_candidates()[0].ids == generate_ids(module, dataclasses.replace(both, prompts=[[BOS, 3]]))[0][0].ids
    )
