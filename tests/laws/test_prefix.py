"""A prefix mask: causal, except for a prefix that all tokens may attend to; causal with an empty prefix."""

from __future__ import annotations

from dataclasses import replace

import torch

from clearhead.core import Cache, Sequence, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

HPARAMS = Hyperparameters(
    family="decoder",
    layers=3,
    width=14,
    heads=2,
    head_size=10,
    feedforward=17,
    positions="rotary",
    prefix=True,
    dropout=0.0,
)


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(5)
    prefix = build(build_spec(HPARAMS, source_vocab=29, target_vocab=29)).eval()
    causal = build(build_spec(replace(HPARAMS, prefix=False), source_vocab=29, target_vocab=29)).eval()
    causal.load_state_dict(prefix.state_dict())
    return prefix, causal


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 29, (3, 13), generator=torch.Generator().manual_seed(7))
    return ids, torch.arange(13) < torch.tensor([[5], [0], [11]])


def test_without_a_prefix_the_mask_is_causal() -> None:
    model, causal = models()
    ids, _ = sample()
    torch.testing.assert_close(model(ids).logits, causal(ids).logits)
    torch.testing.assert_close(
        model.run(Sequence(ids, prefix=torch.zeros_like(ids, dtype=torch.bool))).logits, causal(ids).logits
    )


def test_all_tokens_attend_to_the_prefix_and_none_to_later_tokens_after_it() -> None:
    model, _ = models()
    ids, prefix = sample()
    embeddings = model.decoder.embedding.rows.weight[ids].detach().requires_grad_()
    logits = model.run(Sequence(ids, prefix=prefix, embeddings=embeddings)).logits
    for row in range(3):
        for query in range(13):
            (gradient,) = torch.autograd.grad(logits[row, query].sum(), embeddings, retain_graph=True)
            seen = gradient[row].abs().sum(1) > 0
            wanted = (torch.arange(13) <= query) | prefix[row]
            assert torch.equal(seen, wanted), (row, query)


def test_decoding_after_a_prefix_equals_one_pass_over_the_whole_sequence() -> None:
    model, _ = models()
    ids, _ = sample()
    cache = Cache()
    first = model.run(Sequence(ids[:, :5], prefix=torch.ones(3, 5, dtype=torch.bool)), cache=cache).logits
    steps = [model(ids[:, place : place + 1], cache=cache).logits for place in range(5, 13)]
    whole = model.run(Sequence(ids, prefix=(torch.arange(13) < 5).expand(3, 13))).logits
    torch.testing.assert_close(torch.cat([first, *steps], 1), whole, rtol=1e-5, atol=1e-5)
