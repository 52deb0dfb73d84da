"""Differential attention: the weights of one softmax minus a share of the weights of another.

    weights = softmax(scores_1) - share * softmax(scores_2),  share = exp(a . b) - exp(c . d) + first_share

Two neighbouring heads form a pair. Both mix their values by the difference, so together they are one head of the paper
with twice the size. The paper's norm of each head is left out. Source: arXiv 2410.05258, eq. 1 to 3.

Legend: B batch, H heads or pairs, Q queries, K keys, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.context import Context


@dataclass(frozen=True)
class Differential:
    """Spec: initial share of the second weights that is subtracted, and size of the vectors that change it."""

    first_share: float = 0.5
    rank: int = 16


@ch.register(Differential, role="weights")
class DifferentialWeights(ch.HookPoints):
    """Computes the weights of pairs of heads from their scores."""

    points = ("share",)

    def __init__(self, num_heads: int, part: Differential) -> None:
        super().__init__()
        if num_heads % 2:
            raise ValueError(f"pairs need an even number of heads, got {num_heads}")
        self.first_share = part.first_share
        self.vectors = nn.Parameter(0.1 * torch.randn(4, num_heads // 2, part.rank))

    def forward(self, scores_BHQK: Tensor, context: Context) -> Tensor:
        """Return the weights, which sum to 1 - share over the keys."""
        weights = scores_BHQK.softmax(-1).unflatten(1, (-1, 2))
        a_HR, b_HR, c_HR, d_HR = self.vectors.float()
        share_H = (a_HR * b_HR).sum(-1).exp() - (c_HR * d_HR).sum(-1).exp() + self.first_share
        share_H = self.point("share", share_H)
        difference = weights[:, :, 0] - share_H[:, None, None] * weights[:, :, 1]
        return difference.repeat_interleave(2, dim=1)
