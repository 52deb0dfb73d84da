"""What a checkpoint writes is what transformers writes, token by token: greedy, with beams, and with the same chance.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions
from clearhead.generate.results import Continuation
from clearhead.generate.search import sampling
from tests.parity.architectures.harness import Case, Pair, all_cases

START, NEW = 2, 8
LENGTHS = (11, 4)
CHANCE = {"temperature": 0.8, "top_k": 11, "top_p": 0.9}


def first_cases() -> list[Case]:
    """One case of every family that writes."""
    cases: dict[str, Case] = {}
    for case in all_cases():
        if case.variant.task in ("generate", "translate", "denoise"):
            cases.setdefault(case.model_type, case)
    return list(cases.values())


@pytest.fixture(params=first_cases(), ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    yield Pair.of(request.param, tmp_path / "theirs")


def prompts_of(pair: Pair) -> list[list[int]]:
    return [pair.ids(rows=1, length=length)[0].tolist() for length in LENGTHS]


def ours(pair: Pair, texts: list[list[int]], end: int, **options: Any) -> list[Continuation]:
    """All texts in one batch; what an encoder reads, or what a decoder goes on from."""
    prompts, sources = ([[START]] * len(texts), texts) if pair.has_memory else (texts, None)
    chosen = GenerateOptions(max_new_tokens=NEW, **options)
    request = GenerateRequest(prompts=prompts, options=chosen, eos_id=end, pad_id=pair.case.pad, sources=sources)
    return [sequences[0] for sequences in generate_ids(pair.ours, request)]


def theirs(pair: Pair, text: list[int], end: int, **options: Any) -> list[int]:
    """One text on its own and without a cache, so that what drifts or breaks there is not in the way."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW,
        eos_token_id=end,
        bos_token_id=START,
        pad_token_id=pair.case.pad,
        decoder_start_token_id=START,
        use_cache=False,
        **options,
    )
    pair.theirs.generation_config = settings
    ids = torch.tensor([text])
    with torch.no_grad():
        generated = pair.theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
            0
        ].tolist()
    generated = generated[1 if pair.has_memory else len(text) :]
    return generated[: generated.index(end) + 1] if end in generated else generated


def an_end(pair: Pair, texts: list[list[int]]) -> int:
    """A token that comes by itself somewhere in the middle, so that ending is tried too."""
    return ours(pair, texts, end=-1)[0].ids[NEW // 2]


def test_greedy_search(pair: Pair) -> None:
    texts = prompts_of(pair)
    end = an_end(pair, texts)
    actual = [list(sequence.ids) for sequence in ours(pair, texts, end)]
    assert actual == [theirs(pair, text, end, do_sample=False) for text in texts]
    assert actual[0][-1] == end and len(actual[0]) < NEW


def test_beam_search(pair: Pair) -> None:
    """Where both are exact: transformers' own stopping rule is, with early_stopping="never"."""
    texts = prompts_of(pair)
    end = an_end(pair, texts)
    actual = [list(sequence.ids) for sequence in ours(pair, texts, end, beam_size=3, length_penalty=0.4)]
    options = {"num_beams": 3, "do_sample": False, "early_stopping": "never", "length_penalty": 0.4}
    assert actual == [theirs(pair, text, end, **options) for text in texts]


def test_sampling_with_the_same_chance(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same stream of numbers for both: then what is drawn depends on the distributions alone."""
    stream = torch.rand(NEW, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    class Same(sampling.RandomStream):
        def __init__(self, _seed: Any) -> None:
            self.used = 0

        def next(self) -> float:
            self.used += 1
            return float(stream[self.used - 1])

    texts = prompts_of(pair)
    monkeypatch.setattr("clearhead.generate.continuation.RandomStream", Same)
    end = an_end(pair, texts)
    actual = [list(sequence.ids) for sequence in ours(pair, texts, end, seed=1, **CHANCE)]
    for text, mine in zip(texts, actual, strict=True):
        numbers = iter(stream.tolist())

        def draw_next(probs_RV: Tensor, num_samples: int, *, _numbers: Iterator[float] = numbers) -> Tensor:
            assert num_samples == 1
            return sampling.draw(probs_RV, torch.tensor([next(_numbers)], dtype=torch.float64))[:, None]

        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", draw_next)
            assert mine == theirs(pair, text, end, do_sample=True, **CHANCE)
