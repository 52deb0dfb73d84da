"""The stores of labelled texts, or pairs of texts."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged, encode_texts, fitting_lengths
from clearhead.data.sources.tables import WHOLE, DataTable, Share, TableSource
from clearhead.data.stores.store import Encoded, Store, StoreKind, format_counts, joint_lengths, prepare_store
from clearhead.spec.tasks.record import LabelKind
from clearhead.tasks.classify.data import read_labelled, text_columns
from clearhead.tasks.classify.label_set import LabelSet, learn_labels
from clearhead.text.long_texts import CHARACTERS_PER_TOKEN
from clearhead.text.tokenizer import Tokenizer


def _report(store: Store) -> str:
    counts = store.facts["report"]
    words = {
        "empty": f"empty and dropped (the first at {counts['first_empty']})",
        "cut": f"cut to their first {counts['max_length']:,} tokens",
    }
    read = f"{counts['kept'] + counts['empty']:,} labelled texts read, {counts['kept']:,} kept"
    return ", ".join([read, *format_counts(counts, words)]) + f"; {counts['labels']}"


LABELLED = StoreKind("labelled", "labelled texts", ("first", "second"), _report, joint_lengths)
"""Stores of labelled texts: "labels" are those of `LabelSet.encode`, "rows" their numbers in the data."""


def labels_of(store: Store) -> LabelSet:
    """Return what the labels mean."""
    labels = store.facts["labels"]
    return LabelSet(**{**labels, "names": tuple(labels["names"])})


def is_paired(store: Store) -> bool:
    """Return whether each example is a pair of texts."""
    return len(store.texts) == 2


def prepare_labelled(
    source: TableSource,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    kind: LabelKind,
    labels: LabelSet | None = None,
    share: Share = WHOLE,
) -> Store:
    """Tokenize labelled texts, or open what an earlier run made of the same content.

    Args:
        source: where they come from.
        tokenizer: turns them into ids.
        max_length: the longest sequence in tokens, special ids included; longer ones are truncated.
        kind: what a label is.
        labels: the labels of the training data; None: this is the training data.
        share: the share of the examples to read, as for `read_table`.

    Raises:
        InputError: the source or a label is unusable, or no text is left.
        RunFailure: the cache cannot be written.
    """
    num_special = tokenizer.special_tokens.num_added(paired="pair" in source.columns)

    def encode() -> Encoded:
        data = read_labelled(source, share, kind=kind)
        return _encode(data, tokenizer, max_length, num_special, labels or learn_labels(data, kind))

    known = None if labels is None else asdict(labels)
    inputs = [source.identity(), tokenizer.fingerprint, max_length, kind, known, share]
    return prepare_store(LABELLED, inputs, encode, special=(num_special,))


def _encode(data: DataTable, tokenizer: Tokenizer, max_length: int, num_special: int, labels: LabelSet) -> Encoded:
    columns = text_columns(data)
    shortest, room = num_special + len(columns), max_length - num_special
    if max_length < shortest:
        raise InputError(
            f"max_length is {max_length}; expected at least {shortest}, the special ids and one token each"
        )
    values, most = labels.encode(data), room * CHARACTERS_PER_TOKEN
    is_cut = np.zeros(len(data), dtype=bool)
    texts = []
    for column in columns:
        is_cut |= [len(text) > most for text in column]
        texts.append(encode_texts([text[:most] for text in column], tokenizer))
    lengths = [text.lengths for text in texts]
    keep: Bool[ndarray, " texts"] = np.min(lengths, axis=0) > 0
    if not keep.any():
        raise InputError(f"{data.location(0)}: all {len(data)} texts from here on are empty; nothing is left to use")
    arrays: dict[str, ndarray | Ragged] = {}
    for name, text, kept_lengths in zip(LABELLED.texts, texts, fitting_lengths(lengths, room), strict=False):
        is_cut |= kept_lengths < text.lengths
        arrays[name] = text.truncate(kept_lengths, keep)
    empty = np.flatnonzero(~keep)
    report = {
        "kept": int(keep.sum()),
        "empty": len(empty),
        "cut": int(is_cut[keep].sum()),
        "first_empty": data.location(int(empty[0])) if len(empty) else "",
        "max_length": max_length,
        "labels": labels.describe(data),
    }
    arrays |= {"labels": values[keep], "rows": np.flatnonzero(keep)}
    return arrays, {"report": report, "labels": asdict(labels)}
