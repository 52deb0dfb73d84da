"""A mixture of experts is the weighted sum of its formula, and an expert runs only on the tokens routed to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.rare.mixture_of_experts import MixtureOfExperts
from tests.laws.tiny import difference

WIDTH, SIZE, COUNT = 7, 11, 5


def mixture(top_k: int, *, normalize: bool = True, bias: bool = True, **expert: object) -> MixtureOfExperts:
    feed_forward = spec.FeedForward(**({"size": SIZE, "activation": "silu", "gated": True} | expert))
    router = spec.Router(bias=bias, normalize=normalize)
    module = MixtureOfExperts(
        WIDTH, spec.MixtureOfExperts(count=COUNT, top_k=top_k, expert=feed_forward, router=router)
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("gated", [True, False])
def test_a_mixture_is_the_weighted_sum_of_the_best_experts(top_k: int, normalize: bool, gated: bool) -> None:
    module, x = mixture(top_k, normalize=normalize, gated=gated), torch.randn(2, 3, WIDTH)
    expert = module.expert
    expected = torch.zeros_like(x)
    for row in range(2):
        for position in range(3):
            token = x[row, position]
            shares = (module.router.weight @ token + module.router.bias).softmax(0)
            best = shares.argsort(descending=True)[:top_k]
            total = shares[best].sum() if normalize else 1.0
            for index in best.tolist():
                up = expert.up.weight[index] @ token + expert.up.bias[index]
                inner = F.silu(up)
                if expert.gate is not None:
                    inner = F.silu(expert.gate.weight[index] @ token + expert.gate.bias[index]) * up
                out = expert.down.weight[index] @ inner + expert.down.bias[index]
                expected[row, position] += shares[index] / total * out
    assert difference(module(x), expected) <= 1e-5


def test_experts_without_tokens_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = mixture(2), []
    run = module.expert.run
    monkeypatch.setattr(module.expert, "run", lambda x, maps: seen.append(len(x)) or run(x, maps))
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.bias.copy_(torch.tensor([0.0, 3.0, -1.0, 2.0, 1.0]))
    module(torch.randn(2, 3, WIDTH))
    assert seen == [6, 6], "experts 1 and 3 read the six tokens once each"
    module(torch.randn(2, 0, WIDTH))
    assert seen == [6, 6]


def test_the_clamped_gate_is_its_formula() -> None:
    module = mixture(1, activation=spec.ClampedGate(alpha=1.7, limit=0.5))
    maps = module.expert.split()[3]
    x = torch.randn(13, WIDTH)
    up, gate = F.linear(x, *maps[0]), F.linear(x, *maps[1])
    assert gate.min() < -0.5 and gate.max() > 0.5 and up.min() < -0.5 and up.max() > 0.5
    gate, up = torch.minimum(gate, torch.tensor(0.5)), up.clip(-0.5, 0.5)
    expected = F.linear((up + 1) * gate / (1 + torch.exp(-1.7 * gate)), *maps[2])
    assert difference(module.expert.run(x, maps), expected) <= 1e-5


def test_experts_with_clamped_gates_are_those_of_transformers() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=WIDTH, intermediate_size=SIZE, num_local_experts=COUNT, num_experts_per_tok=3, num_hidden_layers=1,
        num_attention_heads=1, experts_implementation="eager",
    )  # fmt: skip
    theirs = GptOssMLP(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    module = mixture(3, activation=spec.ClampedGate(alpha=config.swiglu_alpha, limit=config.swiglu_limit))
    experts = theirs.experts
    module.load_state_dict(
        {
            "router.weight": theirs.router.weight, "router.bias": theirs.router.bias,
            "expert.gate.weight": experts.gate_up_proj[..., ::2].mT,
            "expert.up.weight": experts.gate_up_proj[..., 1::2].mT,
            "expert.gate.bias": experts.gate_up_proj_bias[..., ::2],
            "expert.up.bias": experts.gate_up_proj_bias[..., 1::2],
            "expert.down.weight": experts.down_proj.mT, "expert.down.bias": experts.down_proj_bias,
        }
    )  # fmt: skip
    x = 5 * torch.randn(3, 13, WIDTH)
    assert difference(module(x), theirs(x)[0]) <= 1e-5
