"""Batches of text: every id predicted once, packed equals separate, one order for one seed, a place to come back to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.core import Transformer, build
from clearhead.data.batches.base import Batch
from clearhead.data.batches.plans import EpochBatches
from clearhead.data.batches.text import Objective, causal_epoch, causal_view, window_epoch, window_view
from clearhead.data.sources.texts import TextFiles
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.text.tokenizer_training import train_tokenizer
from tests.text.corpus import make_corpus

VOCAB = 97


def make(folder: Path, lines: list[str], *, as_one: bool = False) -> Corpus:
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer("character", make_corpus(), vocab_size=VOCAB)
    return prepare_corpus(TextFiles(folder / "text.txt", "file" if as_one else "line"), tokenizer)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(tmp_path_factory.mktemp("batches"), make_corpus(83))


@pytest.fixture(scope="module")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(tmp_path_factory.mktemp("novel"), make_corpus(83), as_one=True)


def causal_batches(corpus: Corpus, **options: Any) -> EpochBatches[Batch]:
    return causal_view(corpus, **options).batches(corpus.identity)


def window_batches(corpus: Corpus, objective: Objective, **options: Any) -> EpochBatches[Batch]:
    return window_view(corpus, objective, **options).batches(corpus.identity)


def sequences(corpus: Corpus) -> list[list[int]]:
    return [[2, *corpus.documents[index].tolist(), 3] for index in range(len(corpus))]


def epoch(batches: EpochBatches[Batch]) -> list[Batch]:
    return [next(batches) for _ in range(batches.batches_per_epoch)]


def stretches(batches: Iterable[Batch]) -> list[tuple[list[int], list[int]]]:
    """What is read and said of every piece, with the piece's row taken apart by its document numbers."""
    pieces = []
    for batch in batches:
        for row in range(len(batch.ids)):
            real = torch.ones_like(batch.ids[row], dtype=torch.bool) if batch.mask is None else batch.mask[row]
            number = torch.zeros_like(batch.ids[row]) if batch.documents is None else batch.documents[row]
            for document in number[real].unique().tolist():
                in_document = real & (number == document)
                pieces.append((batch.ids[row][in_document].tolist(), batch.labels[row][in_document].tolist()))
    return pieces


def pairs_of(corpus: Corpus) -> list[tuple[int, int]]:
    return sorted(pair for ids in sequences(corpus) for pair in pairwise(ids))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("block", [7, 31, 101])
def test_every_id_is_predicted_once_in_an_epoch(corpus: Corpus, block: int, pack: bool) -> None:
    batches = causal_batches(corpus, block=block, batch_tokens=307, pack=pack, seed=5)
    compositions = []
    for number in range(3):
        assert batches.epoch == number
        seen = epoch(batches)
        for batch in seen:
            rows, width = batch.ids.shape
            assert rows * width <= 307 and width <= block
            real = batch.labels != -100
            assert batch.mask is None or torch.equal(real, batch.mask)
            assert batch.mask is None or not batch.mask.all()
            assert batch.num_labels == batch.num_tokens == int(real.sum())
            assert (batch.ids[~real] == 0).all()
            assert batch.documents is None or int(batch.documents.max()) > 0
        pieces = stretches(seen)
        pairs = [pair for ids, labels in pieces for pair in zip(ids, labels, strict=True)]
        assert sorted(pairs) == pairs_of(corpus)
        assert all(ids[1:] == labels[:-1] for ids, labels in pieces)
        compositions.append(sorted(pieces))
    assert block > 100 or compositions[0] != compositions[1] != compositions[2]  # the cuts move


def test_without_packing_every_row_is_one_document(corpus: Corpus) -> None:
    unpacked = epoch(causal_batches(corpus, block=31, batch_tokens=307, pack=False, seed=5))
    assert all(batch.documents is None for batch in unpacked)


def test_full_blocks_carry_nothing_that_slows_attention(novel: Corpus) -> None:
    for pack in (True, False):
        seen = epoch(causal_batches(novel, block=31, batch_tokens=310, pack=pack, seed=5))
        plain = [batch for batch in seen if batch.mask is None and batch.documents is None]
        assert len(plain) >= len(seen) - 2
        assert len({tuple(batch.ids.shape) for batch in plain}) <= 4


def test_packing_leaves_little_padding(corpus: Corpus) -> None:
    seen = epoch(causal_batches(corpus, block=101, batch_tokens=1_010, pack=True, seed=5))
    positions = sum(batch.ids.numel() for batch in seen)
    assert 1 - sum(batch.num_tokens for batch in seen) / positions < 0.05


def test_validation_reads_windows_in_place(corpus: Corpus, novel: Corpus) -> None:
    for text in (corpus, novel):
        pieces = stretches(causal_epoch(text, block=31, batch_tokens=310))
        expected = []
        for ids in sequences(text):
            expected += [
                (ids[start : start + 31][: len(ids) - 1 - start], ids[start + 1 : start + 32])
                for start in range(0, len(ids) - 1, 31)
            ]
        assert sorted(pieces) == sorted(expected)
    first, second = (list(causal_epoch(corpus, block=31, batch_tokens=310)) for _ in range(2))
    assert all(torch.equal(a.ids, b.ids) and (a.rows == b.rows).all() for a, b in zip(first, second, strict=True))


def objective(pieces: list[np.ndarray], chance: np.random.Generator) -> Batch:
    """Lay pieces out, and say a number drawn for each: what a batch was given shows in it."""
    width = max(map(len, pieces))
    ids = torch.zeros(len(pieces), width, dtype=torch.int64)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = torch.from_numpy(piece)
    drawn = torch.from_numpy(chance.integers(0, 997, size=ids.shape))
    return Batch(ids, ids != 0, drawn, 1, sum(map(len, pieces)), rows=np.arange(0))


def test_framed_pieces_reach_the_objective_once(corpus: Corpus) -> None:
    plain = sorted(index for ids in sequences(corpus) for index in ids[1:-1])
    training = window_batches(corpus, objective, length=31, batch_tokens=310, seed=5)
    for most, batches in ((310, epoch(training)), (8192, list(window_epoch(corpus, objective, length=31)))):
        held: list[int] = []
        for batch in batches:
            assert batch.ids.numel() <= most and batch.ids.shape[1] <= 31 and len(batch.rows) == len(batch.ids)
            for row in batch.ids.tolist():
                real = [index for index in row if index]
                assert (real[0], real[-1]) == (2, 3)
                held += real[1:-1]
        assert sorted(held) == plain


def test_chance_belongs_to_the_batch(corpus: Corpus) -> None:
    again = [list(window_epoch(corpus, objective, length=31)) for _ in range(2)]
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(*again, strict=True))
    batches = window_batches(corpus, objective, length=31, batch_tokens=310, seed=5)
    draws = [batch.labels[0, :3].tolist() for batch in epoch(batches) + epoch(batches)]
    assert len({tuple(draw) for draw in draws}) == len(draws)


def every_kind(corpus: Corpus, seed: int) -> list[EpochBatches[Batch]]:
    return [
        causal_batches(corpus, block=31, batch_tokens=307, pack=True, seed=seed),
        causal_batches(corpus, block=31, batch_tokens=307, pack=False, seed=seed),
        window_batches(corpus, objective, length=31, batch_tokens=307, seed=seed),
    ]


def same(first: Batch, other: Batch) -> bool:
    return torch.equal(first.ids, other.ids) and torch.equal(first.labels, other.labels)


@pytest.mark.parametrize("kind", range(3))
def test_a_place_is_found_again_anywhere(corpus: Corpus, kind: int) -> None:
    batches = every_kind(corpus, 5)[kind]
    states, following = [], []
    for _ in range(2 * batches.batches_per_epoch + 3):
        states.append(json.dumps(batches.state()))
        following.append(next(batches))
    for index in (0, 5, len(states) // 2, len(states) - 3, len(states) - 2):
        again = every_kind(corpus, 5)[kind]
        again.load_state(json.loads(states[index]))
        assert all(same(next(again), expected) for expected in following[index : index + 2])
    batches.load_state(json.loads(states[1]))  # back, in the same object
    assert same(next(batches), following[1])


@pytest.mark.parametrize("kind", range(3))
def test_the_seed_decides(corpus: Corpus, novel: Corpus, kind: int) -> None:
    first, again, other = (every_kind(corpus, seed)[kind] for seed in (5, 5, 7))
    firsts, seconds, others = (epoch(batches) for batches in (first, again, other))
    assert all(same(*pair) for pair in zip(firsts, seconds, strict=True))
    assert not all(same(*pair) for pair in zip(firsts, others, strict=False))
    with pytest.raises(InputError, match="seed was 5, now 7"):
        other.load_state(first.state())
    with pytest.raises(InputError, match="has changed since the checkpoint was written"):
        every_kind(novel, 5)[kind].load_state(first.state())
    with pytest.raises(InputError, match="seed is -1"):
        every_kind(corpus, -1)


def test_one_order_on_every_machine(corpus: Corpus) -> None:
    """The order is part of exact resume: written down, so that a change of library or code shows here."""
    batches = causal_batches(corpus, block=31, batch_tokens=307, pack=True, seed=5)
    first = next(batches)
    assert (batches.batches_per_epoch, first.rows.tolist(), int(first.ids.sum())) == EXPECTED


EXPECTED = (18, [117, 105, 17, 126, 32, 46, 45, 2, 103], 5497)


def test_a_block_beyond_the_budget_is_named(corpus: Corpus) -> None:
    message = "batch_tokens is 30, less than one row of max_length 31; raise batch_tokens to at least 31"
    with pytest.raises(InputError, match=message):
        causal_batches(corpus, block=31, batch_tokens=30, pack=True, seed=1)
    with pytest.raises(InputError, match=message):
        list(causal_epoch(corpus, block=31, batch_tokens=30))
    with pytest.raises(InputError, match=message):
        window_batches(corpus, objective, length=31, batch_tokens=30, seed=1)


def test_a_text_shorter_than_a_block_is_one_short_row(tmp_path: Path) -> None:
    text = make(tmp_path, ["ba de fi"])
    (batch,) = causal_epoch(text, block=101, batch_tokens=101)
    assert batch.ids.shape == (1, 9) and batch.mask is None
    assert next(causal_batches(text, block=101, batch_tokens=101, pack=True, seed=1)).ids.shape == (1, 9)


def decoder(positions: str) -> Transformer:
    hparams = Hyperparameters(
        family="decoder", layers=2, width=14, heads=3, head_size=10, feedforward=19, dropout=0.0, positions=positions,
        max_positions=101,
    )  # fmt: skip
    return build(build_spec(hparams, source_vocab=VOCAB, target_vocab=VOCAB)).eval()


def token_losses(module: Transformer, batch: Batch) -> torch.Tensor:
    """The loss of every label of a batch, piece by piece in the order of `stretches`."""
    with torch.no_grad():
        logits = module(batch.ids, mask=batch.mask, documents=batch.documents).logits
    assert logits is not None
    return F.cross_entropy(logits[batch.labels != -100], batch.labels[batch.labels != -100], reduction="none")


def alone(ids: list[int], labels: list[int]) -> Batch:
    """One piece in a row of its own, without padding."""
    return Batch(torch.tensor([ids]), None, torch.tensor([labels]), len(ids), len(ids), rows=np.arange(1))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi", "buckets"])
def test_packed_equals_separate(corpus: Corpus, positions: str) -> None:
    module = decoder(positions)
    batches = causal_batches(corpus, block=101, batch_tokens=505, pack=True, seed=5)
    for batch in epoch(batches)[:3]:
        assert batch.documents is not None
        packed = token_losses(module, batch)
        separate = torch.cat([token_losses(module, alone(*piece)) for piece in stretches([batch])])
        assert float((packed - separate).abs().max() / separate.abs().max()) < 1e-5
        mixed = token_losses(module, replace(batch, documents=None))
        assert float((mixed - separate).abs().max()) > 1e-2  # without the numbers it is another loss
