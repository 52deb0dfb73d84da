"""Contrastive search against the definition: no cache, no batch, one pass over everything for each candidate."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from clearhead import core as ch
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions
from tests.generate.tiny import BOS, EOS, PAD, some_prompts, some_sources, tiny_decoder, tiny_model


def states(module: ch.Transformer, ids: list[int], source: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """States of all tokens, and logits behind the last."""
    with torch.no_grad():
        if source is None:
            out = module(torch.tensor([ids]))
        else:
            out = module(torch.tensor([source]), torch.tensor([ids]))
    return out.hidden[0].double(), out.logits[0, -1].double()


def plain_contrastive_search(
    module: ch.Transformer, prompt: list[int], options: GenerateOptions, source: list[int] | None = None
) -> list[int]:
    """Equation 5 of arXiv 2202.06417, word by word."""
    ids = list(prompt)
    while len(ids) - len(prompt) < options.max_new_tokens and ids[-1] != EOS:
        past, logits = states(module, ids, source)
        logits[[PAD, BOS]] = -torch.inf
        probs = logits.softmax(0)
        best, best_score = -1, -float("inf")
        for candidate in probs.topk(options.top_k).indices.tolist():
            state = states(module, [*ids, candidate], source)[0][-1]
            likeness = max(float(functional.cosine_similarity(state, other, dim=0)) for other in past)
            score = (1 - options.penalty_alpha) * float(probs[candidate]) - options.penalty_alpha * likeness
            if score > best_score:
                best, best_score = candidate, score
        ids.append(best)
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["original", "modern"])
@pytest.mark.parametrize(("alpha", "count"), [(0.6, 5), (1.0, 2)])
def test_it_is_the_definition(kind: str, alpha: float, count: int) -> None:
    """In a batch of padded prompts, some of which end early."""
    module = tiny_decoder(kind, seed=1, end_bonus=2.0)
    prompts = some_prompts(4, longest=7)
    options = GenerateOptions(max_new_tokens=7, penalty_alpha=alpha, top_k=count)
    found = generate_ids(module, GenerateRequest(prompts, options, EOS, PAD, (PAD, BOS)))
    assert [list(one.ids) for (one,) in found] == [plain_contrastive_search(module, p, options) for p in prompts]
    for prompt, (one,) in zip(prompts, found, strict=True):
        ids = [*prompt, *one.ids]
        with torch.no_grad():
            log_probs = module(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(1)
        total = sum(float(log_probs[place - 1, ids[place]]) for place in range(len(prompt), len(ids)))
        assert one.log_probability == pytest.approx(total, abs=1e-4)


def test_it_runs_over_two_stacks() -> None:
    module = tiny_model("modern", seed=1, target_vocab=13, end_bonus=2.0)
    sources = some_sources(3, longest=7)
    options = GenerateOptions(max_new_tokens=5, penalty_alpha=0.6, top_k=3)
    found = generate_ids(module, GenerateRequest([[BOS]] * 3, options, EOS, PAD, (PAD, BOS), sources=sources))
    expected = [plain_contrastive_search(module, [BOS], options, source) for source in sources]
    assert [list(one.ids) for (one,) in found] == expected


def test_the_penalty_changes_what_is_chosen() -> None:
    """Otherwise the laws above could hold for greedy search, too."""
    module = tiny_decoder("modern", seed=1)
    prompts = some_prompts(4, longest=7)
    greedy, contrastive = (
        generate_ids(module, GenerateRequest(prompts, options, EOS, PAD, (PAD, BOS)))
        for options in (
            GenerateOptions(max_new_tokens=7),
            GenerateOptions(max_new_tokens=7, penalty_alpha=0.6, top_k=4),
        )
    )
    assert [one.ids for (one,) in greedy] != [one.ids for (one,) in contrastive]


def test_more_candidates_than_tokens_are_all_tokens_and_banned_ones_stay_banned() -> None:
    module = tiny_decoder("modern", seed=1)
    few = tuple({*range(13)} - {5, 7, EOS})
    options = GenerateOptions(max_new_tokens=7, penalty_alpha=0.9, top_k=50)
    ((one,),) = generate_ids(module, GenerateRequest([[BOS, 5]], options, EOS, PAD, few))
    assert set(one.ids) <= {5, 7, EOS}


def test_a_candidate_needs_a_position() -> None:
    module = tiny_decoder("original", seed=1, positions=11, end_bonus=-99.0)
    options = GenerateOptions(penalty_alpha=0.6, top_k=3)
    ((one,),) = generate_ids(module, GenerateRequest([[BOS, 3, 4]], options, EOS, PAD))
    assert len(one.ids) == 8 and one.stop_reason == "length"
    with pytest.raises(ValueError, match="contrastive search needs one more: shorten it"):
        generate_ids(module, GenerateRequest([[BOS] * 11], options, EOS, PAD))
