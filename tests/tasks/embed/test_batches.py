"""Contrastive batches: every pair once, inside the budget, composed anew, little padding, and groups of one meaning."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import EpochBatches, training_batches
from clearhead.data.sources.pairs import parallel_files
from clearhead.data.stores.store import Store, prepare_pairs
from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers
from clearhead.tasks.embed.batches import (
    ContrastiveBatch,
    ContrastivePlan,
    collate_contrastive,
    contrastive_plan,
    positive_groups,
    store_groups,
)
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer_training import train_tokenizer

# The ids of every tokenizer that is trained here: padding 0, start 2, end 3.
FRAMING = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0)
WORDS = ["aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh"]


def store_of(folder: Path, pairs: list[tuple[str, str]]) -> Store:
    for name, column in (("s", 0), ("t", 1)):
        (folder / name).write_text("".join(f"{pair[column]}\n" for pair in pairs), encoding="utf-8")
    tokenizer = train_tokenizer("split", [text for pair in pairs for text in pair], vocab_size=100)
    tokenizers = TokenizerPair(source=tokenizer, target=tokenizer, joint=True)
    return prepare_pairs(
        parallel_files(folder / "s", folder / "t"), tokenizers, max_length=99, max_ratio=None, training=True
    )


def random_store(folder: Path, count: int = 211, seed: int = 3, longest: int = 13) -> Store:
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    return store_of(folder, [(text(), text()) for _ in range(count)])


def contrastive_batches(store: Store, *, seed: int) -> EpochBatches[ContrastiveBatch]:
    plan, groups = contrastive_plan(store, FRAMING, batch_tokens=128, seed=seed), store_groups(store)
    return training_batches(store, plan, lambda rows: collate_contrastive(store, rows, groups, FRAMING))


def lengths(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    source = draw.integers(3, 47, count)
    return source, np.clip(source + draw.integers(-5, 6, count), 3, 53)


@settings(deadline=None, max_examples=40)
@given(count=st.integers(2, 1_009), budget=st.integers(106, 701), seed=st.integers(0, 2**64), epoch=st.integers(0, 5))
def test_every_pair_once_and_inside_the_budget(count: int, budget: int, seed: int, epoch: int) -> None:
    source, target = lengths(count, seed % 1_009)
    plan = ContrastivePlan(source, target, batch_tokens=budget, seed=seed)
    batches = plan.epoch(epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    for rows in batches:
        assert 0 < len(rows) * max(source[rows].max(), target[rows].max()) <= budget
    assert 0 <= plan.padding_waste(epoch) < 1


def test_no_batch_is_a_remainder() -> None:
    """A batch of one pair has no wrong answer at all: what is left over is shared with the batch before."""
    length = np.full(503, 10)
    for budget in (500, 510, 1_000, 4_000):
        sizes = [len(rows) for rows in ContrastivePlan(length, length, batch_tokens=budget, seed=1).epoch(0)]
        assert min(sizes) >= max(sizes) // 2 and max(sizes) <= budget // 10


def test_an_epoch_is_a_function_of_seed_and_number() -> None:
    source, target = lengths(997, 5)

    def plan(seed: int) -> ContrastivePlan:
        return ContrastivePlan(source, target, batch_tokens=512, seed=seed)

    def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
        return [rows.tolist() for rows in batches]

    first_plan = plan(7)
    third = as_lists(first_plan.epoch(3))
    first_plan.epoch(0)
    assert as_lists(first_plan.epoch(3)) == third == as_lists(plan(7).epoch(3))
    assert as_lists(plan(11).epoch(3)) != third


def test_one_order_on_every_machine() -> None:
    """The order is part of exact resume: written down, so that a change of library or code shows here."""
    source = np.arange(1, 14)
    plan = ContrastivePlan(source, source[::-1].copy(), batch_tokens=40, seed=3)
    assert [rows.tolist() for rows in plan.epoch(2)] == [[4, 8, 3, 9], [6, 5, 7], [11, 0, 12], [2, 10, 1]]


def test_a_pair_meets_new_wrong_answers_in_every_epoch() -> None:
    source, target = lengths(997, 5)
    plan = ContrastivePlan(source, target, batch_tokens=1_024, seed=7)

    def company(epoch: int) -> dict[int, set[int]]:
        return {int(row): set(rows.tolist()) for rows in plan.epoch(epoch) for row in rows}

    first, second = company(0), company(1)
    shared = [len(first[row] & second[row]) / len(first[row]) for row in range(len(plan))]
    assert np.mean(shared) < 0.5
    widths = [int(np.maximum(source, target)[rows].max()) for rows in plan.epoch(0)]
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.6


def test_wrong_sizes_are_named() -> None:
    source = np.array([3, 17, 5])
    with pytest.raises(InputError, match=r"batch_tokens is 33, but the longest example has 17 .* at least 34"):
        ContrastivePlan(source, source, batch_tokens=33, seed=1)
    with pytest.raises(InputError, match="seed is -1"):
        ContrastivePlan(source, source, batch_tokens=160, seed=-1)
    with pytest.raises(InputError, match="there are 1 examples; a batch needs at least 2"):
        ContrastivePlan(source[:1], source[:1], batch_tokens=160, seed=1)


def test_padding_on_multi30k_is_about_a_tenth(data_dir: Path) -> None:
    folder = data_dir / "multi30k-bpe"
    source = parallel_files(folder / "train.de", folder / "train.en")
    tokenizers = load_or_train_tokenizers(source, kind="split", vocab_size=20_000, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=128, max_ratio=None, training=True)
    waste = contrastive_plan(store, FRAMING, batch_tokens=4096, seed=1).padding_waste(0)
    print(f"padding waste on Multi30k: {waste:.1%}")
    assert waste <= 0.12


def test_a_batch_is_what_its_pairs_are(tmp_path: Path) -> None:
    store = random_store(tmp_path)
    rows = np.array([17, 3, 101, 5, 2])
    groups = store_groups(store)
    batch = collate_contrastive(store, rows, groups, FRAMING)
    for index, row in enumerate(rows):
        for ids, mask, text in (
            (batch.ids, batch.mask, store.texts[0][row]),
            (batch.other_ids, batch.other_mask, store.texts[1][row]),
        ):
            real = mask[index]
            assert ids[index][real].tolist() == [2, *text.tolist(), 3]
            assert (ids[index][~real] == 0).all()
            assert real.tolist() == sorted(real.tolist(), reverse=True)
    assert batch.ids.shape == batch.mask.shape == (5, store.texts[0].lengths[rows].max() + 2)
    assert batch.other_ids.shape == batch.other_mask.shape == (5, store.texts[1].lengths[rows].max() + 2)
    assert batch.groups.tolist() == groups[rows].tolist() and batch.rows.tolist() == rows.tolist()
    assert batch.num_labels == 5
    assert batch.num_tokens == int(batch.mask.sum() + batch.other_mask.sum())
    moved = batch.to("meta")
    assert {moved.ids.device.type, moved.other_mask.device.type, moved.groups.device.type} == {"meta"}


def test_pairs_that_share_a_text_mean_the_same(tmp_path: Path) -> None:
    pairs = [
        ("a b", "x y"),  # 0
        ("c", "z"),  # 1
        ("a b", "w"),  # 2: the first text of 0
        ("d", "w"),  # 3: the second text of 2, so that it is joined to 0
        ("a b c", "x"),  # 4: begins like others, which is not the same
        ("e f", "c"),  # 5: its second text is the first one of 1
        ("g", "g"),  # 6: the same on both sides
        ("d", "q r"),  # 7: by way of 3
    ]
    assert positive_groups(pairs).tolist() == [0, 1, 0, 0, 4, 1, 6, 0]
    assert store_groups(store_of(tmp_path, pairs)).tolist() == [0, 1, 0, 0, 4, 1, 6, 0]


def test_groups_join_late_chains() -> None:
    """Two groups that grew apart become one when a later pair joins them."""
    assert positive_groups([("a", "b"), ("c", "d"), ("d", "e"), ("b", "f"), ("f", "e")]).tolist() == [0] * 5


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(st.integers(0, 23), st.integers(0, 23)), max_size=19))
def test_groups_are_the_connected_parts(pairs: list[tuple[int, int]]) -> None:
    label = list(range(len(pairs)))
    for _ in pairs:  # every pair takes the least number of those it shares a text with, until nothing can change
        label = [min(label[j] for j in range(len(pairs)) if {*pairs[i]} & {*pairs[j]}) for i in range(len(pairs))]
    assert positive_groups(pairs).tolist() == label


def test_training_goes_round_and_validation_once(tmp_path: Path) -> None:
    store = random_store(tmp_path)
    batches = contrastive_batches(store, seed=5)
    for epoch in range(3):
        assert batches.epoch == epoch
        seen = [next(batches).rows for _ in range(batches.batches_per_epoch)]
        assert sorted(np.concatenate(seen).tolist()) == list(range(len(store)))
    groups = store_groups(store)
    once, again = (
        [
            collate_contrastive(store, rows, groups, FRAMING).rows.tolist()
            for rows in contrastive_plan(store, FRAMING, batch_tokens=128, seed=0).epoch(0)
        ]
        for _ in range(2)
    )
    assert once == again and sorted(row for rows in once for row in rows) == list(range(len(store)))


def test_a_place_is_found_again(tmp_path: Path) -> None:
    store = random_store(tmp_path)
    batches = contrastive_batches(store, seed=5)
    for _ in range(batches.batches_per_epoch + 3):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    expected = next(batches)
    other = contrastive_batches(store, seed=5)
    other.load_state(state)
    assert next(other).rows.tolist() == expected.rows.tolist()
    with pytest.raises(InputError, match="seed was 5, now 6"):
        contrastive_batches(store, seed=6).load_state(state)
