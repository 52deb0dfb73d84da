"""What all stores share: a form on disk that earlier runs and caches rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged
from clearhead.data.stores.store import Store, StoreKind, joint_lengths, prepare_store, separate_lengths
from clearhead.data.task_tables import data_of
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

ARRAYS = {
    "answer": {
        "question_ids": "<u2", "question_offsets": "<i8", "context_ids": "<u2", "context_offsets": "<i8",
        "context_of": "<i8", "spans": "<i4", "text_ids": "|u1", "text_offsets": "<i8", "gold_ids": "|u1",
        "gold_offsets": "<i8", "rows": "<i8", "borders": "<i8", "labels": "<i4",
    },
    "classify": {
        "first_ids": "<u2", "first_offsets": "<i8", "second_ids": "<u2", "second_offsets": "<i8",
        "labels": "<i8", "rows": "<i8",
    },
    "embed": {
        "source_ids": "<u2", "source_offsets": "<i8", "target_ids": "<u2", "target_offsets": "<i8", "lines": "<i8",
    },
    "fill": {"document_ids": "<u2", "document_offsets": "<i8"},
    "tag": {"chunk_ids": "<u2", "chunk_offsets": "<i8", "words": "<i8", "tag_ids": "<i4", "tag_offsets": "<i8"},
}  # fmt: skip
EXAMPLES = {
    "answer": [("who ?", "a b", "a", 0)],
    "classify": [("a", "b", "x"), ("b", "a b", "y")],
    "embed": [("a", "b")],
    "fill": ["a b"],
    "tag": [(["a", "b"], ["X", "Y"])],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def prepare(kind: str) -> Store:
    """A store of the examples of a task."""
    from clearhead.data.stores.corpus import prepare_corpus
    from clearhead.data.stores.store import prepare_pairs
    from clearhead.tasks.answer.store import prepare_answers
    from clearhead.tasks.classify.store import prepare_labelled
    from clearhead.tasks.tag.store import prepare_tagged

    source, tokenizer = data_of(kind).source(EXAMPLES[kind]), train_tokenizer("split", ["a b who ?"], vocab_size=20)
    pair = TokenizerPair(tokenizer, tokenizer, joint=True)
    prepare = {
        "answer": lambda: prepare_answers(source, tokenizer, max_length=20),
        "classify": lambda: prepare_labelled(source, tokenizer, max_length=20, kind="single_label"),
        "embed": lambda: prepare_pairs(source, pair, max_length=20, max_ratio=None, training=True),
        "fill": lambda: prepare_corpus(source, tokenizer),
        "tag": lambda: prepare_tagged(source, tokenizer, max_length=20),
    }
    return prepare[kind]()


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_arrays_of_a_store_keep_names_order_and_types(kind: str) -> None:
    """Their hash is in checkpoints: a run that began before a change would not resume."""
    forms = {name: array.dtype.str for name, array in prepare(kind).arrays.items()}
    assert list(forms.items()) == list(ARRAYS[kind].items())


def kind_of(lengths: Any) -> StoreKind:
    return StoreKind("things", "things", ("one", "two"), lambda store: f"{store.facts['n']} things", lengths)


def store_of(lengths: Any, special: tuple[int, ...], *, texts: int = 2) -> Store:
    ragged = Ragged.of(np.array([5, 6, 7], dtype=np.uint16), np.array([1, 2]))
    arrays = dict.fromkeys(("one", "two")[:texts], ragged)
    return prepare_store(kind_of(lengths), [texts], lambda: (arrays, {"n": 3}), special=special)


def test_lengths_follow_from_what_each_stack_reads() -> None:
    together, apart = store_of(joint_lengths, (3,)), store_of(separate_lengths, (1, 2))
    assert together.folder == apart.folder and together.report == "3 things"
    assert [lengths.tolist() for lengths in together.input_lengths] == [[5, 7]]
    assert [lengths.tolist() for lengths in apart.input_lengths] == [[2, 3], [3, 4]]
    assert (together.longest, apart.longest) == ((7, 7), (3, 4))
    assert (together.num_tokens, apart.num_tokens, len(apart)) == (12, 12, 2)
    assert len(store_of(joint_lengths, (3,), texts=1).texts) == 1


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"format": 5, "identity": "x"}', '{"format": 5, "identity": "x", "arrays": {"a": ["<i8", [9]]}}'],
)
def test_a_folder_without_a_whole_store(tmp_path: Path, content: str) -> None:
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(InputError, match=r"not a whole store of things .*; prepare the data again"):
        Store(tmp_path, kind_of(separate_lengths), (0, 0))


def test_the_identity_of_the_same_arrays_stays() -> None:
    """The hash that was written before there was one class of stores."""
    identity = "3abc54043b57e1a4be1c35dc8d5bac3ed46bf9fe3a6aa6f20718bdd173f58129"
    assert store_of(separate_lengths, (1, 2)).identity == identity
