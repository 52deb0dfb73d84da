"""`DeviceChooser`: the tokens and log-probabilities of `TokenChooser`, from buffers that a recording can replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.generate.options import GenerateOptions
from clearhead.generate.processors import (
    NO_ID,
    BannedIds,
    BannedSequences,
    ForcedAt,
    NoRepeatNGram,
    NoSourceNGram,
    Processor,
    RepetitionPenalty,
)
from clearhead.generate.results import GeneratedSequence
from clearhead.generate.search.sampling import RandomStream, Sampling, TokenChooser, sequence_seed
from clearhead.generate.slots.choosing import DeviceChooser, RowRequest, can_choose, sampling_requests
from tests.generate.recording import Recording
from tests.laws.host_reads import refuse_host_reads

VOCAB, CAPACITY, END = 19, 97, 2


@dataclass(frozen=True)
class Case:
    """A prompt, its logits processors (`length` is the number of its ids) and its options of sampling."""

    prompt: tuple[int, ...]
    chain: Sequence[Processor]
    options: GenerateOptions | None = None
    source: tuple[int, ...] = ()


def chains(length: int, source: Sequence[int]) -> dict[str, list[Processor]]:
    """Return each processor alone, and chains in the order of the library, for a prompt of `length` ids."""
    ends, first = BannedIds((END,), stop=length + 5), BannedIds((7, 8), length + 1, length + 2)
    alone: dict[str, list[Processor]] = {
        "none": [],
        "penalty": [RepetitionPenalty(1.7)],
        "small penalty": [RepetitionPenalty(0.4)],
        "ngram": [NoRepeatNGram(1)],
        "trigram": [NoRepeatNGram(3)],
        "source": [NoSourceNGram(2, torch.tensor([list(source)]))],
        "ends": [ends],
        "banned": [BannedIds(torch.tensor([3, 5]))],
        "words": [BannedSequences(((4, 6), (1, 4, 9), (6, 6)))],
        "other words": [BannedSequences(((4, 5),))],
        "forced": [ForcedAt(11, length), ForcedAt(END, length + 8)],
        "forced last": [ForcedAt(END, length + 3)],
        "nothing": [BannedIds(tuple(range(VOCAB)))],
    }
    whole: dict[str, list[Processor]] = {
        "whole": [
            RepetitionPenalty(1.3), NoRepeatNGram(2), NoSourceNGram(2, torch.tensor([list(source)])), ends,
            BannedIds(torch.tensor([3])), BannedIds((4,)), BannedSequences(((6, 6), (9, 1))), ForcedAt(3, length),
            ForcedAt(END, length + 7), BannedIds((12, 13)), first,
        ],
        "late": [ends, BannedIds((9,)), BannedIds((7, 8), length, length + 1)],
    }  # fmt: skip
    return {**alone, **whole}


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.7}, {"top_k": 3}, {"top_k": 1}, {"top_k": 10**6}, {"top_p": 0.6}, {"min_p": 0.2},
    {"temperature": 1.6, "top_k": 7, "top_p": 0.9, "min_p": 0.05}, {"temperature": 1e-30}, {"top_p": 1e-9},
]  # fmt: skip


def some_cases(seed: int = 0) -> list[Case]:
    """Return every chain with greedy search and with sampling, and every sampling option, in a random order."""
    draw = torch.Generator().manual_seed(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        size = int(torch.randint(least, most, (1,), generator=draw))
        return tuple(torch.randint(3, VOCAB, (size,), generator=draw).tolist())

    cases = []
    for name in chains(1, (1, 2)):
        for options in (None, GenerateOptions(temperature=1.0, seed=5)):
            prompt, source = ids(1, 9), ids(2, 13)
            cases.append(Case(prompt, chains(len(prompt), source)[name], options, source))
    for options in OPTIONS:
        cases.append(Case(ids(1, 9), [], GenerateOptions(**{"temperature": 1.0, **options})))
    order = torch.randperm(len(cases), generator=draw).tolist()
    return [cases[index] for index in order]


class Peer:
    """`TokenChooser` on one row alone."""

    def __init__(self, case: Case, number: int) -> None:
        self.case, self.ids = case, torch.tensor([case.prompt])
        self.stream = None if case.options is None else RandomStream(sequence_seed(9, number, case.prompt))

    def request(self, limit: int = 40) -> RowRequest:
        """Return the request of the row for `DeviceChooser`."""
        return RowRequest(self.case.chain, 0, self.case.options, (END,), limit, self.stream)

    def choose(self, logits_V: Tensor) -> tuple[int, float]:
        """Return the next token and its log-probability."""
        uniform = None if self.stream is None else torch.tensor([self.stream.next()], dtype=torch.float64)
        tokens, log_probs = TokenChooser(self.case.chain, self.case.options).choose(logits_V[None], self.ids, uniform)
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return int(tokens), float(log_probs)


@pytest.fixture(autouse=True)
def without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `TokenChooser` compute as on a GPU."""
    monkeypatch.setattr("clearhead.fast.logits.function", lambda *_, **__: None)


def some_logits(rows: int, step: int) -> Tensor:
    """Return random logits, different in every step."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(step)) * 3


def join_alone(chooser: DeviceChooser, slot: int, peer: Peer) -> None:
    """Let one row join."""
    chooser.join([slot], [peer.request()], peer.ids)


def assert_step(chooser: DeviceChooser, peers: dict[int, Peer], logits_RV: Tensor) -> None:
    """Compare a step that has been chosen with the peers of the slots."""
    for slot, peer in peers.items():
        token, log_probability = peer.choose(logits_RV[slot])
        actual = chooser.results[slot].tolist()
        is_open = log_probability > -torch.inf  # else the row fails, whatever its token
        assert not is_open or (actual[0], chooser.tokens[slot]) == (token, token), (slot, peer.case)
        assert actual[1] == log_probability or (actual[1] != actual[1] and log_probability != log_probability)


def test_rows_with_all_options_choose_as_each_alone() -> None:
    """All chains and options in one batch of slots, with rows that join later, leave, and move."""
    cases = some_cases()
    chooser = DeviceChooser(len(cases) + 2, CAPACITY, VOCAB, torch.device("cpu"))
    peers: dict[int, Peer] = {}
    for step in range(74):
        if step % 2 == 0 and step // 2 < len(cases):
            number = step // 2
            peers[number] = Peer(cases[number], number)
            join_alone(chooser, number, peers[number])
        if step in (30, 55):
            chooser.leave([gone := min(peers)])
            del peers[gone]
        logits_RV = some_logits(len(cases) + 2, step)
        chooser.prepare()
        chooser.choose(logits_RV[: max(peers) + 1])
        assert_step(chooser, peers, logits_RV)
    order = sorted(peers)[::-2]
    chooser.move(order)
    peers = {slot: peers[old] for slot, old in enumerate(order)}
    for step in range(80, 90):
        logits_RV = some_logits(len(order), step)
        chooser.prepare()
        chooser.choose(logits_RV)
        assert_step(chooser, peers, logits_RV)


def test_a_step_on_meta_reads_nothing_of_the_host() -> None:
    """Tensors of `meta` have no values, so nothing can depend on them."""
    cases, device = some_cases(), torch.device("meta")
    chooser = DeviceChooser(len(cases), CAPACITY, VOCAB, device)
    for slot, case in enumerate(cases):
        chain = [
            NoSourceNGram(rule.size, rule.source_RS.to(device))
            if isinstance(rule, NoSourceNGram)
            else BannedIds(rule.ids.to(device))
            if isinstance(rule, BannedIds) and isinstance(rule.ids, Tensor)
            else rule
            for rule in case.chain
        ]
        request = replace(Peer(case, slot).request(), chain=chain)
        chooser.join([slot], [request], torch.tensor([case.prompt], device=device))
    for dtype in (torch.float32, torch.bfloat16):
        logits_RV = torch.empty(len(cases), VOCAB, dtype=dtype, device=device)
        with refuse_host_reads():
            chooser.choose(logits_RV)


def start_all(cases: Sequence[Case]) -> tuple[DeviceChooser, dict[int, Peer]]:
    """Return a chooser with all cases."""
    chooser = DeviceChooser(len(cases), CAPACITY, VOCAB, torch.device("cpu"))
    peers = {slot: Peer(case, slot) for slot, case in enumerate(cases)}
    for slot, peer in peers.items():
        join_alone(chooser, slot, peer)
    return chooser, peers


def test_a_recording_replayed_on_new_logits_chooses_as_each_row_alone() -> None:
    """Random numbers, counts, ids and ends go on from replay to replay."""
    cases = [case for case in some_cases(1) if case.options is not None or case.chain][:20]
    chooser, peers = start_all(cases)
    logits_RV, recording = torch.empty(len(cases), VOCAB), Recording()
    for step in range(70):
        logits_RV.copy_(some_logits(len(cases), step))
        chooser.prepare()
        if step == 1:
            recording.record(lambda: chooser.choose(logits_RV))
        elif step == 0:
            chooser.choose(logits_RV)
        else:
            recording.replay()
        assert_step(chooser, peers, logits_RV)


def num_operations(chooser: DeviceChooser, logits_RV: Tensor) -> int:
    """Return the number of operations of a step that compute something: views do not."""
    recording = Recording()
    recording.record(lambda: chooser.choose(logits_RV))
    views = {"slice", "select", "unsqueeze", "view", "unfold", "lift_fresh", "promote_types"}
    return sum(func.overloadpacket.__name__ not in views for func, *_ in recording.calls)


def test_the_number_of_operations_does_not_depend_on_the_rows() -> None:
    """Two rows of each case are as many operations as one; greedy search needs few."""
    several, more, greedy = some_cases(), some_cases() * 2, [Case((3,), [])]
    counts = [num_operations(start_all(cases)[0], some_logits(len(cases), 0)) for cases in (several, more, greedy)]
    assert counts[0] == counts[1] < 250 and counts[2] <= 18, counts


def test_rows_end_at_an_end_token_at_the_limit_and_without_a_number() -> None:
    """The end of a row stays."""
    chooser = DeviceChooser(4, CAPACITY, VOCAB, torch.device("cpu"))
    requests = [RowRequest([], 0, None, (END, 10**6), limit) for limit in (9, 2, 9, 9)]
    chooser.join([0, 1, 2, 3], requests, torch.full((4, 1), 3))
    ends = []
    for step in range(4):
        logits_RV = torch.zeros(4, VOCAB).index_fill_(1, torch.tensor([5]), 1.0)
        logits_RV[0, END] = 2.0 if step == 2 else 0.0
        logits_RV[2, 7] = torch.nan if step == 1 else 0.0
        chooser.choose(logits_RV)
        ends.append(chooser.results[:, 2].tolist())
    assert ends == [[0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]


def test_members_of_a_running_batch_join_with_their_streams_and_padding() -> None:
    """A member that has chosen tokens goes on in slots with the same texts as without them."""
    options = GenerateOptions(temperature=0.9, top_p=0.8, seed=3)

    def start() -> Sampling:
        rows = [GeneratedSequence(0, number, 40, (END,), None) for number in range(3)]
        ids_RT = torch.tensor([[NO_ID, 4, 5], [6, 7, 8], [NO_ID, NO_ID, 9]])
        chain = [RepetitionPenalty(1.2), NoRepeatNGram(2), BannedIds((END,), stop=3 + 6), ForcedAt(11, 3 + 8)]
        streams = [RandomStream(sequence_seed(1, number, [4])) for number in range(3)]
        return Sampling(rows, ids_RT, TokenChooser(chain, options), streams)

    plain, member = start(), start()
    for step in range(3):
        plain.advance(some_logits(3, step))
        member.advance(some_logits(3, step))
    chooser = DeviceChooser(5, CAPACITY, VOCAB, torch.device("cpu"))
    assert can_choose(member.chooser.chain)
    chooser.join([4, 0, 2], sampling_requests(member), member.ids_RT)
    for step in range(3, 9):
        logits_RV = some_logits(5, step)
        rows = list(plain.sequences)
        plain.advance(logits_RV[[4, 0, 2]])
        chooser.prepare()
        chooser.choose(logits_RV)
        for slot, row in zip((4, 0, 2), rows, strict=True):
            assert chooser.tokens[slot] == row.ids[-1] and chooser.results[slot, 1] == row.log_probabilities[-1]
            assert bool(chooser.results[slot, 2]) == row.is_done
        if any(row.is_done for row in rows):
            break
    assert step >= 6


def test_chains_that_a_row_has_no_settings_for_are_named() -> None:
    """Three forced ids, or two n-grams, run elsewhere; two ranges of bans without a forced id do not conflict."""
    assert not can_choose([ForcedAt(1, 5), ForcedAt(2, 6), ForcedAt(3, 7)])
    assert not can_choose([NoRepeatNGram(2), NoRepeatNGram(3)])
    assert not can_choose([BannedIds((1,), 1, 2), BannedIds((2,), 2, 3), BannedIds((3,), 4, 5)])
    assert can_choose([BannedIds((1,), 0, 2), BannedIds((2,), 2, 3)])
    assert not can_choose([BannedIds((1,), 0, 2), BannedIds((2,), 2, 3), ForcedAt(3, 7)])
    assert not can_choose([lambda logits_RV, ids_RT: logits_RV])
