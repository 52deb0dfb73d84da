"""The vocabulary of a model with its tokenizer: words added, entries left out."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.core import Transformer
from clearhead.errors import InputError
from clearhead.surgery.plan import Plan, perform
from clearhead.surgery.report import AnyModel, Edited
from clearhead.surgery.vocabulary import Reads, Start, Words, plan_rows


def grow_vocabulary(
    model: AnyModel, count: int, *, start: Start = "mean", side: Reads | None = None
) -> Edited[AnyModel]:
    """Add rows to the word tables, to the outputs of words and to their biases; what the model says of old words stays.

    Args:
        model: a module or a model; it is not changed.
        count: how many rows.
        start: how they begin: "mean": as the mean of all rows, so that a new word is about as likely as an old one;
            "draw": as in a new model; or for each the ids whose rows it is the mean of; or a tensor [count, width] for
            the word tables, where outputs of their own begin as the mean.
        side: the vocabulary of what is read, "source", or of what is written, "target"; None: the only one.

    Raises:
        InputError: no row to add, beginnings that do not fit, or two vocabularies of which none is named.

    Source: the mean: John Hewitt, "Initializing new word embeddings for pretrained language models", 2021.
    """
    if count < 1:
        raise InputError(f"count must be how many rows to add, at least 1; got {count}")

    def plan(module: Transformer) -> Plan:
        words = Words.of(module.spec, side)
        return plan_rows(module, words, range(words.rows), start, count)

    return perform(model, plan)


def cut_vocabulary(model: AnyModel, keep: Sequence[int], *, side: Reads | None = None) -> Edited[AnyModel]:
    """Keep some rows of the vocabulary, in the order given, which are numbered anew.

    Args:
        model: a module or a model; it is not changed.
        keep: ids.
        side: as for `grow_vocabulary`.

    Raises:
        InputError: ids that do not exist or stand twice, no id, or two vocabularies of which none is named.
    """
    return perform(model, lambda module: plan_rows(module, Words.of(module.spec, side), keep, "mean", 0))
