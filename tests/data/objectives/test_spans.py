"""Span corruption: the published lengths, a target that restores the text, and runs drawn evenly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.objectives.spans import SpanCorruption, noise_mask, num_sentinels
from clearhead.text.tokenizer_training import train_tokenizer
from tests.data.objectives.noisy import NUM_SENTINELS, add_special_ids, draw_ids, pieces, stream, tokenizer


def sides(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Source and labels of each piece, end tokens included."""
    assert batch.mask is not None
    sources = [ids[real].tolist() for ids, real in zip(batch.ids, batch.mask, strict=True)]
    labels = [row[row != NO_LABEL].tolist() for row in batch.labels]
    return list(zip(sources, labels, strict=True))


def rebuild(source: list[int], labels: list[int], sentinels: tuple[int, ...], eos: int) -> list[int]:
    """Put every span back in the place of its sentinel."""
    assert source[-1] == labels[-1] == eos
    spans: dict[int, list[int]] = {}
    for number in labels[:-1]:
        if number in sentinels:
            assert number not in spans
            last = spans.setdefault(number, [])
        else:
            last.append(number)
    assert list(spans) == list(sentinels[: len(spans)])
    assert [number for number in source if number in sentinels] == list(spans)
    assert all(spans.values())
    return [item for number in source[:-1] for item in spans.get(number, [number])]


def published_lengths(length: int, share: float, mean: float) -> tuple[int, int]:
    """`random_spans_helper` of the published code, for texts long enough that it never meets its own limits."""
    noise = round(length * share)
    spans = round(noise / mean)
    return length - noise + spans + 1, noise + spans + 1


def test_the_published_lengths() -> None:
    trained = tokenizer("character")
    piece = add_special_ids(draw_ids(trained, 568, 1), trained)
    batch = SpanCorruption(trained)([piece], stream(2))
    assert published_lengths(568, 0.15, 3.0) == (512, 114)
    assert (batch.ids.shape[1], batch.labels.shape[1]) == (512, 114)
    assert num_sentinels(568) == 28


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 97), min_size=1, max_size=7),
    share=st.floats(0.02, 0.8),
    mean_span=st.floats(1.0, 7.0),
    seed=st.integers(0, 2**32),
)
def test_source_and_target_hold_the_text(lengths: list[int], share: float, mean_span: float, seed: int) -> None:
    trained = tokenizer("character", 97)
    given_pieces = [add_special_ids(draw_ids(trained, length, seed), trained) for length in lengths]
    batch = SpanCorruption(trained, share, mean_span)(given_pieces, stream(seed))
    for piece, (source, labels) in zip(given_pieces, sides(batch), strict=True):
        assert rebuild(source, labels, trained.sentinel_ids, trained.eos_id) == piece[1:-1].tolist()
        length = len(piece) - 2
        used = sum(number in trained.sentinel_ids for number in source)
        assert used == (num_sentinels(length, share=share, mean_span=mean_span) if length else 0)
        assert len(source) + len(labels) == length + 2 * used + 2
        if length > 1:
            assert source[0] not in trained.sentinel_ids and source[-2] in trained.sentinel_ids
        noise = round(length * share)
        has_room = round(noise / mean_span) <= length - noise  # a text token before each span
        if length * share >= 1 and length * share / mean_span >= 1 and share <= 0.5 and has_room:
            assert (len(source), len(labels)) == published_lengths(length, share, mean_span)
    assert batch.num_labels == sum(len(labels) for _, labels in sides(batch))
    assert batch.num_tokens == batch.num_labels + sum(len(source) for source, _ in sides(batch))


def test_the_decoder_reads_the_start_token_and_what_it_has_said() -> None:
    trained = tokenizer("bpe")
    batch = SpanCorruption(trained)(pieces("bpe", join=2), stream())
    assert batch.target_ids is not None and batch.target_mask is not None
    assert (batch.target_ids[:, 0] == trained.bos_id).all()
    real = batch.target_mask[:, 1:]
    assert torch.equal(batch.target_ids[:, 1:][real], batch.labels[:, :-1][real])
    assert torch.equal(batch.target_mask, batch.labels != NO_LABEL)
    assert (batch.target_ids[~batch.target_mask] == trained.pad_id).all()
    assert batch.mask is not None and (batch.ids[~batch.mask] == trained.pad_id).all()


def test_every_way_to_cut_is_equally_likely() -> None:
    # 4 of 9 tokens in 2 spans: 3 ways to cut the spans and 4 ways to cut what stays.
    rows = 12_011
    mask = noise_mask(np.full(rows, 9), share=0.45, mean_span=2.0, generator=stream(4)).reshape(rows, 9)
    counts = Counter(map(bytes, mask))
    assert len(counts) == 12
    assert all(abs(count - rows / 12) < 5 * np.sqrt(rows / 12) for count in counts.values())
    assert not mask[:, 0].any() and mask[:, -1].all() and (mask.sum(1) == 4).all()


def test_a_text_of_one_token_is_the_answer() -> None:
    trained = tokenizer("character")
    batch = SpanCorruption(trained)([add_special_ids([57], trained), add_special_ids([], trained)], stream())
    first, eos = trained.sentinel_ids[0], trained.eos_id
    assert sides(batch) == [([first, eos], [first, 57, eos]), ([eos], [eos])]


def test_spans_are_the_same_for_a_seed() -> None:
    objective = SpanCorruption(tokenizer("bpe"))
    first, again, other = (objective(pieces("bpe", join=3), stream(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.ids, again.ids) and torch.equal(first.labels, again.labels)
    assert not torch.equal(first.labels, other.labels)


def test_too_few_sentinels_are_refused_with_what_is_needed() -> None:
    trained = tokenizer("character")
    piece = add_special_ids([57] * 700, trained)
    with pytest.raises(InputError, match=rf"700 tokens has 35 spans, but the tokenizer has {NUM_SENTINELS}"):
        SpanCorruption(trained)([piece], stream())
    with pytest.raises(InputError, match="has none"):
        SpanCorruption(train_tokenizer("character", ["ab"], vocab_size=29))


@pytest.mark.parametrize(("share", "mean_span"), [(0.0, 3.0), (1.0, 3.0), (0.15, 0.5), (0.15, float("nan"))])
def test_impossible_noise_is_refused(share: float, mean_span: float) -> None:
    with pytest.raises(InputError, match="expected"):
        SpanCorruption(tokenizer("bpe"), share, mean_span)
