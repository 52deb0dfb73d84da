"""Attention of the decoder to the source while it writes each target token.

Shape legend: B sentences, L attentions to the memory, H heads, T target tokens, S source tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import InputError
from clearhead.maps.hook_points import capture
from clearhead.spec import Attention, walk

if TYPE_CHECKING:
    from clearhead.core.model import Transformer


def memory_attention_paths(module: Transformer) -> list[str]:
    """Return the paths of the attentions to the memory, lowest layer first.

    Raises:
        InputError: the model has none.
    """
    paths = [path for path, node in walk(module.spec) if isinstance(node, Attention) and node.source == "memory"]
    if not paths:
        raise InputError("alignment needs a decoder that attends to an encoder; this one has no such attention")
    return paths


@torch.no_grad()
def memory_attention_weights(
    module: Transformer,
    ids: Int[Tensor, "batch source"],
    mask: Bool[Tensor, "batch source"],
    target_ids: Int[Tensor, "batch target"],
    target_mask: Bool[Tensor, "batch target"] | None = None,
) -> Float[Tensor, "batch layers heads target source"]:
    """Return the weights with which each target position attends to the source, by one forward pass in eval mode.

    Args:
        module: a model whose decoder attends to its encoder.
        ids: input of the encoder, int64.
        mask: True at real source tokens.
        target_ids: input of the decoder, int64; row t of the weights belongs to the token after `target_ids[t]`.
        target_mask: True at real target tokens; None: all are real.

    Returns:
        weights; each row over the source sums to one.

    Raises:
        InputError: the model has no attention to the memory.
    """
    points = [f"{path}.weights" for path in memory_attention_paths(module)]
    was_training = module.training
    module.eval()
    try:
        with capture(module, points) as found:
            module(ids, target_ids, mask=mask, target_mask=target_mask)
    finally:
        module.train(was_training)
    return torch.stack([found.tensor(point) for point in points], dim=1)
