"""Mixture of experts. Legend: B batch, T tokens, N tokens of all rows, D width, X experts, K chosen experts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.feedforward import activate
from clearhead.core.shapes import States

Tokens = Float[Tensor, "tokens width"]
Map = tuple[Tensor, Tensor | None]


class ExpertMaps(nn.Module):
    """One linear layer per expert: weights [experts, outputs, inputs], biases [experts, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(count, outputs, inputs))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(count, outputs)) if bias else None

    def split(self) -> list[Map]:
        """Return the weight and the bias of each expert, by one unbind so that gradients are stacked once."""
        weights = self.weight.unbind()
        return list(zip(weights, [None] * len(weights) if self.bias is None else self.bias.unbind(), strict=True))


class Experts(nn.Module):
    """Feed-forward networks of all experts, of one shape and with stacked weights."""

    def __init__(self, count: int, width: int, expert: spec.FeedForward) -> None:
        super().__init__()
        self.spec = expert
        self.up: ExpertMaps = ExpertMaps(count, width, expert.size, expert.bias_in)
        self.gate: ExpertMaps | None = ExpertMaps(count, width, expert.size, expert.bias_in) if expert.gated else None
        self.dropout: nn.Dropout = nn.Dropout(expert.dropout)
        self.down: ExpertMaps = ExpertMaps(count, expert.size, width, expert.bias_out)

    def split(self) -> list[tuple[Map, Map | None, Map]]:
        ups = self.up.split()
        gates = [None] * len(ups) if self.gate is None else self.gate.split()
        return list(zip(ups, gates, self.down.split(), strict=True))

    def run(self, x_ND: Tokens, maps: tuple[Map, Map | None, Map]) -> Tokens:
        up, gate, down = maps
        inner = activate(self.spec.activation, F.linear(x_ND, *up), None if gate is None else F.linear(x_ND, *gate))
        return F.linear(self.dropout(inner), *down)


class MixtureOfExperts(nn.Module):
    """Mixture of experts: sum of weight * expert(x) over a token's top k experts; a softmax router gives the weights.

    Source: arXiv 2401.04088, section 2.1; arXiv 1701.06538, section 2.1.
    """

    def __init__(self, width: int, mixture: spec.MixtureOfExperts) -> None:
        super().__init__()
        self.spec = mixture
        self.router: nn.Linear = nn.Linear(width, mixture.count, bias=mixture.router.bias)
        self.expert: Experts = Experts(mixture.count, width, mixture.expert)

    def forward(self, x_BTD: States, context: object = None) -> States:
        x_ND = x_BTD.flatten(0, 1)
        share_NX = self.router(x_ND).softmax(dim=-1, dtype=torch.promote_types(x_ND.dtype, torch.float32))
        share_NK, chosen_NK = share_NX.topk(self.spec.top_k, dim=-1)
        if self.spec.router.normalize:
            share_NK = share_NK / share_NK.sum(dim=-1, keepdim=True)
        share_NK = share_NK.to(x_ND.dtype)
        mixed_ND = torch.zeros_like(x_ND)
        for index, maps in enumerate(self.expert.split()):
            # An expert reads only the tokens that chose it: work grows with k, not with the number of experts.
            token_M, place_M = (chosen_NK == index).nonzero(as_tuple=True)
            if len(token_M):
                given_MD = self.expert.run(x_ND[token_M], maps) * share_NK[token_M, place_M, None]
                mixed_ND = mixed_ND.index_add(0, token_M, given_MD.to(x_ND.dtype))  # autocast computes in fewer bits
        return mixed_ND.view_as(x_BTD)
