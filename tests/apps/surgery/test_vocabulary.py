"""Larger and smaller vocabularies: the logits of remaining words do not change."""

from __future__ import annotations

import pytest
import torch

from clearhead.apps.surgery import cut_vocabulary, grow_vocabulary, replace_head
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.spec.presets.task_heads import token_head
from tests.apps.surgery.models import FAMILIES, build_model, family, same_run
from tests.laws.tiny import difference, tiny

HEADED = ["encoder/post/learned", "decoder/pre-grouped/rotary", "projection after the norm", "capped outputs"]


def check(module: Transformer) -> None:
    old = module.num_target_ids
    edited = grow_vocabulary(module, 3)
    output, expected = same_run(edited.model, vocab=old), same_run(module, vocab=old)
    assert torch.equal(output.hidden, expected.hidden)
    # Not every bit: a product of other sizes may sum in another order.
    assert difference(output.logits[..., :old], expected.logits) <= 1e-6
    assert edited.model.num_target_ids == output.logits.shape[-1] == old + 3
    assert not edited.report.new and not edited.report.dropped and edited.report.changed
    keep = [5, 0, 7, 20, 21, 22, 2]
    cut = cut_vocabulary(module, keep).model
    ids = torch.randint(len(keep), (2, 5))
    with torch.no_grad():
        more = () if module.encoder is None or module.decoder is None else (ids,)
        small, whole = (
            cut(ids, *more),
            module(torch.tensor(keep)[ids], *(torch.tensor(keep)[extra_ids] for extra_ids in more)),
        )
    assert torch.equal(small.hidden, whole.hidden)
    assert difference(small.logits, whole.logits[..., keep]) <= 1e-6


@pytest.mark.parametrize("name", HEADED)
def test_what_the_model_says_of_old_words_stays(name: str) -> None:
    check(build_model(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    check(family(FAMILIES[name]))


def test_a_new_word_is_as_likely_as_the_mean_of_the_old_ones() -> None:
    module = build_model("decoder/pre-grouped/rotary")
    old = module.num_target_ids
    grown = same_run(grow_vocabulary(module, 2).model, vocab=old).logits
    assert difference(grown[..., old], grown[..., :old].mean(-1)) <= 1e-5


def test_new_rows_may_be_those_of_other_words_or_given_or_drawn() -> None:
    module = tiny("decoder/post/alibi")
    table = module.decoder.embedding.table.weight
    pieces = grow_vocabulary(module, 2, start=[[3], [4, 8]]).model.decoder.embedding.table.weight
    assert torch.equal(pieces[-2], table[3]) and difference(pieces[-1], (table[4] + table[8]) / 2) <= 1e-6
    initial = torch.randn(2, 14)
    assert torch.equal(grow_vocabulary(module, 2, start=initial).model.decoder.embedding.table.weight[-2:], initial)
    torch.manual_seed(1)
    drawn = grow_vocabulary(module, 400, start="draw")
    rows = drawn.model.decoder.embedding.table.weight[len(table) :]
    assert 0.8 < rows.std() / table.std() < 1.25 and rows.std(0).min() > 0
    assert torch.equal(drawn.model.decoder.embedding.table.weight[: len(table)], table)


def test_two_vocabularies_are_grown_one_by_one() -> None:
    module = tiny("encoder-decoder/post/learned")
    with pytest.raises(InputError, match=r"two vocabularies .*choose side"):
        grow_vocabulary(module, 1)
    source, target = (grow_vocabulary(module, 4, side=side).model for side in ("source", "target"))
    assert (source.num_source_ids, source.num_target_ids) == (33, 23)
    assert (target.num_source_ids, target.num_target_ids) == (29, 27)
    assert torch.equal(same_run(source, vocab=20).logits, same_run(module, vocab=20).logits)
    assert same_run(target, vocab=20).logits.shape[-1] == 27


def test_labels_are_no_words() -> None:
    module = family(FAMILIES["llama"])
    labelled = replace_head(module, token_head(5)).model
    assert grow_vocabulary(labelled, 3).model.head.layers[-1].weight.shape[0] == 5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda module: grow_vocabulary(module, 0), "rows must be at least 1, got 0"),
        (lambda module: grow_vocabulary(module, 2, start=[[1]]), "2 new rows need 2 initial values, got 1"),
        (lambda module: grow_vocabulary(module, 1, start=[[99]]), "must be from 0 to 22, at least one, got"),
        (lambda module: grow_vocabulary(module, 1, start=torch.ones(1, 3)), r"shape \[1, 3\], but .* is 14 wide"),
        (lambda module: grow_vocabulary(module, 1, side="source"), "one vocabulary for both sides"),
        (lambda module: cut_vocabulary(module, [1, 1]), "row 1 is named twice"),
        (lambda module: cut_vocabulary(module, [23]), "there is no row 23; the 23 rows"),
        (lambda module: cut_vocabulary(module, []), "no row would be left"),
    ],
)
def test_what_is_refused(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(tiny("decoder/post/alibi"))
