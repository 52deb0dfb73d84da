"""The contrastive loss with in-batch negatives.

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
    """Sum the cross-entropy of each text's own pair against all others of the batch, in both directions.

    Every other pair of the batch is a negative, unless it is in the same group.

    Args:
        vectors_ND: a vector for each first text; its length is ignored.
        other_ND: a vector for each second text, in the order of `vectors_ND`.
        groups_N: pairs of the same group have the same meaning and are not negatives of each other.
        temperature: divides the cosines, positive.

    Returns:
        the sum over the pairs in nats (mean of both directions) as a float32 scalar, and the number of pairs.

    Raises:
        InputError: the temperature is not positive.

    Source: arXiv 1705.00652, section 4.4 (in-batch negatives); arXiv 1807.03748, equation 4;
        arXiv 2103.00020, figure 3 (both directions).
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; expected a positive number, 0.05 is usual")
    # Divided by a small temperature, rounding to 16 bits would be a large error of a logit.
    with torch.autocast(vectors_ND.device.type, enabled=False):
        first_ND, second_ND = F.normalize(vectors_ND.float(), dim=1), F.normalize(other_ND.float(), dim=1)
        logits_NN = first_ND @ second_ND.T / temperature
        own_N = torch.arange(len(logits_NN), device=logits_NN.device)
        same_NN = groups_N[:, None] == groups_N
        logits_NN = logits_NN.masked_fill(same_NN & (own_N[:, None] != own_N), float("-inf"))
        forward, backward = (F.cross_entropy(logits, own_N, reduction="sum") for logits in (logits_NN, logits_NN.T))
        return (forward + backward) / 2, len(own_N)
