"""Prefix language modelling: one cut, all of the text on its two sides."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.batches.base import NO_LABEL
from clearhead.data.objectives.prefix import PrefixSplit
from tests.data.objectives.noisy import add_special_ids, draw_ids, stream, tokenizer

LENGTHS = st.lists(st.integers(0, 43), min_size=1, max_size=7)


@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, seed=st.integers(0, 2**32))
def test_source_and_target_are_the_text(lengths: list[int], seed: int) -> None:
    trained = tokenizer("character")
    given_pieces = [add_special_ids(draw_ids(trained, length, seed), trained) for length in lengths]
    batch = PrefixSplit(trained)(given_pieces, stream(seed))
    assert batch.mask is not None and batch.target_ids is not None
    for row, piece in enumerate(given_pieces):
        source = batch.ids[row][batch.mask[row]].tolist()
        labels = batch.labels[row][batch.labels[row] != NO_LABEL].tolist()
        assert source[-1] == labels[-1] == trained.eos_id
        assert [*source[:-1], *labels[:-1]] == piece[1:-1].tolist()
        assert len(labels) > 1 or len(piece) == 2  # something is left to say
        assert batch.target_ids[row, : len(labels)].tolist() == [trained.bos_id, *labels[:-1]]
    assert batch.num_tokens == sum(lengths) + 2 * len(lengths)


def test_every_cut_is_equally_likely() -> None:
    trained = tokenizer("character")
    given_pieces = [add_special_ids([11, 12, 13, 14, 15], trained)] * 5003
    split = PrefixSplit(trained)(given_pieces, stream(1))
    assert split.mask is not None
    cuts = split.mask.sum(1) - 1
    counts = Counter(cuts.tolist())
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert all(abs(count - 5003 / 5) < 5 * np.sqrt(5003 / 5) for count in counts.values())
