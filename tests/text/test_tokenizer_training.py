"""Laws of trained tokenizers: round trip, determinism, requested size, and plain special tokens in texts."""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.base.progress import Display, use_display
from clearhead.text import tokenizer_training as training
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import KINDS, train_tokenizer
from tests.text.corpus import make_corpus

SIZE = {"byte-bpe": 401, "wordpiece": 211, "byte": 260}
SUBWORDS = ("bpe", "byte-bpe", "unigram", "wordpiece")
MARKED = ("bpe", "unigram", "wordpiece", "word")
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def train(kind: str) -> Tokenizer:
    return train_tokenizer(kind, make_corpus(), vocab_size=SIZE.get(kind, 199))


@functools.cache
def every_word() -> Tokenizer:
    return train_tokenizer("word", make_corpus(), vocab_size=5_000)


def normalize_spaces(text: str) -> str:
    """Return the text that a tokenizer with word marks restores: the mark counts as white space."""
    return " ".join(text.replace("▁", " ").split())


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_first_ids(kind: str) -> None:
    tokenizer = train(kind)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)
    assert tokenizer.tokens(range(4)) == ["<pad>", "<unk>", "<s>", "</s>"]
    assert tokenizer.kind == kind


@pytest.mark.parametrize("kind", ["byte", "byte-bpe", "character"])
def test_training_text_comes_back_exactly(kind: str) -> None:
    tokenizer = train_tokenizer(kind, make_corpus(), vocab_size=401)
    for text in [*make_corpus(), "  ba  de ", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte", "byte-bpe"])
@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_bytes_bring_back_every_unicode_text(kind: str, text: str) -> None:
    tokenizer = train(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", MARKED)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_known_characters_come_back_up_to_white_space(kind: str, data: st.DataObject) -> None:
    lines = make_corpus()
    if kind == "word":  # words, not characters, are what this kind knows
        text = data.draw(st.sampled_from(lines).map(lambda line: "\u00a0\t " + line.replace(" ", " \u2028 ")))
        tokenizer = every_word()
    else:
        text = data.draw(st.text(alphabet=sorted(set("".join(lines))) + list(" \t\n\u00a0\u2028▁")))
        tokenizer = train(kind)
        if kind == "wordpiece" and tokenizer.unk_id in tokenizer.encode(text):
            return  # a character that was never seen inside a word (or never at the start) is unknown there
    assert tokenizer.decode(tokenizer.encode(text)) == normalize_spaces(text)


def test_segmented_text_passes_through_and_is_joined() -> None:
    tokenizer = train_tokenizer("split", ["ein an@@ trie@@ b@@ s@@ rad@@ system .", "ha@@ us"], vocab_size=1_000)
    ids = tokenizer.encode("ein an@@ trie@@ b@@ s@@ rad@@ system .")
    assert tokenizer.tokens(ids) == ["ein", "an@@", "trie@@", "b@@", "s@@", "rad@@", "system", "."]
    assert tokenizer.decode([2, *ids, 3, 0, 0]) == "ein antriebsradsystem ."
    assert tokenizer.decode(tokenizer.encode("ein ha@@")) == "ein ha"
    assert tokenizer.encode("unseen ein") == [tokenizer.unk_id, *tokenizer.encode("ein")]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_are_text(kind: str) -> None:
    lines = make_corpus() + ["<s> <pad> </s> <unk>", "a<s>b </s>"] * 7
    tokenizer = train_tokenizer(kind, lines, vocab_size=SIZE.get(kind, 199))
    for text in ["</s>", "<s>", "<pad>", "ba <s> de</s>", "<pad><pad>"]:
        ids = tokenizer.encode(text)
        assert ids and not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    if kind not in ("word", "split"):
        assert tokenizer.decode(tokenizer.encode("ba <s> de</s>")) == "ba <s> de</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_repetition_of_training_change_nothing(kind: str) -> None:
    lines = make_corpus()
    again = train_tokenizer(kind, iter(lines[::-1]), vocab_size=SIZE.get(kind, 199))
    assert again.fingerprint == train(kind).fingerprint
    assert again.encode_batch(lines) == train(kind).encode_batch(lines)


def test_every_process_learns_the_same() -> None:
    script = (
        "from clearhead.text.tokenizer_training import KINDS, train_tokenizer\n"
        "from tests.text.corpus import make_corpus\n"
        "for kind in KINDS:\n"
        "    for lines, size in ((241, 401), (199, 307)):\n"
        "        tokenizer = train_tokenizer(kind, make_corpus(lines), vocab_size=size)\n"
        "        print(kind, tokenizer.fingerprint, tokenizer.encode(make_corpus()[0]))\n"
    )
    outputs = []
    for hash_seed, threads in (("0", "1"), ("11", "2"), ("97", "3"), ("4093", "5")):
        settings_of_run = {"PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        environment = {**os.environ, **settings_of_run, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(run.stdout)
    assert outputs[0].count("\n") == 2 * len(KINDS)
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize("kind", SUBWORDS)
def test_a_vocabulary_beyond_the_data_names_the_size_that_works(kind: str) -> None:
    with pytest.raises(
        InputError, match=rf"vocab_size is 50000, but this text supports a {kind} vocabulary of at most"
    ):
        train_tokenizer(kind, make_corpus(), vocab_size=50_000)
    try:
        train_tokenizer(kind, make_corpus(), vocab_size=50_000)
    except InputError as error:
        supported = int(re.findall(r"at most (\d+)", str(error))[0])
    assert train_tokenizer(kind, make_corpus(), vocab_size=supported).vocab_size == supported
    with pytest.raises(InputError, match="at most"):
        train_tokenizer(kind, make_corpus(), vocab_size=supported + 1)


@pytest.mark.parametrize("kind", [*SUBWORDS, "byte"])
def test_a_vocabulary_without_room_for_the_characters_names_the_size_that_works(kind: str) -> None:
    with pytest.raises(InputError, match="needs at least") as caught:
        train_tokenizer(kind, make_corpus(), vocab_size=31)
    needed = int(re.findall(r"at least (\d+)", str(caught.value))[0])
    assert train_tokenizer(kind, make_corpus(), vocab_size=needed).vocab_size == needed
    with pytest.raises(InputError, match="needs at least"):
        train_tokenizer(kind, make_corpus(), vocab_size=needed - 1)


@pytest.mark.parametrize("kind", SUBWORDS)
@pytest.mark.parametrize("size", [293, 311, 337])
def test_subwords_reach_the_size_exactly(kind: str, size: int) -> None:
    assert train_tokenizer(kind, make_corpus(), vocab_size=size).vocab_size == size


@pytest.mark.parametrize("kind", ["word", "character", "split"])
def test_the_size_is_a_limit_for_whole_units_and_the_frequent_stay(kind: str) -> None:
    lines = {"character": ["aaa bb b c"]}.get(kind, ["a a a a", "b b b", "c"])
    full = train_tokenizer(kind, lines, vocab_size=1_000)
    assert full.vocab_size < 1_000
    small = train_tokenizer(kind, lines, vocab_size=6)
    assert small.vocab_size == 6
    assert small.unk_id not in small.encode("a b")[:1]
    assert small.encode("c")[-1] == small.unk_id


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte"])
@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_no_text_is_a_mistake(kind: str, lines: list[str]) -> None:
    with pytest.raises(InputError, match="no text to train"):
        train_tokenizer(kind, lines, vocab_size=100)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InputError, match="did you mean 'wordpiece'"):
        train_tokenizer("word-piece", ["a"], vocab_size=100)
    with pytest.raises(InputError, match="more than the 4 special tokens"):
        train_tokenizer("bpe", ["a"], vocab_size=4)
    with pytest.raises(InputError, match="str without lone surrogates"):
        train_tokenizer("bpe", ["a\ud800"], vocab_size=100)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts_do_no_harm(kind: str) -> None:
    odd = ["\0", "a\0b\0", "x" * 5_003, "👩‍👩‍👧" * 3, "\u200b\u200e", "e\u0301", "\ufffd"]
    tokenizer = train_tokenizer(kind, make_corpus() + odd * 2, vocab_size=SIZE.get(kind, 223))
    for text in odd:
        assert max(tokenizer.encode(text), default=0) < tokenizer.vocab_size


def test_a_fork_after_parallel_work_neither_warns_nor_hangs() -> None:
    script = (
        "import os\n"
        "from clearhead.text.tokenizer_training import train_tokenizer\n"
        "from tests.text.corpus import make_corpus\n"
        "tokenizer = train_tokenizer('bpe', make_corpus(), vocab_size=199)\n"
        "ids = tokenizer.encode_batch(make_corpus())\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if tokenizer.encode_batch(make_corpus()) == ids else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")


LONG = {
    "letters": "ACGT" * 2_100,
    "signs": "-=" * 4_000,
    "white space": "\n \t" * 2_000,
}


@pytest.mark.parametrize("kind", SUBWORDS)
@pytest.mark.parametrize("name", LONG)
def test_long_words_are_cut_and_nothing_else_is(kind: str, name: str) -> None:
    texts = [f"a dog {LONG[name]} runs", *make_corpus(), ""]
    pipeline = training._pipeline(kind)
    pieces = training._CutTexts(pipeline, texts)
    assert "".join(pieces) == "".join(texts) and list(pieces)[-1 - len(make_corpus()) :] == texts[1:]
    longest = max(end - start for piece in pieces for _, (start, end) in pipeline.pre_tokenizer.pre_tokenize_str(piece))
    assert longest <= training._LONGEST_WORD
    is_word = name != "white space" or kind == "byte-bpe"
    assert (pieces.num_cut == 1) == is_word


@pytest.mark.parametrize("kind", SUBWORDS)
def test_a_word_without_end_is_read_in_part_and_said(kind: str) -> None:
    """The trainers take time that grows with the square of a word; these would take minutes."""
    messages: list[str] = []
    display = Display()
    display.message = messages.append  # type: ignore[method-assign]
    word = "".join(random.Random(3).choices("ACGT", k=400_000))
    texts = [*make_corpus(), f"ba {word} de"]
    pieces = training._CutTexts(training._pipeline(kind), texts)
    # A word may begin with the blank before it.
    left_out = sum(map(len, texts)) - sum(map(len, pieces))
    assert left_out - len(word) + training._MOST_OF_WORD in (0, 1)
    with use_display(display):
        tokenizer = train_tokenizer(kind, texts, vocab_size=SIZE.get(kind, 199))
    assert len(messages) == 1 and re.match(
        r"1 words of over 500 characters were split .* their first 10,000", messages[0]
    )
    assert tokenizer.encode("ACGT")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_unknown_characters_leave_one_blank(kind: str) -> None:
    tokenizer = train_tokenizer(kind, ["ba de", "de fu ba"] * 3, vocab_size={"wordpiece": 17, "word": 7}.get(kind, 11))
    ids = tokenizer.encode("ba Ж de ЖЖ Ж fu")
    assert tokenizer.unk_id in ids and tokenizer.decode(ids) == "ba de fu"
    assert tokenizer.decode(tokenizer.encode("Ж ba")) == "ba"
    # A stream shows the text of more and more ids.
    texts = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    known = tokenizer.encode("ba de fu")
    assert tokenizer.decode(known) == "ba de fu"
