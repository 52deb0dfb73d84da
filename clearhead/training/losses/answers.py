"""The loss of the start and the end of answers.

Shape suffixes: B windows, T tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.kernels.linear_cross_entropy import NO_LABEL
from clearhead.predict.outputs import run_batch


def answer_loss(module: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> tuple[Float[Tensor, ""], int]:
    """Sum the loss of one batch of windows: the mean of two cross-entropies, of the start and of the end.

    Args:
        module: a Transformer whose head gives two scores of each token.
        batch: as of `collate_answers`.
        label_smoothing: share of the target spread evenly over the tokens that can be the start, or the end.

    Returns:
        The sum in nats and the number of windows.

    Source: arXiv 1810.04805, section 4.2.
    """
    assert isinstance(module, Transformer), "answers need the module that was built for them"
    is_possible_BT2, is_right_BT2 = batch.labels != NO_LABEL, batch.labels == 1
    logits_BT2 = run_batch(module, batch).float().masked_fill(~is_possible_BT2, -torch.inf)
    log_probabilities_BT2 = logits_BT2.log_softmax(1)
    loss = -log_probabilities_BT2.masked_fill(~is_right_BT2, 0.0).sum()
    if label_smoothing:
        mean_B2 = log_probabilities_BT2.masked_fill(~is_possible_BT2, 0.0).sum(1) / is_possible_BT2.sum(1)
        loss = (1.0 - label_smoothing) * loss - label_smoothing * mean_B2.sum()
    return loss / 2, len(batch.labels)
