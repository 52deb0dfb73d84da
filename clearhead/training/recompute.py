"""Activation checkpointing: the activations inside a layer are computed again when its gradient is."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from clearhead.core.stack import Layer


def recompute_layers(module: nn.Module) -> None:
    """Keep the inputs of the layers of a module alone until its backward pass, with the same gradients.

    Args:
        module: changed in place; its weights and their names stay as they are.

    Source: arXiv 1604.06174.
    """
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
