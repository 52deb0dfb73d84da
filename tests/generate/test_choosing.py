"""`DeviceChooser`: the tokens and log-probabilities of `TokenChooser`, from buffers that a recording can replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

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
        self.total = 0.0

    def request(self, limit: int = 40) -> RowRequest:
        """Return the request of the row for `DeviceChooser`."""
        return RowRequest(self.case.chain, 0, self.case.options, (END,), limit, self.stream)

    def choose(self, logits_V: Tensor) -> tuple[int, float]:
        """Return the next token and its log-probability."""
        uniform = None if self.stream is None else torch.tensor([self.stream.next()], dtype=torch.float64)
        tokens, log_probs = TokenChooser(self.case.chain, self.case.options).choose(logits_V[None], self.ids, uniform)
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        self.total += float(log_probs)
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
        assert actual[2] == peer.total or actual[3] == 1


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
