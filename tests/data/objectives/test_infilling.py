"""Infilling: what is hidden and by how many masks, lengths from a Poisson distribution, sentences shuffled whole."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.objectives.spans import TextInfilling
from clearhead.text.tokenizer_training import train_tokenizer
from tests.data.objectives.noisy import add_special_ids, draw_ids, lines, pieces, stream, tokenizer


def sources(batch: Batch) -> list[list[int]]:
    assert batch.mask is not None
    return [ids[real].tolist() for ids, real in zip(batch.ids, batch.mask, strict=True)]


def is_part(items: list[int], whole: list[int]) -> bool:
    """Whether all of `part` stands in `whole`, in the same order."""
    rest = iter(whole)
    return all(number in rest for number in items)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 61), min_size=1, max_size=7),
    share=st.floats(0.02, 0.95),
    mean_span=st.floats(0.1, 9.0),
    permute=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_share_is_hidden_and_the_target_is_whole(
    lengths: list[int], share: float, mean_span: float, permute: bool, seed: int
) -> None:
    trained = tokenizer("character")
    given_pieces = [add_special_ids(draw_ids(trained, length, seed), trained) for length in lengths]
    batch = TextInfilling(trained, share, mean_span, permute)(given_pieces, stream(seed))
    for piece, source, labels in zip(given_pieces, sources(batch), batch.labels, strict=True):
        text = piece[1:-1].tolist()
        assert labels[labels != NO_LABEL].tolist() == [*text, trained.eos_id]
        assert source[-1] == trained.eos_id
        visible = [number for number in source[:-1] if number != trained.mask_id]
        budget = share * len(text)
        expected = {math.floor(budget), math.ceil(budget)} if budget >= 1 else {min(1, len(text))}
        assert len(text) - len(visible) in expected
        assert (len(source) - 1 > len(visible)) == bool(text)
        assert len(source) <= len(piece)
        if permute:
            assert not Counter(visible) - Counter(text)
        else:
            assert is_part(visible, text)
    assert batch.target_ids is not None and (batch.target_ids[:, 0] == trained.bos_id).all()
    assert batch.num_labels == sum(lengths) + len(lengths)
    assert batch.num_tokens == batch.num_labels + sum(map(len, sources(batch)))


def test_the_lengths_of_spans_follow_the_distribution() -> None:
    trained = tokenizer("bpe")
    size = 30_011
    # Ids that rise show how many are missing between two that stayed; the modulus keeps them in the vocabulary.
    rising = np.arange(size) % 211 + 60
    batch = TextInfilling(trained, 0.3, 3.0, permute=False)([add_special_ids(rising, trained)], stream(1))
    source = np.array(sources(batch)[0][:-1])
    is_mask = source == trained.mask_id
    assert (size - (~is_mask).sum()) / is_mask.sum() == pytest.approx(3.0, abs=0.1)
    alone = np.flatnonzero(is_mask[1:-1] & ~is_mask[:-2] & ~is_mask[2:]) + 1
    gaps = (source[alone + 1] - source[alone - 1] - 1) % 211
    for length in range(8):
        probability = math.exp(-3.0) * 3.0**length / math.factorial(length)
        error = math.sqrt(probability * (1 - probability) / len(gaps))
        assert abs((gaps == length).mean() - probability) < 4 * error
    assert (gaps == 0).sum() > 50  # masks in front of which nothing is missing


def test_sentences_change_places_and_stay_whole() -> None:
    trained = tokenizer("word")
    # Three sentences without a common word, so that every word tells its sentence.
    words = list(dict.fromkeys(word for line in lines("word") for word in line.split() if word.isalpha()))
    sentences = [words[0:7], words[7:18], words[18:23]]
    ids = [number for sentence in sentences for number in trained.encode(" ".join(sentence) + ".")]
    home = {trained.encode(word)[0]: number for number, sentence in enumerate(sentences) for word in sentence}
    orders: Counter[tuple[int, ...]] = Counter()
    batch = TextInfilling(trained, 0.01)([add_special_ids(ids, trained)] * 1201, stream(3))
    for source in sources(batch):
        seen = [(home[number], number) for number in source if number in home]
        order = tuple(number for number, _ in itertools.groupby(seen, key=lambda item: item[0]))
        assert len(order) == 3  # no sentence is torn apart
        for number in range(3):
            assert is_part([sentence_ids for where, sentence_ids in seen if where == number], ids)
        orders[order] += 1
    assert len(orders) == 6 and all(abs(count - 1201 / 6) < 5 * math.sqrt(1201 / 6) for count in orders.values())
    assert batch.labels[0].tolist() == [*ids, trained.eos_id]


def test_damage_is_the_same_for_a_seed() -> None:
    objective = TextInfilling(tokenizer("bpe"))
    first, again, other = (objective(pieces("bpe", join=3), stream(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.ids, again.ids) and torch.equal(first.labels, again.labels)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


@pytest.mark.parametrize(("share", "mean_span"), [(0.0, 3.0), (1.0, 3.0), (0.3, 0.0), (0.3, 101.0)])
def test_impossible_noise_is_refused(share: float, mean_span: float) -> None:
    with pytest.raises(InputError, match="expected"):
        TextInfilling(tokenizer("bpe"), share, mean_span)


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(InputError, match="has none"):
        TextInfilling(train_tokenizer("character", ["ab"], vocab_size=29))
