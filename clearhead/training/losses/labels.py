"""The loss of labels: of whole texts, and of the first pieces of words.

Shape suffixes: B texts, L labels, N words.
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
        module: a Transformer whose head pools and gives one output for each label.
        batch: texts with a class, with 1 or 0 for each class, or with a number each.
        kind: which of these: cross-entropy, binary cross-entropy of each decision, or squared difference.
        label_smoothing: share of the target that is spread evenly, over the classes or over yes and no; for numbers 0.

    Returns:
        The sum in nats, or of squared differences, and the number of labels it runs over.
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
            assert not label_smoothing, "numbers have no share to spread"
            loss = torch.square(logits_BL[:, 0] - batch.labels).sum()
        case _:
            assert_never(kind)
    return loss, batch.labels.numel()
