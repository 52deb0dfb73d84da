"""Generation with custom modules without a cache: all tokens are computed again. Legend: B batch, T tokens, D width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clearhead.core.context import Context
from clearhead.core.shapes import States


class RecomputedModule(nn.Module):
    """Mixin for custom modules without a cache: their inputs are cached, and each call computes all tokens."""

    def forward(self, x_BTD: States, context: Context) -> Any:
        """Compute all tokens, and return the outputs [B, T, D] of the new tokens."""
        if context.cache is None:
            return super().forward(x_BTD, context)
        cached, count = context.cached_tensors(self), x_BTD.shape[1]
        cached["inputs"] = torch.cat([cached["inputs"], x_BTD], dim=1) if "inputs" in cached else x_BTD
        if "all tokens" not in context.shared:
            context.shared["all tokens"] = _with_all_tokens(context)
        whole = context.shared["all tokens"]
        whole.depth = context.depth
        return super().forward(cached["inputs"], whole)[:, -count:]


def _with_all_tokens(context: Context) -> Context:
    """Return a copy of the context without cache, in which all tokens are queries."""
    masking = replace(context.masking, num_queries=context.masking.num_keys)
    return replace(context, masking=masking, query_position=context.key_position, cache=None, masks={}, shared={})
