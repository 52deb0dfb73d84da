"""Masked language modelling: how much is chosen, what becomes of it, what is never touched, and whole words."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.data.objectives.masking import MaskedLM
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.text.word_starts import WordBoundaries, special_ids
from tests.data.objectives.noisy import SIZES, SPACED, add_special_ids, draw_ids, lines, pieces, stream, tokenizer


def labelled_positions(batch: Batch) -> list[np.ndarray]:
    """For each piece, the places that have a label."""
    return [np.flatnonzero(row) for row in (batch.labels != NO_LABEL).numpy()]


def restore(batch: Batch) -> list[list[int]]:
    """The pieces as they were: the label where there is one, else what the model reads."""
    whole = torch.where(batch.labels != NO_LABEL, batch.labels, batch.ids)
    mask = torch.ones_like(whole, dtype=torch.bool) if batch.mask is None else batch.mask
    return [row[real].tolist() for row, real in zip(whole, mask, strict=True)]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["bpe", "character", "split"]),
    share=st.floats(0.01, 0.9),
    lengths=st.lists(st.integers(0, 67), min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
    whole_words=st.booleans(),
)
def test_labels_and_ids_hold_the_text_and_special_tokens_are_left_alone(
    kind: str, share: float, lengths: list[int], seed: int, whole_words: bool
) -> None:
    trained = tokenizer(kind)
    given_pieces = [
        add_special_ids(stream(seed).integers(0, trained.vocab_size, length), trained) for length in lengths
    ]
    batch = MaskedLM(trained, share, whole_words)(given_pieces, stream(seed))
    assert restore(batch) == [piece.tolist() for piece in given_pieces]
    assert batch.num_tokens == sum(map(len, given_pieces))
    assert batch.num_labels == int((batch.labels != NO_LABEL).sum()) == sum(map(len, labelled_positions(batch)))
    special = special_ids(trained)
    labels = batch.labels[batch.labels != NO_LABEL].tolist()
    assert special.isdisjoint(labels)
    read = batch.ids[batch.labels != NO_LABEL].tolist()
    assert special.isdisjoint(set(read) - {trained.mask_id})
    if batch.mask is not None:
        assert (batch.ids[~batch.mask] == trained.pad_id).all() and (batch.labels[~batch.mask] == NO_LABEL).all()
    if not whole_words:
        for piece, places in zip(given_pieces, labelled_positions(batch), strict=True):
            budget = share * sum(number not in special for number in piece.tolist())
            allowed = {np.floor(budget), np.ceil(budget)} if budget >= 1 else {min(1, np.ceil(budget))}
            assert len(places) in allowed


def test_the_published_proportions() -> None:
    trained = tokenizer("character")
    piece = add_special_ids(draw_ids(trained, 40_009, 1), trained)
    batch = MaskedLM(trained)([piece], stream(2))
    (places,) = labelled_positions(batch)
    assert len(places) == pytest.approx(0.15 * 40_009, abs=1)
    before, after = piece[places], batch.ids[0].numpy()[places]
    ordinary = len(set(range(trained.vocab_size)) - special_ids(trained))
    random_hits = 0.1 / ordinary  # a random entry can be the one that was there
    for observed, share in (
        ((after == trained.mask_id).mean(), 0.8),
        ((after == before).mean(), 0.1 + random_hits),
        (((after != before) & (after != trained.mask_id)).mean(), 0.1 - random_hits),
    ):
        assert abs(observed - share) < 4 * np.sqrt(share * (1 - share) / len(places))
    others = Counter(after[(after != trained.mask_id) & (after != before)].tolist())
    assert len(others) > 0.9 * ordinary  # every ordinary entry can come
    spread = places / len(piece)
    assert abs(spread.mean() - 0.5) < 4 * np.sqrt(1 / 12 / len(places))


def test_the_share_is_exact_on_average_in_short_pieces() -> None:
    trained = tokenizer("character")
    counts = []
    for whole_words in (False, True):
        given_pieces = [add_special_ids(trained.encode("ba de fi go lu ba de fi go lu"), trained)] * 4001
        counts.append(MaskedLM(trained, 0.3, whole_words)(given_pieces, stream(3)).num_labels / 4001)
    assert counts[0] == pytest.approx(0.3 * 29, abs=0.05)
    assert counts[1] == pytest.approx(0.3 * 29, abs=0.1)


def test_every_piece_with_an_ordinary_token_has_a_label() -> None:
    trained = tokenizer("bpe")
    ordinary = trained.encode("a")[:1]
    given_pieces = [
        add_special_ids(ordinary, trained),
        add_special_ids([], trained),
        add_special_ids([trained.unk_id], trained),
        add_special_ids(ordinary * 3, trained),
    ]
    for seed in range(31):
        for whole_words in (False, True):
            batch = MaskedLM(trained, 0.01, whole_words)(given_pieces, stream(seed))
            assert [len(places) for places in labelled_positions(batch)] == [
                1,
                0,
                0,
                3 if whole_words and is_one_word(ordinary) else 1,
            ]


def is_one_word(ids: list[int]) -> bool:
    return bool(WordBoundaries(tokenizer("bpe")).word_ids(np.array(ids * 3)).max() == 0)


def test_choices_are_the_same_for_a_seed_and_new_in_every_call() -> None:
    objective = MaskedLM(tokenizer("bpe"))
    first, again = (objective(pieces("bpe"), stream(5)) for _ in range(2))
    assert torch.equal(first.ids, again.ids) and torch.equal(first.labels, again.labels)
    generator = stream(5)
    batch, two = objective(pieces("bpe"), generator), objective(pieces("bpe"), generator)
    assert torch.equal(batch.ids, first.ids) and not torch.equal(batch.labels, two.labels)


def test_pieces_are_left_as_they_were() -> None:
    given_pieces = pieces("bpe")
    before = [piece.copy() for piece in given_pieces]
    MaskedLM(tokenizer("bpe"))(given_pieces, stream())
    assert all((left == right).all() for left, right in zip(before, given_pieces, strict=True))


def word_sizes(kind: str, text: str) -> list[int]:
    """The number of tokens of each word, from encoding every word by itself; white space counts as a word."""
    trained = tokenizer(kind)
    sizes = []
    for word in text.split(" "):
        space = [1] if sizes and kind in ("character", "byte") else []
        sizes += [*space, len(trained.encode(word))]
    assert sum(sizes) == len(trained.encode(text))
    return sizes


@pytest.mark.parametrize("kind", SPACED)
def test_whole_words_are_never_split(kind: str) -> None:
    trained = tokenizer(kind)
    texts = lines(kind)[:41]
    batch = MaskedLM(trained, 0.3, whole_words=True)(
        [add_special_ids(trained.encode(text), trained) for text in texts], stream(7)
    )
    long_words = 0
    for text, places in zip(texts, labelled_positions(batch), strict=True):
        position = 1
        for size in word_sizes(kind, text):
            hit = np.isin(np.arange(position, position + size), places)
            assert hit.all() or not hit.any()
            long_words += size > 1 and bool(hit.all())
            position += size
    assert long_words > 20


@pytest.mark.parametrize("kind", ["wordpiece", "split", "word"])
def test_whole_words_hold_together_what_the_entries_join(kind: str) -> None:
    trained = tokenizer(kind)
    batch = MaskedLM(trained, 0.3, whole_words=True)(pieces(kind, 41), stream(7))
    joined = 0
    for piece, places in zip(pieces(kind, 41), labelled_positions(batch), strict=True):
        entries = trained.tokens(piece.tolist())
        for position in range(2, len(piece) - 1):
            continues = entries[position - 1].endswith("@@") if kind == "split" else entries[position].startswith("##")
            if continues:
                assert (position in places) == (position - 1 in places)
                joined += position in places
    assert joined > 20 or kind == "word"


def test_a_word_with_an_unknown_sign_is_not_hidden() -> None:
    trained = tokenizer("bpe")
    ids = trained.encode("ba d☃e fi")
    assert trained.unk_id in ids
    words = WordBoundaries(trained).word_ids(np.array(ids))
    unknown = {index + 1 for index, word in enumerate(words) if word == words[ids.index(trained.unk_id)]}
    for seed in range(23):
        batch = MaskedLM(trained, 0.8, whole_words=True)([add_special_ids(ids, trained)], stream(seed))
        assert unknown.isdisjoint(labelled_positions(batch)[0].tolist())


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(InputError, match="expected a number above 0 and below 1"):
        MaskedLM(tokenizer("bpe"), share)


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(InputError, match="has none"):
        MaskedLM(train_tokenizer("character", ["ab"], vocab_size=29))


def test_every_kind_is_listed() -> None:
    assert set(SIZES) == {*SPACED, "wordpiece", "split", "word"}
