"""Text embeddings, and the similarity of two texts.

Shape suffixes: N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from clearhead import spec
from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.errors import InputError, RunFailure
from clearhead.predict.outputs import encode_sides, max_input_length, pooled_outputs
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer


def embed(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Float32[ndarray, "texts width"]:
    """Return one vector for each text, pooled and normalised as the model's head defines.

    A vector does not depend on the other texts of its batch, up to rounding.

    Args:
        module: a model whose head pools a text into one vector; one in training runs as a replica in evaluation mode.
        tokenizer: of the model's input.
        texts: texts, or pairs of texts that are read together; an empty text is read as its special tokens alone.
        max_length: of the training texts, special tokens included; longer texts are truncated. None: not known.
        batch_size: most texts of one batch; None: no limit but the tokens.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer text is a batch of its own.

    Raises:
        InputError: the head does not pool, or texts and pairs are mixed.
        RunFailure: a vector is not finite.
    """
    width = vector_width(module)
    collator = InputCollator.of(module.spec, tokenizer)
    sides, _ = encode_sides(tokenizer, texts, max_input_length(module, max_length))
    vectors_ND: Float32[ndarray, "texts width"] = pooled_outputs(
        module, collator, sides, width=width, batch_size=batch_size, batch_tokens=batch_tokens
    ).numpy()
    broken = np.flatnonzero(~np.isfinite(vectors_ND).all(1))
    if len(broken):
        raise RunFailure(
            f"the vector of text {broken[0] + 1} is not finite, and those of {len(broken) - 1} others: the weights are "
            "damaged or too large for this precision; try precision='fp32'"
        )
    return vectors_ND


def similarity(
    module: Transformer,
    tokenizer: Tokenizer,
    firsts: Sequence[str],
    seconds: Sequence[str],
    *,
    max_length: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Float32[ndarray, " pairs"]:
    """Return the cosine similarity of the two vectors of each pair of texts, from -1 to 1.

    Args:
        module: a model whose head pools a text into one vector.
        tokenizer: of the model's input.
        firsts: the first text of each pair.
        seconds: the second text of each pair.
        max_length, batch_size, batch_tokens: as for `embed`.

    Raises:
        InputError: the counts differ, or as `embed`.
    """
    check_pairs(firsts, seconds)
    limits = {"max_length": max_length, "batch_size": batch_size, "batch_tokens": batch_tokens}
    vectors_ND = embed(module, tokenizer, [*firsts, *seconds], **limits)
    # A head need not normalise its vectors.
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    unit_ND = vectors_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
    cosine_N = (unit_ND[: len(firsts)] * unit_ND[len(firsts) :]).sum(1)
    bounded_N: Float32[ndarray, " pairs"] = np.clip(cosine_N, -1.0, 1.0)
    return bounded_N


def check_pairs(firsts: Sized, seconds: Sized) -> None:
    """Refuse two sides of different lengths.

    Raises:
        InputError: the counts differ.
    """
    if len(firsts) != len(seconds):
        raise InputError(f"there are {len(firsts)} first texts but {len(seconds)} second ones; give pairs")


def check_vectors(record: TaskRecord) -> None:
    """Refuse models whose outputs are label scores instead of vectors.

    Raises:
        InputError: the outputs are label scores; the message says how to train an embedding model.
    """
    if record.labels or record.label_kind is not None:
        raise InputError(
            f"this model was trained to '{record.kind}', so what it makes of a text are scores of labels, no vector: "
            'train it with [task] kind = "embed" and init = "…", the path of this model'
        )


def vector_width(module: Transformer) -> int:
    """Return the width of the vectors that a model makes of texts.

    Raises:
        InputError: its head does not pool a text into one vector.
    """
    head = module.spec.head
    if head is None or not any(isinstance(layer, spec.Pool) for layer in head.layers):
        raise InputError(
            "embedding needs a model whose head pools a text into one vector, and the head of this one does not; "
            'train one with [task] kind = "embed"'
        )
    top = module.spec.decoder or module.spec.encoder
    assert top is not None, "a validated model has a stack"
    return module.spec.num_outputs or top.output_width
