"""Training: accumulated gradients = one batch; every family trains with every kind of dropout, each at its own rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.core import build
from clearhead.data.batches.base import Batch
from clearhead.tasks.train import token_loss
from tests.laws.tiny import MODELS, TARGET_VOCAB, VOCAB, Reader, difference, resolve_spec, tiny
from tests.laws.tiny import hparams as hparams_of


def pairs_of(ids: Tensor, mask: Tensor, target_ids: Tensor, target_mask: Tensor, labels: Tensor) -> Batch:
    counts = {"num_labels": int((labels != -100).sum()), "num_tokens": int(mask.sum() + target_mask.sum())}
    return Batch(ids, mask, labels, **counts, rows=np.arange(len(ids)), target_ids=target_ids, target_mask=target_mask)


def rows_of(pairs: Batch, rows: slice) -> Batch:
    """Return some rows, without the padding that all of them share."""
    source, target = int(pairs.mask[rows].sum(1).max()), int(pairs.target_mask[rows].sum(1).max())
    first, second = (rows, slice(source)), (rows, slice(target))
    return pairs_of(
        pairs.ids[first], pairs.mask[first], pairs.target_ids[second], pairs.target_mask[second], pairs.labels[second]
    )


def some_pairs() -> Batch:
    mask = torch.arange(13) < torch.tensor([13, 5, 3, 2, 7])[:, None]
    target_mask = torch.arange(11) < torch.tensor([2, 11, 3, 1, 5])[:, None]
    labels = torch.randint(TARGET_VOCAB, (5, 11)).masked_fill(~target_mask, -100)
    return pairs_of(torch.randint(VOCAB, (5, 13)), mask, torch.randint(TARGET_VOCAB, (5, 11)), target_mask, labels)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("style", ["post/sinusoidal", "pre-grouped/rotary", "post/buckets"])
def test_accumulated_is_one_batch(style: str, label_smoothing: float) -> None:
    """Micro-batches of unequal size add up to the loss, the token count and the gradient of the whole batch."""
    module, pairs = tiny(f"encoder-decoder/{style}").train(), some_pairs()
    total, count = token_loss(module, pairs, label_smoothing=label_smoothing)
    names = [name for name, parameter in module.named_parameters() if parameter.dim() > 1]
    parameters = [module.get_parameter(name) for name in names]
    expected = torch.autograd.grad(total / count, parameters)
    parts = [token_loss(module, rows_of(pairs, r), label_smoothing=label_smoothing) for r in (slice(2), slice(2, 5))]
    assert [term[1] for term in parts] == [13, 9]
    assert count == 22
    assert sum(term[0].item() for term in parts) == pytest.approx(total.item(), rel=1e-5)
    actual = torch.autograd.grad(sum(term[0] for term in parts) / count, parameters)
    for name, left, right in zip(names, actual, expected, strict=True):
        assert difference(left, right) <= 3e-5, name


RATES = {"dropout": 0.2, "attention_dropout": 0.4, "activation_dropout": 0.6}


def expected_rate(path: str, model: nn.Module) -> float:
    if path.endswith(".function.dropout"):
        is_attention = isinstance(model.get_submodule(path.rpartition(".")[0]).spec, spec.Attention)
        return RATES["attention_dropout" if is_attention else "activation_dropout"]
    return RATES["dropout"]


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith(("sinusoidal", "buckets"))])
def test_each_kind_of_dropout_drops_at_its_rate(name: str) -> None:
    module = tiny(name, **RATES).train()
    places = {path: child for path, child in module.named_modules() if isinstance(child, nn.Dropout)}
    seen: dict[str, float] = {}

    def watch(path: str, inputs: Tensor, outputs: Tensor) -> None:
        entered = inputs != 0
        surviving = (outputs != 0) & entered
        seen[path] = 1.0 - float(surviving.sum() / entered.sum())
        scale = (outputs[surviving] / inputs[surviving]).median()
        torch.testing.assert_close(float(scale.detach()), 1 / (1 - expected_rate(path, module)), atol=1e-3, rtol=1e-3)

    reader = Reader.of(module, 23)
    hooks = [
        child.register_forward_hook(lambda _, args, out, path=path: watch(path, args[0], out))
        for path, child in places.items()
    ]
    ids = torch.randint(reader.vocab, (23, 13))
    logits = reader(ids).logits
    if module.encoder is not None and module.decoder is not None:
        module.encode(torch.randint(VOCAB, (23, 13)))
    assert set(seen) == set(places)
    for hook in hooks:
        hook.remove()
    for path, rate in seen.items():
        assert rate == pytest.approx(expected_rate(path, module), abs=0.04), path
    logits.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    assert not torch.equal(reader(ids).logits, reader(ids).logits), "training draws anew each time"
    module.eval()
    assert torch.equal(reader(ids).logits, reader(ids).logits), "evaluation draws nothing"


@pytest.mark.parametrize("position", RATES)
def test_a_dropout_rate_changes_only_its_own_kind(position: str) -> None:
    module = tiny("encoder-decoder/post/sinusoidal", **{position: 0.5})
    rates = {path: child.p for path, child in module.named_modules() if isinstance(child, nn.Dropout)}
    for path, rate in rates.items():
        if path.endswith(".function.dropout"):
            attends = isinstance(module.get_submodule(path.rpartition(".")[0]).spec, spec.Attention)
            mine = position == ("attention_dropout" if attends else "activation_dropout")
        else:
            mine = position == "dropout"
        assert rate == (0.5 if mine else 0.0), path


@pytest.mark.parametrize("name", ["encoder/post/learned", "decoder/pre-grouped/rotary", "encoder-decoder/post/alibi"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    module = build(resolve_spec(hparams_of(name))).train()
    ids = torch.randint(TARGET_VOCAB, (3, 7))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        states = module(ids, ids) if module.encoder is not None and module.decoder is not None else module(ids)
        loss = nn.functional.cross_entropy(states.logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
