"""Custom modules that cache nothing between calls. Legend: B batch, T tokens, D width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clearhead.core.context import Context
from clearhead.core.shapes import States


class RecomputedModule(nn.Module):
    """Mixin for branch functions that read all tokens again in each call; the cache stores their inputs."""

    def forward(self, x_BTD: States, context: Context) -> Any:
        """Return the outputs for the tokens of this call."""
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
    """Return the context of a call that reads all tokens at once."""
    masking = replace(context.masking, num_queries=context.masking.num_keys)
    return replace(context, masking=masking, query_position=context.key_position, cache=None, masks={}, shared={})
