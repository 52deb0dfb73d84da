"""Laws of search with real models: cached, batched, padded and sorted, always the same translations."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from clearhead import core as ch
from clearhead.base.errors import InputError
from clearhead.fast.cache import IndexedCache
from clearhead.generate.batching import batches_by_cost, pad_ids
from clearhead.generate.options import SearchOptions
from clearhead.generate.processors import BannedIds
from clearhead.generate.results import Continuation, Sentence
from clearhead.generate.running import PrefilledMember
from clearhead.generate.search.beam import Search
from tests.generate.tiny import BOS, EOS, PAD, run_search, some_sources, tiny_model, translate_ids

KINDS = ("original", "modern")


def translate(module: ch.Transformer, sources: list[list[int]], options: SearchOptions) -> list[list[Continuation]]:
    return translate_ids(module, sources, options)


def next_log_probs(module: ch.Transformer, source: list[int], prefixes: list[tuple[int, ...]]) -> torch.Tensor:
    """One uncached pass over an unpadded source and whole prefixes of one length."""
    with torch.no_grad():
        prefix_ids = torch.tensor([[BOS, *prefix] for prefix in prefixes])
        logits = module(torch.tensor([source] * len(prefixes)), prefix_ids).logits
    return logits[:, -1].double().log_softmax(1)


def assert_same(actual: list[list[Continuation]], expected: list[list[Continuation]]) -> None:
    assert [[c.ids for c in some] for some in actual] == [[c.ids for c in some] for some in expected]
    scores = [c.score for some in expected for c in some]
    assert [c.score for some in actual for c in some] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_beam_one_is_the_uncached_greedy_loop(kind: str) -> None:
    module = tiny_model(kind, seed=8, target_vocab=13, end_bonus=3.0)
    sources = some_sources(5, longest=3)
    for source, (actual,) in zip(sources, translate(module, sources, SearchOptions(beam_size=1)), strict=True):
        ids: tuple[int, ...] = ()
        total = 0.0
        limit = 2 * len(source) + 10
        while not ids or ids[-1] != EOS:
            (log_probs,) = next_log_probs(module, source, [ids])
            allowed = log_probs.clone()
            allowed[[PAD, BOS]] = -torch.inf
            chosen = EOS if len(ids) + 1 == limit else int(allowed.argmax())
            ids, total = (*ids, chosen), total + float(log_probs[chosen])
        assert actual.ids == ids
        assert actual.log_probability == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
def test_wide_beam_finds_the_best_of_all_sequences(kind: str, length_penalty: float) -> None:
    module = tiny_model(kind, seed=2)
    options = SearchOptions(beam_size=330, n_best=5, max_length=4, length_penalty=length_penalty, batch_size=2)
    sources = some_sources(3, longest=5)
    for source, actual in zip(sources, translate(module, sources, options), strict=True):
        finished, live = [], {(): 0.0}
        for _ in range(4):
            rows = zip(live.items(), next_log_probs(module, source, list(live)).tolist(), strict=True)
            extended = {(*ids, i): total + row[i] for (ids, total), row in rows for i in range(len(row)) if i > BOS}
            finished += [(total / len(ids) ** length_penalty, ids) for ids, total in extended.items() if ids[-1] == EOS]
            live = {ids: total for ids, total in extended.items() if ids[-1] != EOS}
        best = sorted(finished, reverse=True)[:5]
        assert [c.ids for c in actual] == [ids for _, ids in best]
        assert [c.score for c in actual] == pytest.approx([score for score, _ in best], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beam_size", [1, 5])
def test_batched_is_single_in_the_order_of_the_input(kind: str, beam_size: int) -> None:
    """Sentences of all lengths share batches and finish at different steps."""
    module = tiny_model(kind, seed=8, target_vocab=13, end_bonus=3.0)
    sources = some_sources(7, longest=17)
    options = SearchOptions(beam_size=beam_size, n_best=min(3, beam_size), max_length=13)
    together = translate(module, sources, options)
    assert len({len(some[0].ids) for some in together}) > 2, "all results are of one length: nobody left early"
    assert_same(together, [translate(module, [source], options)[0] for source in sources])
    split = dataclasses.replace(options, batch_size=3, batch_tokens=19 * beam_size)
    assert_same(translate(module, sources, split), together)


@pytest.mark.parametrize("kind", KINDS)
def test_sources_padded_left_right_or_not_at_all_agree(kind: str) -> None:
    module = tiny_model(kind, seed=8, target_vocab=13, end_bonus=3.0)
    sources = some_sources(5, longest=13)
    right_ids, right_mask = pad_ids(sources, PAD, torch.device("cpu"))
    left_ids, left_mask = right_ids.clone(), right_mask.flip(1)
    for row, source in enumerate(sources):
        left_ids[row] = torch.tensor([PAD] * (right_ids.shape[1] - len(source)) + source)
    options = SearchOptions(beam_size=3, n_best=3, max_length=11)

    def start(ids: torch.Tensor, mask: torch.Tensor) -> PrefilledMember:
        sentences, first = [Sentence(number, 11) for number in range(len(ids))], torch.full((len(ids), 1), BOS)
        search = Search(sentences, (EOS,), options, first, chain=[BannedIds((PAD, BOS))])
        cache, memory = IndexedCache(), module.encode(ids, mask=mask).memory
        return PrefilledMember(search, cache, module.decode(first, memory, memory_mask=mask, cache=cache).logits[:, -1])

    left, right = (
        run_search(
            module,
            partial(start, ids, mask),
        )
        for ids, mask in ((left_ids, left_mask), (right_ids, right_mask))
    )
    assert_same(left, right)
    assert_same(right, [translate(module, [source], options)[0] for source in sources])


def test_search_runs_without_dropout_and_leaves_the_mode_as_it_was() -> None:
    module = tiny_model("original", seed=5).train()
    sources = some_sources(5, longest=7)
    options = SearchOptions(beam_size=3, max_length=7)
    first, second = (translate(module, sources, options) for _ in range(2))
    assert module.training
    assert first == second == translate(module.eval(), sources, options)
    assert not module.training


def test_no_sources_give_no_translations() -> None:
    assert translate(tiny_model("original", seed=6), [], SearchOptions(beam_size=2)) == []


def test_bad_sources_are_all_named() -> None:
    module = tiny_model("original", seed=7)
    with pytest.raises(InputError) as caught:
        translate(module, [[3], [], [3] * 65], SearchOptions())
    message = str(caught.value)
    assert "source 2 has no tokens" in message and "source 3 has 65 tokens, but the model has 64 positions" in message


def test_batches_hold_every_sentence_once_within_the_budget() -> None:
    costs = [7, 3, 19, 5, 5, 2, 11, 40]
    batches = list(batches_by_cost(costs, budget=22, most_rows=3))
    assert sorted(i for batch in batches for i in batch) == list(range(len(costs)))
    assert batches[0] == [7], "one sentence above the budget is a batch of its own"
    assert all(len(batch) * max(costs[i] for i in batch) <= 22 for batch in batches[1:])
    assert max(len(batch) for batch in batches) == 3
