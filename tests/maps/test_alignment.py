"""Laws of the alignment: distributions over real source tokens, equal to the model's weights, in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.errors import InputError
from clearhead.maps.alignment import memory_attention_paths, memory_attention_weights
from clearhead.maps.hook_points import capture, edit
from clearhead.presets.hyperparameters import Hyperparameters, build_spec

SENTENCES, SOURCE, TARGET, LAYERS, HEADS, VOCABULARY = 3, 11, 5, 2, 7, 23


def build(family: str = "encoder-decoder") -> ch.Transformer:
    torch.manual_seed(5)
    hparams = Hyperparameters(
        family=family, layers=LAYERS, width=14, heads=HEADS, feedforward=17, dropout=0.1, tie="none"
    )
    return ch.build(build_spec(hparams, source_vocab=VOCABULARY, target_vocab=VOCABULARY))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(VOCABULARY, (SENTENCES, SOURCE))
    mask = torch.arange(SOURCE)[None] < torch.tensor([[11], [7], [2]])
    return ids, mask, torch.randint(VOCABULARY, (SENTENCES, TARGET))


def test_rows_are_distributions_over_real_tokens() -> None:
    ids, mask, target_ids = batch()
    weights = memory_attention_weights(build(), ids, mask, target_ids)
    assert weights.shape == (SENTENCES, LAYERS, HEADS, TARGET, SOURCE)
    torch.testing.assert_close(weights.sum(-1), torch.ones(SENTENCES, LAYERS, HEADS, TARGET))
    for sentence in range(SENTENCES):
        assert not weights[sentence][..., ~mask[sentence]].any()


def test_a_sentence_alone_has_the_same_weights_as_in_a_batch() -> None:
    module, (ids, mask, target_ids) = build(), batch()
    together = memory_attention_weights(module, ids, mask, target_ids)
    alone = memory_attention_weights(module, ids[1:2, :7], mask[1:2, :7], target_ids[1:2])
    torch.testing.assert_close(together[1:2, ..., :7], alone)


def test_weights_are_causal_in_the_target() -> None:
    module, (ids, mask, target_ids) = build(), batch()
    changed = target_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    before, after = (
        memory_attention_weights(module, ids, mask, target_ids),
        memory_attention_weights(module, ids, mask, changed),
    )
    torch.testing.assert_close(before[..., :-1, :], after[..., :-1, :])
    assert not torch.allclose(before[..., -1, :], after[..., -1, :])


def test_reading_weights_changes_nothing() -> None:
    module, (ids, mask, target_ids) = build(), batch()
    module.train()
    memory_attention_weights(module, ids, mask, target_ids)
    assert module.training
    module.eval()
    before = module(ids, target_ids, mask=mask).logits
    with capture(module, "decoder.*.weights"):
        torch.testing.assert_close(module(ids, target_ids, mask=mask).logits, before)
    assert torch.equal(module(ids, target_ids, mask=mask).logits, before)


def test_edited_weights_change_the_output() -> None:
    module, (ids, mask, target_ids) = build().eval(), batch()
    points = [f"{path}.weights" for path in memory_attention_paths(module)]
    assert len(points) == LAYERS
    before = module(ids, target_ids, mask=mask).logits
    with edit(module, dict.fromkeys(points, lambda weights, at: torch.zeros_like(weights))):
        blind = module(ids, target_ids, mask=mask).logits
        other = module(ids.flip(1), target_ids, mask=mask).logits
    assert not torch.allclose(blind, before)
    torch.testing.assert_close(blind, other)  # what the decoder does not look at cannot matter


def test_a_model_without_memory_is_refused() -> None:
    with pytest.raises(InputError, match="this one has no such attention"):
        memory_attention_paths(build("decoder"))
