"""Weights rounded to bf16 beside those of an fp32 model."""

from __future__ import annotations

from torch import Tensor, nn


def rounded_weight(part: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight of a linear layer in bf16, row by row; it is rounded again only if the weight has changed."""
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    known = vars(part).get("rounded_weight")
    if known is None or known[0] != state:
        known = vars(part)["rounded_weight"] = (state, weight.detach().bfloat16().contiguous())
    rounded: Tensor = known[1]
    return rounded
