"""How good a model is at the tokens it is asked for: the loss of each, and how many come first.

Shape suffixes: N tokens that are asked for, D width, C rows of one chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.training.losses.cross_entropy import projected_cross_entropy, select_rows
from clearhead.training.settings import Validation

_CHUNK_BYTES = 64 << 20


def score_tokens(module: nn.Module, batches: Iterable[Batch], device: torch.device) -> Validation:
    """Return the mean loss of a label in nats, and as the score how many percent of the labels the model puts first.

    Args:
        module: a Transformer with a vocabulary head, in evaluation mode.
        batches: with a label at each token that is asked for; a decoder reads what comes before it.
        device: where the module is.
    """
    assert isinstance(module, Transformer), "tokens are scored by the module that was built for them"
    loss, hits, count = 0.0, 0, 0
    for batch in batches:
        states_ND, labels_N = _asked(module, batch.to(device))
        assert module.head is not None
        projection = module.head.projection()
        loss += float(projected_cross_entropy(states_ND, projection, labels_N))
        rows = max(1, _CHUNK_BYTES // (4 * projection.weight_VD.shape[0]))
        for states_CD, labels_C in zip(states_ND.split(rows), labels_N.split(rows), strict=True):
            hits += int((projection.outputs(states_CD).argmax(dim=1) == labels_C).sum())
        count += len(labels_N)
    return Validation(loss=loss / max(1, count), score=100 * hits / max(1, count))


def _asked(module: Transformer, batch: Batch) -> tuple[Float[Tensor, "labels width"], Int[Tensor, " labels"]]:
    """Return the states before the vocabulary matrix at the tokens with a label, and the labels."""
    out = module.states(
        batch.ids,
        batch.target_ids,
        mask=None if module.encoder is None else batch.mask,
        segments=batch.segments,
        documents=batch.documents,
        prefix=batch.prefix,
    )
    labels_N = batch.labels.flatten()
    rows = (labels_N != NO_LABEL).nonzero().squeeze(1)
    assert module.head is not None, "tokens are scored by a head over the vocabulary"
    return module.head.prepare(select_rows(out.hidden.flatten(0, 1), rows)), labels_N[rows]
