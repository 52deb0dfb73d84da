"""The loss of a batch of labelled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.fast.training.loss import fast_cross_entropy
from clearhead.generate.scoring.token_accuracy import labelled_states, projected_cross_entropy


def token_loss(module: nn.Module, batch: Batch, *, label_smoothing: float) -> tuple[Float[Tensor, ""], int]:
    """Sum the cross-entropy of one batch over its labels, without building its logits.

    Args:
        module: a Transformer with a head over the vocabulary.
        batch: ids and labels, on the module's device.
        label_smoothing: share of the target that is spread evenly over the vocabulary, from 0 up to but not 1.

    Returns:
        the sum in nats and the number of labels.
    """
    model = cast(Transformer, module)
    states_ND, labels_N = labelled_states(model, batch)
    assert model.head is not None, "token loss needs a head over the vocabulary"
    loss = fast_cross_entropy(
        states_ND, model.head.projection(), labels_N, label_smoothing=label_smoothing, plain=projected_cross_entropy
    )
    return loss, labels_N.numel()


def mean_token_loss(module: nn.Module, batches: Iterable[Batch], device: torch.device) -> float:
    """Return the mean loss of a label in nats, without label smoothing."""
    total, count = 0.0, 0
    for batch in batches:
        loss, labels = token_loss(module, batch.to(device), label_smoothing=0.0)
        total += float(loss)
        count += labels
    return total / max(1, count)
