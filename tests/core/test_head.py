"""Pooling covers real tokens only, with padding on either side; normalized vectors have length 1."""

from __future__ import annotations

import pytest
import torch

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core.head import Head, Pool
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.task_heads import label_head, token_head, vector_head, with_head

WIDTH = 7


def states() -> tuple[torch.Tensor, list[int]]:
    torch.manual_seed(3)
    return torch.randn(5, 11, WIDTH), [11, 1, 3, 8, 5]


@pytest.mark.parametrize("by", ["first", "mean", "last", "max", "root", "weighted", ("weighted", "last", "root")])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_pool_is_that_of_the_real_tokens_alone(by: str | tuple[str, ...], side: str) -> None:
    real, lengths = states()
    head = Head(WIDTH, spec.Head(layers=(spec.Pool(by=by),)))
    padded = torch.full((5, 13, WIDTH), 1e6)
    mask = torch.zeros(5, 13, dtype=torch.bool)
    for row, length in enumerate(lengths):
        columns = slice(0, length) if side == "right" else slice(13 - length, 13)
        padded[row, columns], mask[row, columns] = real[row, :length], True
    pooled = head(padded, mask)
    for row, length in enumerate(lengths):
        text = real[row, :length]
        weights = torch.arange(1.0, length + 1)[:, None]
        kinds = {
            "first": text[0], "mean": text.mean(0), "last": text[-1], "max": text.amax(0),
            "root": text.sum(0) / length**0.5, "weighted": (text * weights).sum(0) / weights.sum(),
        }  # fmt: skip
        expected = torch.cat([kinds[mode] for mode in ([by] if isinstance(by, str) else by)])
        torch.testing.assert_close(pooled[row], expected)
        torch.testing.assert_close(head(text[None])[0], expected)


def test_several_pools_make_the_head_as_many_times_as_wide() -> None:
    head = spec.Head(layers=(spec.Pool(by=("mean", "max")), spec.Linear(size=3), spec.L2Normalize()))
    assert spec.Head.model_validate_json(head.model_dump_json()) == head
    assert (head.output_width(WIDTH, 1), head.output_width(WIDTH)) == (2 * WIDTH, 3)
    assert Head(WIDTH, head).layers[1].weight.shape == (3, 2 * WIDTH)
    assert Head(WIDTH, spec.Head(layers=head.layers[:1]))(states()[0]).shape == (5, 2 * WIDTH)


def test_a_normalized_vector_has_length_one_and_keeps_its_direction() -> None:
    real, _ = states()
    head = Head(WIDTH, vector_head(pool="mean"))
    pooled, mean = head(real), real.mean(1)
    torch.testing.assert_close(pooled.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(pooled * mean.norm(dim=1, keepdim=True), mean)


def test_a_head_with_pooling_returns_sequence_outputs_and_one_without_token_outputs() -> None:
    real, _ = states()
    pooled, tokens = Head(WIDTH, label_head(WIDTH, 3, pool="last")), Head(WIDTH, token_head(3))
    for module in (pooled, tokens):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    assert pooled.is_pooled and pooled(real).shape == (5, 3)
    assert not tokens.is_pooled and tokens(real).shape == (5, 11, 3)


def test_a_head_that_does_not_fit_is_refused() -> None:
    model = build_spec(Hyperparameters(family="encoder", layers=1, width=6, heads=2), source_vocab=29, target_vocab=29)
    assert with_head(model, vector_head(pool="first")).encoder == model.encoder
    twice = spec.Head(layers=(spec.Pool(by="mean"), spec.Pool(by="mean")))
    with pytest.raises(InputError, match="at most one pool is possible, got 2"):
        with_head(model, twice)
    with pytest.raises(InputError, match="without a pool the last layer must be linear"):
        with_head(model, spec.Head(layers=(spec.L2Normalize(),)))


def test_a_soft_cap_bounds_the_outputs_of_the_last_layer() -> None:
    head = Head(
        WIDTH, spec.Head(layers=(spec.Activation(function="tanh"), spec.Linear(size=11), spec.SoftCap(value=0.5)))
    )
    torch.nn.init.normal_(head.layers[1].weight)
    x = torch.randn(2, 3, WIDTH)
    raw = head.layers[1](x.tanh())
    assert raw.abs().max() > 1
    torch.testing.assert_close(head(x), 0.5 * torch.tanh(raw / 0.5))
    torch.testing.assert_close(head.projection().outputs(head.prepare(x)), head(x))


@pytest.mark.parametrize("width", [7, 64, 110])
@pytest.mark.parametrize("length", [5, 7, 37])
def test_padding_changes_no_bit_of_a_mean(width: int, length: int) -> None:
    pool = Pool(spec.Pool(by="mean"))
    states = torch.randn(3, length + 19, width)
    alone = pool(states[:, :length], None)
    for more in (1, 2, 3, 19):
        mask = (torch.arange(length + more) < length).expand(3, -1)
        assert torch.equal(pool(states[:, : length + more], mask), alone)
