"""Batches: every pair once, inside the budget, little padding, one order for one seed, and a place to come back to."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.batches.base import Batch, padded_length, round_rows
from clearhead.data.batches.plans import EpochBatches, LengthSortedPlan, training_batches, validation_batches
from clearhead.data.sources.pairs import parallel_files
from clearhead.data.stores.store import Store, prepare_pairs
from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers
from clearhead.tasks.translate.train import collate_pairs
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

WORDS = ["aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh"]


def make_store(folder: Path, count: int = 211, seed: int = 3, longest: int = 13) -> Store:
    draw = random.Random(seed)
    texts = {side: [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)] for side in "st"}
    for side, lines in texts.items():
        (folder / side).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    source = parallel_files(folder / "s", folder / "t")
    return prepare_pairs(source, tokenizers(), max_length=99, max_ratio=None, training=True)


@cache
def tokenizers() -> TokenizerPair:
    """Two vocabularies; that of the target lacks some words."""
    source, target = (" ".join(words) for words in (WORDS, reversed(WORDS)))
    return TokenizerPair(
        source=train_tokenizer("split", [source], vocab_size=100),
        target=train_tokenizer("split", [target], vocab_size=7),
        joint=False,
    )


def pair_batches(store: Store, *, batch_tokens: int, seed: int) -> EpochBatches[Batch]:
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=batch_tokens, seed=seed)
    return training_batches(store, plan, lambda rows: collate_pairs(store, rows, tokenizers()))


def epoch_batches(store: Store, *, batch_tokens: int) -> Iterator[Batch]:
    return validation_batches(store, lambda rows: collate_pairs(store, rows, tokenizers()), batch_tokens=batch_tokens)


def lengths(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    source = draw.integers(1, 47, count)
    return source, np.clip(source + draw.integers(-5, 6, count), 1, 53)


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 211),
    budget=st.integers(53, 701),
    seed=st.integers(0, 2**64),
    shuffle=st.booleans(),
    epoch=st.integers(0, 5),
)
def test_every_pair_once_and_inside_the_budget(count: int, budget: int, seed: int, shuffle: bool, epoch: int) -> None:
    source, target = lengths(count, seed % 1_009)
    plan = LengthSortedPlan(source, target, batch_tokens=budget, seed=seed, shuffle=shuffle)
    batches = plan.epoch(epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    for rows in batches:
        assert 0 < len(rows) * max(source[rows].max(), target[rows].max()) <= budget
    assert 0 <= plan.padding_waste(epoch) < 1


def test_lengths_and_rows_come_from_few_numbers() -> None:
    for number in range(1, 3000):
        length, rows = padded_length(number, 3000), round_rows(number)
        assert number <= length <= max(number + 1, number * 17 / 16) and number * 16 / 17 < rows <= number
        assert padded_length(length, 3000) == length and round_rows(rows) == rows
        assert padded_length(number, number) == number, "a model may have no more positions"
    assert len({padded_length(number, 3000) for number in range(512, 1024)}) == 17
    assert len({round_rows(number) for number in range(512, 1024)}) == 16


def test_batches_have_few_shapes_and_those_that_the_plan_counts(tmp_path: Path) -> None:
    store = make_store(tmp_path, count=997, longest=31)
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=512, seed=5)
    shapes: set[tuple[int, ...]] = set()
    for epoch in range(8):
        batches = plan.epoch(epoch)
        assert sum(len(rows) != round_rows(len(rows)) for rows in batches) <= 1, "all but what is left at the end"
        for rows in batches:
            batch = collate_pairs(store, rows, tokenizers())
            assert batch.ids.numel() + batch.target_ids.numel() == plan.num_positions(rows) <= 2 * 512
            shapes.add((*batch.ids.shape, batch.target_ids.shape[1]))
    assert {length for _, *lengths in shapes for length in lengths} <= {*range(2, 33, 2)}


def test_an_epoch_is_a_function_of_seed_and_number() -> None:
    source, target = lengths(997, 5)

    def plan(seed: int) -> LengthSortedPlan:
        return LengthSortedPlan(source, target, batch_tokens=512, seed=seed)

    def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
        return [rows.tolist() for rows in batches]

    first = plan(7)
    third = as_lists(first.epoch(3))
    first.epoch(0)
    assert as_lists(first.epoch(3)) == third == as_lists(plan(7).epoch(3))
    assert as_lists(plan(11).epoch(3)) != third
    compositions = [{frozenset(rows) for rows in as_lists(first.epoch(number))} for number in range(3)]
    assert len(compositions[0] & compositions[1]) < len(compositions[0]) / 10
    assert len(compositions[1] & compositions[2]) < len(compositions[1]) / 10


def test_shuffled_batches_do_not_come_in_order_of_length() -> None:
    source, target = lengths(997, 5)
    plan = LengthSortedPlan(source, target, batch_tokens=512, seed=7)
    widths = [int(np.maximum(source, target)[rows].max()) for rows in plan.epoch(0)]
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.5
    still = LengthSortedPlan(source, target, batch_tokens=512, seed=7, shuffle=False)
    widths = [int(np.maximum(source, target)[rows].max()) for rows in still.epoch(0)]
    assert widths == sorted(widths)


def test_one_order_on_every_machine() -> None:
    """The order is part of exact resume: written down, so that a change of library or code shows here."""
    source = np.arange(1, 14)
    plan = LengthSortedPlan(source, source[::-1].copy(), batch_tokens=40, seed=3)
    assert [rows.tolist() for rows in plan.epoch(2)] == [[9, 3, 2], [7, 5, 4, 8], [6], [0, 12], [10, 11, 1]]


def test_few_pairs_that_fit_one_batch_stay_in_one() -> None:
    plan = LengthSortedPlan(np.array([2, 3, 5]), np.array([3, 3, 4]), batch_tokens=100, seed=1)
    assert all(len(plan.epoch(number)) == 1 for number in range(7))


def test_wrong_sizes_are_named() -> None:
    source = np.array([3, 17, 5])
    with pytest.raises(InputError, match="batch_tokens is 16, but the longest example has 17 tokens"):
        LengthSortedPlan(source, source, batch_tokens=16, seed=1)
    with pytest.raises(InputError, match="seed is -1"):
        LengthSortedPlan(source, source, batch_tokens=160, seed=-1)
    with pytest.raises(InputError, match="there are 0 examples"):
        LengthSortedPlan(source[:0], source[:0], batch_tokens=160, seed=1)


def test_padding_on_multi30k_is_at_most_a_tenth(data_dir: Path) -> None:
    folder = data_dir / "multi30k-bpe"
    source = parallel_files(folder / "train.de", folder / "train.en")
    tokenizers = load_or_train_tokenizers(source, kind="split", vocab_size=20_000, joint=True)
    store = prepare_pairs(source, tokenizers, max_length=128, max_ratio=None, training=True)
    plan = LengthSortedPlan(*store.input_lengths, batch_tokens=4096, seed=1)
    waste = [plan.padding_waste(epoch) for epoch in range(3)]
    print(f"padding waste on Multi30k: {', '.join(f'{share:.1%}' for share in waste)}")
    assert max(waste) <= 0.10


def test_a_batch_is_what_its_pairs_are(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    rows = np.array([17, 3, 101, 5, 2])
    batch = collate_pairs(store, rows, tokenizers())
    source_side, target_side = tokenizers().source, tokenizers().target
    for index, row in enumerate(rows):
        source, target = store.texts[0][row].tolist(), store.texts[1][row].tolist()
        real, read = batch.mask[index], batch.target_mask[index]
        assert batch.ids[index][real].tolist() == [*source, source_side.eos_id]
        assert batch.target_ids[index][read].tolist() == [target_side.bos_id, *target]
        assert batch.labels[index][read].tolist() == [*target, target_side.eos_id]
        assert (batch.ids[index][~real] == source_side.pad_id).all()
        assert (batch.target_ids[index][~read] == target_side.pad_id).all()
        assert (batch.labels[index][~read] == -100).all()
        assert real.tolist() == sorted(real.tolist(), reverse=True)
    width, target_width = (padded_length(int(side.lengths[rows].max()) + 1, side.longest + 1) for side in store.texts)
    assert batch.ids.shape == (5, width) and batch.labels.shape == batch.target_ids.shape == (5, target_width)
    assert batch.num_labels == int((batch.labels != -100).sum())
    assert batch.num_tokens == batch.num_labels + int(batch.mask.sum())
    assert batch.ids.dtype == batch.labels.dtype == torch.int64
    moved = batch.to("meta")
    assert moved.ids.device.type == moved.labels.device.type == "meta"
    assert (moved.num_labels, moved.num_tokens) == (batch.num_labels, batch.num_tokens)


def test_one_pair_is_a_batch_too(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    batch = collate_pairs(store, np.array([7]), tokenizers())
    assert batch.num_tokens == int(batch.mask.sum() + batch.target_mask.sum())
    assert batch.num_labels == store.texts[1].lengths[7] + 1 == int((batch.labels >= 0).sum())


def test_training_goes_round_and_validation_once(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    batches = pair_batches(store, batch_tokens=64, seed=5)
    for epoch in range(3):
        assert batches.epoch == epoch
        seen = [next(batches).rows for _ in range(batches.batches_per_epoch)]
        assert sorted(np.concatenate(seen).tolist()) == list(range(len(store)))
    rows = [batch.rows for batch in epoch_batches(store, batch_tokens=64)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(store)))
    assert [list(row) for row in rows] == [list(batch.rows) for batch in epoch_batches(store, batch_tokens=64)]


def test_a_place_is_found_again_anywhere(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    batches = pair_batches(store, batch_tokens=64, seed=5)
    states, following = [], []
    for _ in range(2 * batches.batches_per_epoch + 3):
        states.append(json.dumps(batches.state()))
        following.append(next(batches))
    for index in (0, 5, batches.batches_per_epoch - 1, batches.batches_per_epoch, len(states) - 2):
        again = pair_batches(store, batch_tokens=64, seed=5)
        again.load_state(json.loads(states[index]))
        for expected in following[index : index + 2]:
            batch = next(again)
            assert batch.rows.tolist() == expected.rows.tolist()
            assert torch.equal(batch.ids, expected.ids) and torch.equal(batch.labels, expected.labels)
    batches.load_state(json.loads(states[1]))  # back, in the same object
    assert next(batches).rows.tolist() == following[1].rows.tolist()


def test_restoring_does_not_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = pair_batches(make_store(tmp_path), batch_tokens=64, seed=5)
    planned: list[int] = []
    epoch = batches.plan.epoch
    monkeypatch.setattr(batches.plan, "epoch", lambda number: planned.append(number) or epoch(number))
    batches.load_state({**batches.state(), "epoch": 1_000_003, "batch": 2})
    next(batches)
    assert planned == [1_000_003]


def test_a_place_in_other_data_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    state = pair_batches(store, batch_tokens=64, seed=5).state()
    with pytest.raises(InputError, match="batch_tokens was 64, now 65"):
        pair_batches(store, batch_tokens=65, seed=5).load_state(state)
    with pytest.raises(InputError, match="seed was 5, now 6"):
        pair_batches(store, batch_tokens=64, seed=6).load_state(state)
    with pytest.raises(InputError, match="has changed since the checkpoint was written"):
        pair_batches(make_store(tmp_path, seed=4), batch_tokens=64, seed=5).load_state(state)
