"""Predictions and metrics of text embedding: vectors of texts, and similarities of pairs.

Shape suffixes: N texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from clearhead import spec
from clearhead.base.errors import InputError, RunFailure
from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.generate.scoring.result import Measures, align_columns, percent
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.tasks.registry import find_task
from clearhead.tasks.embed.batches import positive_groups
from clearhead.tasks.evaluate.metrics import pearson, spearman
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.evaluate.retrieval import check_pairs, recall_at
from clearhead.tasks.outputs import max_input_length, pooled_text_outputs
from clearhead.tasks.use import pairs_of
from clearhead.text.tokenizer import Tokenizer


def embed(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    prompt: str = "",
    max_length: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Float32[ndarray, "texts width"]:
    """Return one vector per text, pooled and normalized as the head of the model defines.

    A vector does not depend on the other texts of its batch, up to rounding.

    Args:
        module: a model whose head pools a text into one vector. If it is in training mode, a replica in evaluation mode
            runs in its place.
        tokenizer: the tokenizer of the model's input.
        texts: the texts, or pairs of texts that are read together; an empty text is read as its special tokens alone.
        prompt: the text put in front of each text or pair.
        max_length: the maximum length of a text in tokens, special tokens included; longer texts are truncated. None
            means that only the model limits it.
        batch_size: the maximum number of texts in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; a longer text forms a separate batch. None means
            `read_tokens`.

    Raises:
        InputError: the head does not pool, or texts and pairs are mixed.
        RunFailure: a vector is not finite.
    """
    width = vector_width(module)
    collator = InputCollator.of(module.spec, tokenizer)
    read: Any = texts
    if prompt:
        read = [prompt + text if isinstance(text, str) else (prompt + text[0], *text[1:]) for text in texts]
    outputs_ND, _ = pooled_text_outputs(
        module,
        collator,
        tokenizer,
        read,
        max_length=max_input_length(module, max_length),
        width=width,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    )
    vectors_ND: Float32[ndarray, "texts width"] = outputs_ND.numpy()
    broken = np.flatnonzero(~np.isfinite(vectors_ND).all(1))
    if len(broken):
        raise RunFailure(
            f"the vector of text {broken[0] + 1} is not finite, nor are {len(broken) - 1} others: the weights are "
            "damaged or too large for this precision; try precision='fp32'"
        )
    return vectors_ND


def similarity(
    module: Transformer,
    tokenizer: Tokenizer,
    firsts: Sequence[str],
    seconds: Sequence[str],
    *,
    prompt: str = "",
    max_length: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Float32[ndarray, " pairs"]:
    """Return the cosine similarity of the two vectors of each pair of texts, from -1 to 1.

    Args:
        module: a model whose head pools a text into one vector.
        tokenizer: the tokenizer of the model's input.
        firsts: the first text of each pair.
        seconds: the second text of each pair.
        prompt, max_length, batch_size, batch_tokens: the arguments of `embed`.

    Raises:
        InputError: the counts differ, or the head does not pool.
    """
    check_pairs(firsts, seconds)
    limits = {"max_length": max_length, "batch_size": batch_size, "batch_tokens": batch_tokens}
    vectors_ND = embed(module, tokenizer, [*firsts, *seconds], prompt=prompt, **limits)
    # Some heads do not normalize their vectors.
    lengths_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    unit_ND = vectors_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
    cosine_N = (unit_ND[: len(firsts)] * unit_ND[len(firsts) :]).sum(1)
    bounded_N: Float32[ndarray, " pairs"] = np.clip(cosine_N, -1.0, 1.0)
    return bounded_N


def check_vectors(record: TaskRecord) -> None:
    """Raise an error if the outputs of a model are scores of labels, not vectors.

    Raises:
        InputError: the outputs are scores of labels; the message explains how to train an embedding model.
    """
    if find_task(record.kind).has_labels:
        raise InputError(
            f"this model was trained to '{record.kind}', so its outputs are scores of labels, not vectors: "
            'train it with [task] kind = "embed" and init = "…", the path of this model'
        )


def vector_width(module: Transformer) -> int:
    """Return the width of the text vectors of a model.

    Raises:
        InputError: the head of the model does not pool a text into one vector.
    """
    head = module.spec.head
    if head is None or not any(isinstance(layer, spec.Pool) for layer in head.layers):
        raise InputError(
            "embedding needs a model whose head pools a text into one vector, but the head of this model does not; "
            'train one with [task] kind = "embed"'
        )
    top = module.spec.decoder or module.spec.encoder
    assert top is not None, "a validated model has a stack"
    return head.output_width(top.width)


def predict(model: Any, texts: Sequence[Any], *, batch_size: int | None = None) -> Float32[ndarray, "texts width"]:
    """Return the vector of each text; see `Model.embed`."""
    vectors_ND: Float32[ndarray, "texts width"] = model.embed(list(texts), batch_size=batch_size)
    return vectors_ND


@dataclass(frozen=True, repr=False, eq=False)
class RecallMeasures(Measures):
    """Recall@1: the share of texts whose partner has the nearest vector among all texts of the other side.

    Args:
        recall_at_1: the mean of `forward` and `backward`, 0 to 1.
        forward, backward: recall@1 of the sources, and recall@1 of the targets, 0 to 1.
        pairs: the number of pairs.
    """

    recall_at_1: float
    forward: float
    backward: float
    pairs: int

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        return align_columns(
            {
                "recall@1": f"{percent(self.forward)} of the sources find their target among {self.pairs}",
                "": f"{percent(self.backward)} of the targets find their source",
                "mean": percent(self.recall_at_1),
            }
        )


@dataclass(frozen=True, repr=False, eq=False)
class SimilarityMeasures(Measures):
    """Correlation between the cosines of pairs and the expected similarities.

    Args:
        spearman: the rank correlation, -1 to 1.
        pearson: the linear correlation, -1 to 1.
        pairs: the number of pairs.
    """

    spearman: float
    pearson: float
    pairs: int

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        return align_columns({"Spearman": f"{self.spearman:.4f}", "Pearson": f"{self.pearson:.4f}"})


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> Measures:
    """Return recall@1 of pairs, or the correlation of cosines with expected similarities if `options` has these."""
    table = pairs_of(data, "embed")
    firsts, seconds = list(table["source"]), list(table["target"])
    for index, pair in enumerate(zip(firsts, seconds, strict=True)):
        if not all(map(str.strip, pair)):
            raise InputError(f"{table.location(index)}: one side of the pair is empty; complete or remove it")
    if options.similarities is not None:
        if len(options.similarities) != len(firsts):
            num_similarities = len(options.similarities)
            raise InputError(
                f"there are {num_similarities} similarities, but {len(firsts)} pairs; expected one per pair"
            )
        expected = np.array(options.similarities, dtype=np.float64)
        parts = model.tree, model.tokenizers.source, firsts, seconds
        task, size = model.task, options.batch_size
        cosines = similarity(*parts, prompt=task.prompt, max_length=task.max_length, batch_size=size)
        return SimilarityMeasures(spearman(cosines, expected), pearson(cosines, expected), len(firsts))
    if len(firsts) < 2:
        raise InputError("got 1 pair, whose texts find each other in any case; give at least 2 pairs")
    first_ND, second_ND = (model.embed(side, batch_size=options.batch_size) for side in (firsts, seconds))
    # Pairs that share a text count as right for each other, as in training.
    recall = recall_at(first_ND, second_ND, groups=positive_groups(zip(firsts, seconds, strict=True)))
    return RecallMeasures(recall.mean, recall.forward, recall.backward, len(firsts))
