"""Attention for training on a GPU: the fused kernel drops attention weights and trains score biases there."""

from __future__ import annotations

from torch import nn

from clearhead.base.hooks import is_seen
from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.core.kernels.attention import Kernel, choose_kernel, fused_attention
from clearhead.core.shapes import Keys, Queries
from clearhead.fast.replica import override, plain_type


def fuse_attention(tree: nn.Module) -> None:
    """Make the attentions of a tree on a GPU train with the fused kernel, except custom classes with their own steps.

    Args:
        tree: a replica.
    """
    for module in tree.modules():
        steps = (getattr(plain_type(module), name, None) for name in ("attend", "weights", "scores"))
        if isinstance(module, Attention) and [*steps] == [Attention.attend, Attention.weights, Attention.scores]:
            override(module, GPUAttention)


class GPUAttention(Attention):
    """Attention that trains with the fused kernel, with dropout of its weights and with trained score biases."""

    def kernel(self) -> Kernel:
        """Return the kernel, "fused" or "eager", and the reason."""
        is_watched = self.is_watched("scores", "weights") or is_seen(self.dropout)
        return choose_kernel(self.spec, 0.0, False, is_watched, self.eager_reason)

    def attend(self, query: Queries, key: Keys, value: Keys, context: Context) -> Queries:
        """Attend by the fused kernel, unless its weights are watched or the kernel cannot compute them."""
        if self.kernel()[0] == "eager":
            return super().attend(query, key, value, context)
        bias, is_causal = self.bias(query, key, context), context.masking.is_only_causal(self.spec.mask)
        is_causal, dropout = is_causal and bias is None, self.dropout.p if self.training else 0.0
        mask = None if is_causal else self.mask(context)
        return fused_attention(query, key, value, mask, bias, scale=self.scale, is_causal=is_causal, dropout=dropout)
