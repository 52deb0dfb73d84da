"""A translation's score is the same whether search reports it or one pass over the whole pair."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.generate.options import SearchOptions
from clearhead.generate.scoring import texts as scoring_texts
from clearhead.generate.scoring.texts import PairScore, score_targets
from clearhead.tasks.evaluate.text_loss import target_loss
from tests.generate.tiny import BOS, EOS, PAD, some_sources, tiny_model, translate_ids


def score(module: torch.nn.Module, sources: list[list[int]], targets: list[list[int]], alpha: float) -> list[PairScore]:
    return score_targets(module, sources, with_ends(targets), pad_id=PAD, length_penalty=alpha)


def with_ends(targets: list[list[int]]) -> list[list[int]]:
    return [[BOS, *target, EOS] for target in targets]


@pytest.mark.parametrize("kind", ["original", "modern"])
@pytest.mark.parametrize(("beam_size", "alpha"), [(1, 1.0), (5, 0.0), (5, 0.6), (5, 1.0)])
def test_score_is_the_one_that_search_reports(kind: str, beam_size: int, alpha: float) -> None:
    """Also for candidates cut off at the limit and for an empty translation."""
    module = tiny_model(kind, seed=8, target_vocab=13, end_bonus=3.0)
    sources = some_sources(5, longest=17)
    options = SearchOptions(beam_size=beam_size, n_best=beam_size, length_penalty=alpha, max_length=7)
    actual = translate_ids(module, sources, options)
    pairs = [(source, c) for source, some in zip(sources, actual, strict=True) for c in some]
    scores = score(module, [source for source, _ in pairs], [list(c.ids[:-1]) for _, c in pairs], alpha)
    for (_, candidate), known in zip(pairs, scores, strict=True):
        assert known.ids == candidate.ids
        assert known.score == pytest.approx(candidate.score, abs=1e-4)
        assert known.log_probability == pytest.approx(candidate.log_probability, abs=1e-4)


def test_token_log_probabilities_are_those_of_one_unpadded_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_model("original", seed=9)
    sources, targets = some_sources(5, longest=13), [[3, 4, 5], [], [6], [5] * 11, [4, 3]]
    monkeypatch.setattr(scoring_texts, "MOST_LOGITS", 7 * 13)
    for source, target, known in zip(sources, targets, score(module, sources, targets, 1.0), strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([source]), torch.tensor([[BOS, *target]])).logits[0]
        expected = logits.double().log_softmax(1)[range(len(target) + 1), [*target, EOS]].tolist()
        assert known.token_log_probabilities == pytest.approx(expected, abs=1e-5)
        assert known.log_probability == pytest.approx(sum(expected), abs=1e-5)
        assert known.score == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_loss_is_the_mean_over_tokens_and_not_over_sentences() -> None:
    module = tiny_model("modern", seed=10)
    sources, targets = some_sources(3, longest=7), [[3, 4, 5, 6, 3, 4, 5], [6], []]
    values = [p for known in score(module, sources, targets, 0.0) for p in known.token_log_probabilities]
    actual = target_loss(module, sources, with_ends(targets), pad_id=PAD)
    assert actual.num_tokens == len(values) == 11
    assert actual.loss == pytest.approx(-sum(values) / 11)
    assert actual.perplexity == pytest.approx(math.exp(actual.loss))


def test_unequal_counts_and_empty_sources_are_refused() -> None:
    module = tiny_model("original", seed=11)
    with pytest.raises(InputError, match="2 sources but 1 targets"):
        score(module, [[3], [4]], [[3]], 1.0)
    with pytest.raises(InputError, match="source 2 has no tokens"):
        score(module, [[3], []], [[3], [4]], 1.0)
    with pytest.raises(InputError, match="target 1 has 65 tokens"):
        score(module, [[3]], [[3] * 64], 1.0)
    with pytest.raises(InputError, match="at least one sentence pair"):
        target_loss(module, [], [], pad_id=PAD)
