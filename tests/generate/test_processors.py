"""Logits processors against those of the transformers library, value by value, and what padding must not change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.generate.options import GenerateOptions
from clearhead.generate.processors import (
    NO_ID,
    BannedIds,
    MinP,
    NoRepeatNGram,
    NoSourceNGram,
    Processor,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    apply,
    build_logits_processors,
    build_logits_warpers,
)
from clearhead.generate.search.sampling import TokenChooser

peer = pytest.importorskip("transformers.generation.logits_process", reason="transformers is not installed")

EOS, PROMPT = 2, 5


def logits_of(shape: str) -> Tensor:
    """Logits of every kind that is hard: ties in plenty, a peak, ids that are banned already, a large vocabulary."""
    torch.manual_seed(7)
    match shape:
        case "plain":
            return torch.randn(7, 29) * 3
        case "ties":
            return torch.randint(-3, 4, (11, 31)).float()
        case "flat":
            return torch.zeros(3, 17)
        case "peak":
            return torch.randn(3, 37) + 40 * torch.eye(3, 37)
        case "banned":
            return torch.randn(5, 23).masked_fill(torch.rand(5, 23) < 0.6, -torch.inf).index_fill(1, torch.tensor(3), 1)
        case "large":
            return torch.randn(5, 5003) * 4
        case _:
            return (torch.randn(5, 5003) * 4).round()


SHAPES = ["plain", "ties", "flat", "peak", "banned", "large", "large ties"]


def ids_of(logits_RV: Tensor, length: int = 19) -> Tensor:
    return torch.randint(min(logits_RV.shape[1], 11), (len(logits_RV), length))


def pairs() -> dict[str, tuple[Processor, Any]]:
    """Ours and theirs with the same settings."""
    shortest = peer.MinNewTokensLengthLogitsProcessor
    processor_pairs: dict[str, tuple[Processor, Any]] = {
        "minimum reached": (BannedIds((EOS,), stop=PROMPT + 14), shortest(PROMPT, 14, EOS)),
        "minimum ahead": (BannedIds((EOS,), stop=PROMPT + 15), shortest(PROMPT, 15, EOS)),
        "banned": (BannedIds(torch.tensor([1, 7, 11])), peer.SuppressTokensLogitsProcessor([1, 7, 11])),
    }
    for value in (0.3, 1.7):
        processor_pairs[f"temperature {value}"] = Temperature(value), peer.TemperatureLogitsWarper(value)
        processor_pairs[f"repetition {value}"] = RepetitionPenalty(value), peer.RepetitionPenaltyLogitsProcessor(value)
    for size in (1, 2, 3, 19, 23):
        processor_pairs[f"n-gram {size}"] = NoRepeatNGram(size), peer.NoRepeatNGramLogitsProcessor(size)
    for count in (1, 5, 10**6):
        processor_pairs[f"top-k {count}"] = TopK(count), peer.TopKLogitsWarper(count)
    for share in (0.05, 0.5, 0.9, 0.999, 1.0):
        processor_pairs[f"top-p {share}"] = TopP(share), peer.TopPLogitsWarper(share)
        processor_pairs[f"min-p {share}"] = MinP(share), peer.MinPLogitsWarper(share)
    return processor_pairs


@pytest.mark.parametrize("shape", SHAPES)
def test_each_processor_gives_the_values_of_transformers(shape: str) -> None:
    read_RS = ids_of(logits_of(shape), 23)
    blocked = {
        f"source n-gram {size}": (NoSourceNGram(size, read_RS), peer.EncoderNoRepeatNGramLogitsProcessor(size, read_RS))
        for size in (1, 2, 3, 23, 29)
    }
    for name, (ours, theirs) in {**pairs(), **blocked}.items():
        logits_RV = logits_of(shape)
        ids_RT = ids_of(logits_RV)
        before = logits_RV.clone()
        actual, expected = ours(logits_RV, ids_RT), theirs(ids_RT, logits_RV.clone())
        if shape == "large ties" and name.startswith("top-p"):
            # Sorting promises no order of equal values, so only how many of them stay can be compared.
            actual, expected = actual.sort(1).values, expected.sort(1).values
        assert torch.equal(actual, expected), name
        assert torch.equal(logits_RV, before), f"{name} changed its argument"


def test_the_order_is_that_of_transformers() -> None:
    """Their own list for the same options, class by class, and the same values from the whole chain."""
    utils = pytest.importorskip("transformers.generation.utils")
    options = GenerateOptions(
        temperature=0.7, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3, no_repeat_ngram_size=2,
        min_new_tokens=7, max_new_tokens=11, encoder_no_repeat_ngram_size=2,
    )  # fmt: skip
    read = torch.randint(11, (11, 5))
    config = utils.GenerationConfig(
        temperature=0.7, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3, no_repeat_ngram_size=2,
        min_new_tokens=7, max_new_tokens=11, do_sample=True, suppress_tokens=[0, 1], encoder_no_repeat_ngram_size=2,
    )  # fmt: skip
    config._eos_token_tensor = torch.tensor([EOS])
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False), _merge_criteria_processor_list=lambda first, _: first
    )
    theirs = utils.GenerationMixin._get_logits_processor(
        model, config, input_ids_seq_length=PROMPT, encoder_input_ids=read, device="cpu"
    )
    ours = [
        *build_logits_processors(options, (EOS,), PROMPT, torch.tensor([0, 1]), read),
        *build_logits_warpers(options),
    ]
    same = {
        "RepetitionPenalty": "RepetitionPenaltyLogitsProcessor", "NoRepeatNGram": "NoRepeatNGramLogitsProcessor",
        "NoSourceNGram": "EncoderNoRepeatNGramLogitsProcessor",
        "MinimumLength": "MinNewTokensLengthLogitsProcessor", "BannedIds": "SuppressTokensLogitsProcessor",
        "Temperature": "TemperatureLogitsWarper", "TopK": "TopKLogitsWarper", "TopP": "TopPLogitsWarper",
        "MinP": "MinPLogitsWarper",
    }  # fmt: skip
    names = [
        "MinimumLength" if isinstance(processor, BannedIds) and processor.stop is not None else type(processor).__name__
        for processor in ours
    ]
    assert [same[name] for name in names] == [type(processor).__name__ for processor in theirs]
    for length in (PROMPT, PROMPT + 6, PROMPT + 7):
        logits_RV = logits_of("ties")
        ids_RT = ids_of(logits_RV, length)
        actual = apply(ours, logits_RV, ids_RT)
        assert torch.equal(actual, theirs(ids_RT, logits_RV))
        assert bool((actual == -torch.inf).any()) and bool((actual > -torch.inf).any(1).all())


def test_padding_in_front_repeats_nothing() -> None:
    """Rows of different lengths give what each gives alone, and what transformers gives for its padding lengths."""
    logits_RV = logits_of("plain")
    ids_RT = torch.randint(3, 9, (7, 13))
    lengths = [13, 1, 2, 7, 3, 11, 5]
    padded_RT = ids_RT.clone()
    for row, length in enumerate(lengths):
        padded_RT[row, : 13 - length] = NO_ID
    for processor in (RepetitionPenalty(1.7), NoRepeatNGram(1), NoRepeatNGram(2), NoRepeatNGram(3)):
        actual = processor(logits_RV, padded_RT)
        for row, length in enumerate(lengths):
            alone = processor(logits_RV[row : row + 1], ids_RT[row : row + 1, 13 - length :])
            assert torch.equal(actual[row : row + 1], alone)
    theirs = peer.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=13 - torch.tensor(lengths))
    assert torch.equal(RepetitionPenalty(1.7)(logits_RV, padded_RT), theirs(padded_RT.clamp(min=0), logits_RV))


def test_greedy_choice_beside_banned_ids_is_that_of_the_changed_logits() -> None:
    """Also where every id is banned, where more are than are looked for one by one, and where a ban has ended."""
    chains = ([], [BannedIds((3, 5))], [BannedIds((3, 5), stop=2), BannedIds(torch.arange(25))], [BannedIds((1,) * 29)])
    for chain in (*chains, [BannedIds(tuple(range(12))), BannedIds(torch.arange(10, 29))]):
        for length in (1, 4):
            logits_RV, ids_RT = logits_of("plain"), torch.zeros(7, length, dtype=torch.int64)
            logits_RV[0] = logits_RV[0].sort().values
            logits_RV[1, 5:] = -torch.inf
            logits_RV[2, 1] = torch.nan
            tokens_R, log_probs_R = TokenChooser(chain).choose(logits_RV, ids_RT)
            changed_RV = apply(chain, logits_RV, ids_RT)
            best_R = changed_RV.max(1).values - logits_RV.logsumexp(1)
            torch.testing.assert_close(log_probs_R[[0, 1, 3, 4, 5, 6]], best_R[[0, 1, 3, 4, 5, 6]])
            assert not log_probs_R[2].isfinite()
            is_open = best_R > -torch.inf
            assert torch.equal(tokens_R[is_open], changed_RV.argmax(1)[is_open])


@pytest.mark.parametrize("temperature", [1e-10, 1e-30, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("changes", [{}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.5}, {"top_p": 1e-9}])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_tiny_temperature_takes_the_most_probable_token(
    temperature: float, changes: dict[str, float], is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr("clearhead.generate.search.sampling.draw_tokens", lambda *_, **__: None)
    for logits_RV in (
        logits_of("plain"),
        logits_of("large") * 1e6,
        logits_of("plain").masked_fill_(torch.eye(7, 29) > 0, -torch.inf),
    ):
        for chain in ([], [RepetitionPenalty(1.3)]):
            uniform_R = torch.rand(len(logits_RV), dtype=torch.float64)
            options, ids_RT = GenerateOptions(temperature=temperature, **changes), ids_of(logits_RV)
            tokens_R, log_probs_R = TokenChooser(chain, options).choose(logits_RV, ids_RT, uniform_R)
            assert torch.equal(tokens_R, apply(chain, logits_RV, ids_RT).argmax(1)) and log_probs_R.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_sampling_sorts_nothing(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draw costs does not depend on how flat the distribution is."""
    logits_RV = logits_of(shape)
    options = GenerateOptions(temperature=0.7, top_p=0.9)
    uniform = torch.Generator().manual_seed(3)
    kept_RV = apply(build_logits_warpers(options), logits_RV, ids_of(logits_RV)) > -torch.inf
    for name in ("sort", "argsort", "topk"):
        monkeypatch.setattr(Tensor, name, None)
        monkeypatch.setattr(torch, name, None)
    for _ in range(20):
        tokens_R, _ = TokenChooser([], options).choose(
            logits_RV, ids_of(logits_RV), torch.rand(len(logits_RV), dtype=torch.float64, generator=uniform)
        )
        # Of equal logits sorting promises no order.
        assert kept_RV.gather(1, tokens_R[:, None]).all() or shape in ("flat", "ties", "large ties")
