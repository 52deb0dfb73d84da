"""How alike two texts are: the cosine of their vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from clearhead.core import Transformer
from clearhead.evaluate.retrieval import check_pairs
from clearhead.predict.embed import embed
from clearhead.text.tokenizer import Tokenizer


def similarity(
    module: Transformer,
    tokenizer: Tokenizer,
    firsts: Sequence[str],
    seconds: Sequence[str],
    *,
    batch_tokens: int | None = None,
) -> Float32[ndarray, " pairs"]:
    """Return the cosine of the two vectors of each pair of texts, from -1 to 1.

    Args:
        module: a model whose head makes one vector of a text.
        tokenizer: of what the model reads.
        firsts: the first text of each pair.
        seconds: the second text of each pair.
        batch_tokens: most padded tokens read together, None: `read_tokens`.

    Raises:
        InputError: the counts differ, or as `embed`.
    """
    check_pairs(firsts, seconds)
    vectors_ND = embed(module, tokenizer, [*firsts, *seconds], batch_tokens=batch_tokens)
    # A head without a last step to length 1 is possible, and the cosine asks for directions only.
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    unit_ND = vectors_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
    cosine_N = (unit_ND[: len(firsts)] * unit_ND[len(firsts) :]).sum(1)
    bounded_N: Float32[ndarray, " pairs"] = np.clip(cosine_N, -1.0, 1.0)
    return bounded_N
