"""The loss of labelled texts.

Shape suffixes: B texts, L labels.
"""

from __future__ import annotations

from typing import assert_never

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.predict.outputs import run_batch
from clearhead.task import LabelKind


def label_loss(
    module: nn.Module, batch: Batch, *, kind: LabelKind, label_smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], int]:
    """Sum the loss of one batch of labelled texts.

    Args:
        module: a Transformer with a pooling head and one output for each label.
        batch: texts, each labelled with a class, with 1 or 0 for each class, or with a number.
        kind: selects cross-entropy, binary cross-entropy of each class, or squared error.
        label_smoothing: share of the target spread evenly over the classes, or over yes and no; 0 for regression.

    Returns:
        The sum in nats, or of squared errors, and the number of labels.
    """
    assert isinstance(module, Transformer), "labels need the module that was built for them"
    logits_BL = run_batch(module, batch).float()
    match kind:
        case "single_label":
            loss = F.cross_entropy(logits_BL, batch.labels, reduction="sum", label_smoothing=label_smoothing)
        case "multi_label":
            targets_BL = batch.labels * (1.0 - label_smoothing) + label_smoothing / 2
            loss = F.binary_cross_entropy_with_logits(logits_BL, targets_BL, reduction="sum")
        case "regression":
            assert not label_smoothing, "regression has no label smoothing"
            loss = torch.square(logits_BL[:, 0] - batch.labels).sum()
        case _:
            assert_never(kind)
    return loss, batch.labels.numel()
