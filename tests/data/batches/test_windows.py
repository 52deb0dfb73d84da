"""Windows and packing: every id once, nothing cropped, the windows of the tutorial, and full blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.data.batches.text import Windows, cut_windows, pack_windows
from clearhead.data.sources.texts import TextFiles
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

SIZES = [1, 2, 3, 5, 7, 11, 13, 29, 47, 12, 6, 10]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Return documents of the sizes above, in which every id encodes its position."""
    letters = "".join(chr(0x4E00 + number) for number in range(sum(SIZES)))
    ends = np.cumsum(SIZES)
    folder = tmp_path_factory.mktemp("pieces")
    lines = [letters[end - size : end] for size, end in zip(SIZES, ends, strict=True)]
    (folder / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = train_tokenizer("character", [letters], vocab_size=997)
    return prepare_corpus(TextFiles(folder / "a.txt", "line"), tokenizer)


def sequences(corpus: Corpus) -> list[list[int]]:
    return [[2, *corpus.documents[index].tolist(), 3] for index in range(len(corpus))]


@settings(deadline=None, max_examples=100)
@given(length=st.integers(1, 61), offset=st.integers(0, 60))
def test_causal_pieces_predict_every_id_once(corpus: Corpus, length: int, offset: int) -> None:
    pieces = cut_windows(corpus, length, offset=offset % length)
    predicted: list[list[int]] = [[] for _ in SIZES]
    read: list[list[int]] = [[] for _ in SIZES]
    for index in range(len(pieces)):
        read[pieces.document[index]] += pieces.ids(corpus, index).tolist()
        predicted[pieces.document[index]] += pieces.labels(corpus, index).tolist()
    assert predicted == [sequence[1:] for sequence in sequences(corpus)]
    assert read == [sequence[:-1] for sequence in sequences(corpus)]
    lengths = [len(pieces.ids(corpus, index)) for index in range(len(pieces))]
    assert pieces.lengths.tolist() == lengths and 1 <= min(lengths) <= max(lengths) <= length
    for document, size in enumerate(SIZES):
        piece_lengths = pieces.lengths[pieces.document == document]
        if size + 1 <= length:
            assert piece_lengths.tolist() == [size + 1]  # what fits stays whole
        elif offset % length:
            assert piece_lengths[0] == offset % length and (piece_lengths[1:-1] == length).all()


@settings(deadline=None, max_examples=60)
@given(length=st.integers(3, 61), offset=st.integers(0, 60))
def test_framed_pieces_hold_every_id_once(corpus: Corpus, length: int, offset: int) -> None:
    pieces = cut_windows(corpus, length, offset=offset % (length - 2), with_special=True)
    held: list[int] = []
    for index in range(len(pieces)):
        ids = pieces.ids(corpus, index).tolist()
        assert (ids[0], ids[-1], len(ids)) == (2, 3, pieces.lengths[index])
        assert 3 <= len(ids) <= length
        held += ids[1:-1]
    assert held == corpus.documents.ids.tolist()


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 61), stride=st.integers(1, 61), offset=st.integers(0, 60))
def test_windows_leave_no_id_out(corpus: Corpus, length: int, stride: int, offset: int) -> None:
    stride, offset = 1 + (stride - 1) % length, offset % length
    pieces = cut_windows(corpus, length, stride=stride, offset=offset)
    for document, size in enumerate(SIZES):
        of = pieces.document == document
        starts, stops = pieces.start[of], pieces.stop[of]
        assert starts[0] == 0 and stops[-1] == size + 1
        assert (stops - starts == min(length, size + 1)).all()
        assert (np.diff(starts) > 0).all() and (starts[1:] <= stops[:-1]).all()
        if len(starts) > 2:
            assert (np.diff(starts)[1:-1] == stride).all()


def test_the_sliding_windows_of_the_tutorial(data_dir: Path, tmp_path: Path) -> None:
    """Row 1.3: `unfold(0, 10, 1)` over the ids of a text, and row 1.16: the same after the start token."""
    tokenizer = Tokenizer.load(data_dir / "gpt2-tokenizer")
    text = "Chapter 1\n\n\n\nIt was a bright cold day in April, and the clocks were striking thirteen."
    (tmp_path / "novel.txt").write_text(text, encoding="utf-8")
    corpus = prepare_corpus(TextFiles(tmp_path / "novel.txt"), tokenizer)
    ids = torch.tensor(tokenizer.encode(text), dtype=torch.int32)
    framed = cut_windows(corpus, 12, stride=1, with_special=True)
    assert len(framed) == len(ids) - 9
    windows = [framed.ids(corpus, index)[1:-1].tolist() for index in range(len(framed))]
    assert windows == ids.unfold(0, 10, 1).tolist()
    assert windows[0] == [14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692]
    causal = cut_windows(corpus, 10, stride=1)
    assert causal.ids(corpus, 0).tolist() == [50256, 14126, 352, 628, 198, 198, 1026, 373, 257, 6016]
    assert causal.labels(corpus, 0).tolist() == windows[0]


def test_sizes_out_of_range_are_named(corpus: Corpus) -> None:
    with pytest.raises(InputError, match="max_length is 2; expected at least 3"):
        cut_windows(corpus, 2, with_special=True)
    with pytest.raises(InputError, match="offset is 7; expected 0 to 6"):
        cut_windows(corpus, 7, offset=7)
    with pytest.raises(InputError, match="stride is 8; expected 1 to 7"):
        cut_windows(corpus, 7, stride=8)
    with pytest.raises(AssertionError, match="need causal windows"):
        cut_windows(corpus, 7, with_special=True).labels(corpus, 0)


def test_pieces_are_arrays(corpus: Corpus) -> None:
    pieces = cut_windows(corpus, 7, offset=3)
    assert isinstance(pieces, Windows) and pieces.document.dtype == pieces.start.dtype == np.int64


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 53), max_size=211), block=st.integers(53, 101))
def test_packing_keeps_every_piece_and_fits(lengths: list[int], block: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    blocks = pack_windows(sizes, block)
    assert sorted(index for rows in blocks for index in rows.tolist()) == list(range(len(lengths)))
    sums = [int(sizes[rows].sum()) for rows in blocks]
    assert all(0 < total <= block for total in sums)
    assert sum(total <= block // 2 for total in sums) <= 1  # two such blocks would have been one


def naive_best_fit(lengths: list[int], block: int) -> list[int]:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(block - length)
    return sorted(rooms)


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 53), max_size=101))
def test_packing_is_best_fit_decreasing(lengths: list[int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    assert sorted(53 - int(sizes[rows].sum()) for rows in pack_windows(sizes, 53)) == naive_best_fit(lengths, 53)


def test_little_room_is_left() -> None:
    lengths = np.minimum(np.random.default_rng(3).geometric(1 / 97, 4_999), 256).astype(np.int64)
    blocks = pack_windows(lengths, 256)
    assert 1 - lengths.sum() / (256 * len(blocks)) < 0.01
