"""Loss and accuracy of a model at the labelled tokens of batches.

Shapes: N labelled tokens, D width, C rows of one chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.core import Sequence, Transformer
from clearhead.core.head import Projection
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL, linear_cross_entropy, select_rows
from clearhead.data.batches.base import Batch
from clearhead.data.feed import compute_each
from clearhead.generate.scoring.result import Validation

_CHUNK_BYTES = 64 << 20


def score_tokens(module: nn.Module, batches: Iterable[Batch], device: torch.device) -> Validation:
    """Return the mean loss per label in nats, and as the score the percentage of labels that the model ranks first.

    Args:
        module: a Transformer with a head over the vocabulary, in evaluation mode.
        batches: batches with a label at each token to predict.
        device: device of the module.
    """
    assert isinstance(module, Transformer) and module.head is not None, "the model must have a head over a vocabulary"
    model, total, num_hits, count = module, 0.0, 0, 0

    def run(_: int, batch: Batch) -> tuple[Tensor, Tensor]:
        return score_batch(model, batch)

    for num_labels, (loss, hits) in compute_each(((batch.num_labels, batch) for batch in batches), run, device):
        total += float(loss)
        num_hits += int(hits)
        count += num_labels
    return Validation(loss=total / max(1, count), score=100 * num_hits / max(1, count))


def score_batch(module: Transformer, batch: Batch) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the summed loss of the labels in nats, and the number of labels that the model ranks first.

    Args:
        module: a Transformer with a head over the vocabulary, in evaluation mode.
        batch: the ids and labels, on the device of the module.
    """
    assert module.head is not None, "the model must have a head over a vocabulary"
    projection = module.head.projection()
    rows = max(1, _CHUNK_BYTES // (4 * projection.weight_VD.shape[0]))
    states_ND, labels_N = labelled_states(module, batch)
    chunks = zip(states_ND.split(rows), labels_N.split(rows), strict=True)
    hits = [(projection.outputs(states_CD).argmax(dim=1) == labels_C).sum() for states_CD, labels_C in chunks]
    return projected_cross_entropy(states_ND, projection, labels_N), torch.stack(hits).sum()


def labelled_states(module: Transformer, batch: Batch) -> tuple[Float[Tensor, "labels width"], Int[Tensor, " labels"]]:
    """Return the inputs of the head's last linear map at the labelled tokens, and the labels.

    On a GPU, tokens without a label are among them, since only the host can count the labels of a batch.

    A causal decoder gets no padding mask. Padding is on the right, where real tokens cannot see it, and without a mask
    attention uses its causal kernel.
    """
    mask = None if module.encoder is None else batch.mask
    source = Sequence(batch.ids, mask, batch.segments, documents=batch.documents)
    out = module(source, batch.target_ids, head=False)
    assert module.head is not None, "the model must have a head over a vocabulary"
    hidden_ND, labels_N, rows = out.hidden.flatten(0, 1), batch.labels.flatten(), batch.label_rows
    if labels_N.device.type == "cpu":
        rows = (labels_N != NO_LABEL).nonzero().squeeze(1)
    if rows is None:
        return module.head.prepare(hidden_ND), labels_N
    return module.head.prepare(select_rows(hidden_ND, rows)), labels_N[rows]


def projected_cross_entropy(
    states_ND: Float[Tensor, "rows width"],
    projection: Projection,
    labels_N: Int[Tensor, " rows"],
    *,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Return the summed cross-entropy of a head's last linear map in nats, without building all logits at once.

    Args:
        states_ND: inputs of the linear map.
        projection: the linear map.
        labels_N: vocabulary ids; NO_LABEL for rows without a loss.
        label_smoothing: share of the target that is spread evenly over the vocabulary, at least 0 and below 1.
    """
    if states_ND.device.type != "cpu":
        from clearhead.fast.training.gpu_loss import gpu_cross_entropy  # a computation on a CPU does not need it

        return gpu_cross_entropy(states_ND, projection, labels_N, label_smoothing=label_smoothing)
    return linear_cross_entropy(
        states_ND,
        projection.weight_VD,
        projection.bias_V,
        labels_N,
        label_smoothing=label_smoothing,
        scale=projection.scale,
        soft_cap=projection.soft_cap,
    )
