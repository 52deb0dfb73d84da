"""Stores of pairs: filtering, counts, the cache, and the state after two processes or a crash."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import clearhead.data.arrays as arrays_module
import clearhead.data.stores.store as pairs_module
import clearhead.data.stores.store as store_module
import clearhead.data.tokenize.tokenizers as tokenizers_module
from clearhead.base.errors import InputError, RunFailure
from clearhead.data.sources.pairs import parallel_files, read_pairs
from clearhead.data.stores.store import prepare_pairs
from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers
from clearhead.tasks.translate.train import collate_pairs
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix, SpecialTokens
from clearhead.text.tokenizer_training import train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
WORDS = ["aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder))
    return folder


def write(folder: Path, pairs: list[tuple[str, str]]) -> AlignedFiles:
    (folder / "a.de").write_text("".join(f"{pair[0]}\n" for pair in pairs), encoding="utf-8")
    (folder / "a.en").write_text("".join(f"{pair[1]}\n" for pair in pairs), encoding="utf-8")
    return parallel_files(folder / "a.de", folder / "a.en")


def random_pairs(count: int, seed: int = 3) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    return [
        (" ".join(draw.choices(WORDS, k=draw.randint(1, 13))), " ".join(draw.choices(WORDS, k=draw.randint(1, 11))))
        for _ in range(count)
    ]


def tokenizers_of(pairs: list[tuple[str, str]]) -> TokenizerPair:
    return TokenizerPair(
        source=train_tokenizer("split", [pair[0] for pair in pairs], vocab_size=100),
        target=train_tokenizer("split", [pair[1] for pair in pairs], vocab_size=100),
        joint=False,
    )


@pytest.mark.parametrize("around", [PrefixSuffix(), PrefixSuffix((5,), (6, 7))], ids=["nothing", "three ids"])
def test_what_stands_around_a_source_is_what_its_special_tokens_say(around: PrefixSuffix, tmp_path: Path) -> None:
    """Empty special tokens are not unknown ones: sources get no end token."""
    pairs = random_pairs(7)
    plain = tokenizers_of(pairs)
    written = PrefixSuffix((3, 4), (2,))
    framed = TokenizerPair(
        plain.source.with_special_tokens(SpecialTokens(source=around)),
        plain.target.with_special_tokens(SpecialTokens(target=written)),
        joint=False,
    )
    source = write(tmp_path, pairs)
    prepare_pairs(source, framed, max_length=20, max_ratio=None, training=True)
    store = prepare_pairs(source, framed, max_length=20, max_ratio=None, training=True)
    batch = collate_pairs(store, np.arange(7), framed)
    assert batch.mask is not None and batch.target_ids is not None and batch.target_mask is not None
    for row, (text, target) in enumerate(pairs):
        assert batch.ids[row, batch.mask[row]].tolist() == around(plain.source.encode(text))
        whole = written(plain.target.encode(target))
        assert batch.target_ids[row, batch.target_mask[row]].tolist() == whole[:-1]
        assert batch.labels[row, batch.target_mask[row]].tolist() == whole[1:]


def test_the_store_holds_what_the_tokenizers_say(tmp_path: Path) -> None:
    pairs = random_pairs(101)
    tokenizers = tokenizers_of(pairs)
    store = prepare_pairs(write(tmp_path, pairs), tokenizers, max_length=20, max_ratio=None, training=True)
    assert len(store) == 101
    for index, (source, target) in enumerate(pairs):
        assert store.texts[0][index].tolist() == tokenizers.source.encode(source)
        assert store.texts[1][index].tolist() == tokenizers.target.encode(target)
    assert store.texts[0].lengths.tolist() == [len(pair[0].split()) for pair in pairs]
    assert store.texts[1].lengths.tolist() == [len(pair[1].split()) for pair in pairs]
    assert store.texts[0][0].dtype == np.uint16
    assert not store.texts[0][0].flags.writeable


def test_work_in_pieces_gives_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    pairs = random_pairs(101)
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)
    whole = prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True).identity
    monkeypatch.setenv("CLEARHEAD_CACHE", str(cache / "other"))
    monkeypatch.setattr(arrays_module, "_CHUNK_TEXTS", 17)
    pieces = prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True)
    assert pieces.identity == whole


def test_every_dropped_pair_is_counted_once(tmp_path: Path) -> None:
    def text(length: int) -> str:
        return " ".join(WORDS[:1] * length)

    pairs = [
        (text(3), text(3)),
        ("", text(3)),
        (text(3), " \u00a0"),
        ("", ""),
        (text(7), text(6)),  # with its end token the source has 8, just too long
        (text(6), text(6)),
        (text(6), text(1)),  # 7 tokens to 2: a ratio of 3.5
        (text(5), text(1)),  # 6 to 2: exactly 3
        (text(1), text(6)),
        (text(9), text(1)),  # both too long and badly matched: counts as too long
    ]
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)
    store = prepare_pairs(source, tokenizers, max_length=7, max_ratio=3.0, training=True)
    assert store.arrays["lines"].tolist() == [0, 5, 7]
    assert store.report == "10 pairs read, 3 kept, 7 dropped (3 empty, 2 too long, 2 badly matched)"
    everything = prepare_pairs(source, tokenizers, max_length=7, max_ratio=3.0, training=False)
    assert everything.report == "10 pairs read, 5 kept, 5 dropped (3 empty, 2 too long, 0 badly matched)"


def test_nothing_left_is_a_mistake_with_the_counts(tmp_path: Path, cache: Path) -> None:
    pairs = [("aa bb cc", "aa bb cc"), ("", "aa")]
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)
    with pytest.raises(InputError, match=r"no pair from here on can be used.*1 empty, 1 too long.*max_length is 3"):
        prepare_pairs(source, tokenizers, max_length=3, max_ratio=None, training=True)
    assert not list(cache.rglob("*"))
    with pytest.raises(InputError, match="max_length is 1; expected at least 2"):
        prepare_pairs(source, tokenizers, max_length=1, max_ratio=None, training=True)
    with pytest.raises(InputError, match=r"max_ratio is 0\.5; expected a number of at least 1"):
        prepare_pairs(source, tokenizers, max_length=9, max_ratio=0.5, training=True)


def test_a_second_preparation_neither_reads_nor_tokenises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_pairs(53)
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)
    first = prepare_pairs(source, tokenizers, max_length=20, max_ratio=4.0, training=True)
    monkeypatch.setattr(pairs_module, "read_pairs", None)
    again = prepare_pairs(source, tokenizers, max_length=20, max_ratio=4.0, training=True)
    assert again.folder == first.folder
    assert again.report == first.report
    assert again.identity == first.identity


def test_every_input_is_part_of_the_key(tmp_path: Path) -> None:
    pairs = random_pairs(53)
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)
    swapped = TokenizerPair(source=tokenizers.target, target=tokenizers.source, joint=False)
    folders = {
        prepare_pairs(source, tokenizers, max_length=20, max_ratio=4.0, training=True).folder,
        prepare_pairs(source, tokenizers, max_length=19, max_ratio=4.0, training=True).folder,
        prepare_pairs(source, tokenizers, max_length=20, max_ratio=3.0, training=True).folder,
        prepare_pairs(source, tokenizers, max_length=20, max_ratio=4.0, training=False).folder,
        prepare_pairs(source, swapped, max_length=20, max_ratio=4.0, training=True).folder,
    }
    write(tmp_path, random_pairs(53, seed=7))
    folders.add(prepare_pairs(source, tokenizers, max_length=20, max_ratio=4.0, training=True).folder)
    assert len(folders) == 6


@pytest.mark.parametrize("damage", ["truncate", "delete", "garble"])
def test_a_damaged_store_is_made_again(tmp_path: Path, damage: str) -> None:
    pairs = random_pairs(53)
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)
    store = prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True)
    victim = store.folder / ("store.json" if damage == "garble" else "source_ids.bin")
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-7])
    elif damage == "delete":
        victim.unlink()
    else:
        victim.write_text("{", encoding="utf-8")
    again = prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True)
    assert (again.identity, len(again)) == (store.identity, 53)
    assert [folder.name for folder in store.folder.parent.iterdir()] == [store.folder.name]


def test_processes_at_once_agree_and_leave_nothing_behind(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, random_pairs(2_003))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from clearhead.data.sources.pairs import parallel_files\n"
        "from clearhead.data.stores.store import prepare_pairs\n"
        "from clearhead.data.tokenize.tokenizers import load_or_train_tokenizers\n"
        f"source = parallel_files(Path({str(tmp_path / 'a.de')!r}), Path({str(tmp_path / 'a.en')!r}))\n"
        "sys.stdin.readline()\n"
        "tokenizers = load_or_train_tokenizers(source, kind='split', vocab_size=100, joint=True)\n"
        "store = prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True)\n"
        "print(tokenizers.fingerprint, store.identity, store.folder)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CLEARHEAD_CACHE": str(cache)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    outputs = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(set(outputs)) == 1
    assert sorted(folder.name for folder in cache.iterdir()) == ["pairs", "tokenizers"]
    assert [len(list(folder.iterdir())) for folder in cache.iterdir()] == [1, 1]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_pairs(53)
    source, tokenizers = write(tmp_path, pairs), tokenizers_of(pairs)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module.ArrayWriter, "append", full)
        with pytest.raises(RunFailure, match=r"cannot be written \(No space left on device\).*CLEARHEAD_CACHE"):
            prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True)
    assert not list((cache / "pairs").iterdir())
    assert len(prepare_pairs(source, tokenizers, max_length=20, max_ratio=None, training=True)) == 53


def test_what_a_killed_process_left_is_cleared_after_a_day(tmp_path: Path, cache: Path) -> None:
    old, new = cache / "pairs" / ".a.1.tmp", cache / "pairs" / ".a.2.tmp"
    for left in (old, new):
        left.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    pairs = random_pairs(5)
    prepare_pairs(write(tmp_path, pairs), tokenizers_of(pairs), max_length=20, max_ratio=None, training=True)
    assert (old.exists(), new.exists()) == (False, True)


def test_tokenizers_are_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, random_pairs(53))
    joint = load_or_train_tokenizers(source, kind="word", vocab_size=100, joint=True)
    apart = load_or_train_tokenizers(source, kind="word", vocab_size=9, joint=False)
    assert joint.source is joint.target
    assert apart.fingerprint != joint.fingerprint
    monkeypatch.setattr(tokenizers_module, "train_tokenizer", None)
    assert load_or_train_tokenizers(source, kind="word", vocab_size=100, joint=True).fingerprint == joint.fingerprint
    again = load_or_train_tokenizers(source, kind="word", vocab_size=9, joint=False)
    assert again.fingerprint == apart.fingerprint


def test_damaged_tokenizers_are_trained_again(tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path, random_pairs(53))
    first = load_or_train_tokenizers(source, kind="word", vocab_size=100, joint=True)
    (saved,) = cache.rglob("tokenizer.json")
    document = json.loads(saved.read_text(encoding="utf-8"))
    document["model"]["vocab"] = {"<unk>": 0}
    saved.write_text(json.dumps(document), encoding="utf-8")
    assert load_or_train_tokenizers(source, kind="word", vocab_size=100, joint=True).fingerprint == first.fingerprint


def test_a_vocabulary_beyond_one_side_names_the_side(tmp_path: Path) -> None:
    source = write(tmp_path, random_pairs(53))
    with pytest.raises(InputError, match="source side: vocab_size is 5000"):
        load_or_train_tokenizers(source, kind="bpe", vocab_size=5_000, joint=False)


def test_multi30k_is_opened_in_a_moment(data_dir: Path) -> None:
    folder = data_dir / "multi30k-bpe"
    source = parallel_files(folder / "train.de", folder / "train.en")
    identities, seconds = [], []
    for _ in range(2):
        start = time.perf_counter()
        tokenizers = load_or_train_tokenizers(source, kind="split", vocab_size=20_000, joint=True)
        store = prepare_pairs(source, tokenizers, max_length=128, max_ratio=6.0, training=True)
        seconds.append(time.perf_counter() - start)
        identities.append(store.identity)
    assert identities[0] == identities[1]
    assert len(store) <= len(read_pairs(source)) == 29_000
    # Not a measurement: opening is some fifty times as fast, and a preparation done twice is what this would catch.
    assert seconds[1] < seconds[0] / 2


def test_prepared_data_makes_a_cache_that_nobody_else_can_write(tmp_path: Path, cache: Path) -> None:
    pairs = random_pairs(5)
    before = os.umask(0o002)
    try:
        prepare_pairs(write(tmp_path, pairs), tokenizers_of(pairs), max_length=20, max_ratio=None, training=True)
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
