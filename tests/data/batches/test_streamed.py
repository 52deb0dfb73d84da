"""A streamed text: every id predicted once in a pass, the same batches after a resume, and little text in memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.base.errors import InputError
from clearhead.data.batches.base import Batch
from clearhead.data.batches.text import causal_view, window_view
from clearhead.data.batches.text_stream import StreamedBatches, StreamPosition, TextStream, sample
from clearhead.data.sources.texts import TextChunk, TextFiles, TextShard, text_shards
from clearhead.data.tokenize.document_chunks import encode_chunks
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.data.batches.test_text import objective, same, stretches
from tests.text.corpus import make_corpus

CAUSAL = partial(causal_view, block=31, batch_tokens=307, pack=True, seed=5)
WINDOWS = partial(window_view, objective=objective, length=31, batch_tokens=307, seed=5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("character", make_corpus(), vocab_size=97)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of unequal size: one is compressed, one has few characters, one has white space alone."""
    shards, lines = tmp_path_factory.mktemp("shards"), make_corpus(47)
    for number, (start, stop) in enumerate(pairwise((0, 3, 17, 29, 47))):
        (shards / f"{number}.txt").write_text("\n".join(lines[start:stop]) + "\n", encoding="utf-8")
    (shards / "4.txt").write_text("\n \n", encoding="utf-8")
    with gzip.open(shards / "5.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(lines[:11]))
    return shards


def stream(folder: Path, tokenizer: Tokenizer, document: Any = "file", characters: int = 307) -> TextStream:
    return TextStream(text_shards(TextFiles(folder, document)), tokenizer, characters, 5)


def whole(shards: list[TextShard], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of every document, each tokenized as a whole."""
    sequences: list[list[int]] = []
    for shard in shards:
        for rows, starts in encode_chunks(shard.chunks(), tokenizer):
            for index, is_new in enumerate(starts):
                sequences += [[]] if is_new else []
                sequences[-1] += rows[index].tolist()
    return [ids for ids in sequences if ids]


def one_pass(batches: StreamedBatches) -> Iterator[Batch]:
    epoch = batches.epoch
    while batches.epoch == epoch:
        yield next(batches)


@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_every_id_is_predicted_once_in_a_pass(folder: Path, tokenizer: Tokenizer, document: str) -> None:
    text = stream(folder, tokenizer, document)
    documents = whole(list(text.shards), tokenizer)
    batches = StreamedBatches(text, CAUSAL)
    expected = sorted(pair for ids in documents for pair in pairwise([2, *ids, 3]))
    passes = []
    for number in range(2):
        assert batches.epoch == number
        pieces = stretches(one_pass(batches))
        assert sorted(pair for ids, labels in pieces for pair in zip(ids, labels, strict=True)) == expected
        passes.append(pieces)
    assert passes[0] != passes[1]
    framed = StreamedBatches(text, WINDOWS)
    held = sorted(
        index for batch in one_pass(framed) for row in batch.ids.tolist() for index in row if index not in (0, 2, 3)
    )
    assert held == sorted(index for ids in documents for index in ids)


def test_documents_that_fit_are_not_cut(folder: Path, tokenizer: Tokenizer) -> None:
    text = stream(folder, tokenizer, "line")
    pools = [pool for pool in islice(text.pools(StreamPosition()), 20) if pool.position.epoch == 0]
    read = sorted(pool.documents[index].tolist() for pool in pools for index in range(len(pool)))
    assert len(pools) > 7 and read == sorted(whole(list(text.shards), tokenizer))


@pytest.mark.parametrize("document", ["file", "line"])
@pytest.mark.parametrize("view", [CAUSAL, WINDOWS])
def test_a_place_is_found_again_anywhere(folder: Path, tokenizer: Tokenizer, document: str, view: Any) -> None:
    batches = StreamedBatches(stream(folder, tokenizer, document), view)
    states, following = [], []
    while batches.epoch < 2:
        states.append(json.dumps(batches.state()))
        following.append(next(batches))
    for index in (0, 7, len(states) // 2, len(states) - 3):
        again = StreamedBatches(stream(folder, tokenizer, document), view)
        again.load_state(json.loads(states[index]))
        assert json.dumps(again.state()) == states[index]
        assert all(same(next(again), expected) for expected in following[index : index + 9])
    batches.load_state(json.loads(states[1]))  # back, in the same object
    assert same(next(batches), following[1])
    others = StreamedBatches(stream(folder, tokenizer, document, 311), view)
    with pytest.raises(InputError, match="shuffle_buffer was 307, now 311"):
        others.load_state(batches.state())


def test_neighbours_in_the_text_are_apart_in_a_pool(folder: Path, tokenizer: Tokenizer) -> None:
    batches = StreamedBatches(stream(folder, tokenizer, "line", 100_000), partial(CAUSAL, pack=False))
    order = [int(row) for batch in islice(batches, batches.batches_per_epoch) for row in batch.rows]
    assert len(order) > 50 and np.corrcoef(order, np.arange(len(order)))[0, 1] < 0.5


def test_a_text_of_any_size_takes_the_memory_of_a_pool(tokenizer: Tokenizer) -> None:
    """What was read is never more than one pool and one chunk ahead of what was returned."""
    read = 0

    def chunks() -> Iterator[TextChunk]:
        nonlocal read
        for number in range(10**9):
            read += 10
            yield TextChunk("ba de fi.\n", number % 7 == 0, "endless", 0)

    pools = TextStream([TextShard(Path(__file__), chunks)], tokenizer, 1_009, 5).pools(StreamPosition())
    taken = 0
    for pool in islice(pools, 50):
        taken += pool.text_bytes
        assert pool.text_bytes <= 1_009 and taken <= read <= taken + 1_009 + 20
    assert taken > 45 * 1_009


def test_a_cut_leaves_the_ids_of_a_subword_tokenizer_as_they_are(tmp_path: Path) -> None:
    tokenizer = train_tokenizer("byte-bpe", make_corpus(), vocab_size=311)
    (tmp_path / "one.txt").write_text("\n".join(make_corpus(29)), encoding="utf-8")
    shards = text_shards(TextFiles(tmp_path / "one.txt"))
    pools = list(islice(TextStream(shards, tokenizer, 211, 5).pools(StreamPosition()), 5))
    (whole_ids,) = whole(shards, tokenizer)
    ids = [index for pool in pools for index in pool.documents[0].tolist()]
    assert [len(pool) for pool in pools] == [1] * 5 and ids == whole_ids[: len(ids)]


def test_a_sample_takes_the_same_of_every_file(folder: Path) -> None:
    shards = text_shards(TextFiles(folder, "line"))
    taken = {shard.path.name: 0 for shard in shards}
    for chunk in sample(shards, 600):
        taken[Path(chunk.origin).name] += len(chunk.text)
    assert taken.pop("4.txt") == 0 and max(taken.values()) == 100 and min(taken.values()) > 50


def test_white_space_alone_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\n\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.txt: expected text, found nothing but white space in all 1 files"):
        StreamedBatches(stream(tmp_path, tokenizer), CAUSAL)
