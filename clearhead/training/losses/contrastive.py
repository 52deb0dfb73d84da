"""The contrastive loss: of all texts in a batch, each should be nearest to the one it belongs with.

Shape suffixes: N pairs of a batch, D width of a vector.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import InputError


def contrastive_loss(
    vectors_ND: Float[Tensor, "pairs width"],
    other_ND: Float[Tensor, "pairs width"],
    groups_N: Int64[Tensor, " pairs"],
    *,
    temperature: float,
) -> tuple[Float[Tensor, ""], int]:
    """Sum the cross-entropy of finding each pair's other side among all others of the batch, in both directions.

    Every other pair of the batch gives one wrong answer, unless its texts are known to mean the same.

    Args:
        vectors_ND: one vector for each first text; only its direction counts.
        other_ND: one vector for each second text, row by row what belongs to `vectors_ND`.
        groups_N: pairs with one number mean the same, and are no wrong answers to each other.
        temperature: what cosines are divided by, positive.

    Returns:
        the sum over the pairs in nats, each pair the mean of its two directions, as a float32 scalar; and their count.

    Raises:
        InputError: the temperature is not positive.

    Source: arXiv 1705.00652, section 4.4 (the other answers of a batch as wrong ones); arXiv 1807.03748, equation 4;
        arXiv 2103.00020, figure 3 (both directions).
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; expected a positive number, 0.05 is usual")
    # Divided by a small temperature, the rounding of 16 bits would be a large part of a logit.
    with torch.autocast(vectors_ND.device.type, enabled=False):
        first_ND, second_ND = F.normalize(vectors_ND.float(), dim=1), F.normalize(other_ND.float(), dim=1)
        logits_NN = first_ND @ second_ND.T / temperature
        own_N = torch.arange(len(logits_NN), device=logits_NN.device)
        same_NN = groups_N[:, None] == groups_N
        logits_NN = logits_NN.masked_fill(same_NN & (own_N[:, None] != own_N), float("-inf"))
        forward, backward = (F.cross_entropy(logits, own_N, reduction="sum") for logits in (logits_NN, logits_NN.T))
        return (forward + backward) / 2, len(own_N)
