"""Mask and sentinel tokens: added by training, found in published tokenizers, and stable fingerprints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from clearhead.base.errors import InputError
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import KINDS, train_tokenizer
from tests.text.corpus import make_corpus

SIZE = {"byte-bpe": 307, "byte": 271}


def train(kind: str, *, mask: bool = False, sentinels: int = 0) -> Tokenizer:
    return train_tokenizer(kind, make_corpus(), vocab_size=SIZE.get(kind, 211), mask=mask, sentinels=sentinels)


@pytest.mark.parametrize("kind", KINDS)
def test_mask_and_sentinels_follow_the_four(kind: str, tmp_path: Path) -> None:
    tokenizer = train(kind, mask=True, sentinels=3)
    assert (tokenizer.mask_id, tokenizer.sentinel_ids) == (4, (5, 6, 7))
    assert tokenizer.tokens(range(8)) == [
        *("<pad>", "<unk>", "<s>", "</s>", "<mask>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>")
    ]
    assert tokenizer.vocab_size == train(kind).vocab_size or kind in ("byte", "word", "character", "split")
    special = set(range(8)) - {tokenizer.unk_id}
    for text in [*make_corpus(), "a <mask> b", "<extra_id_0>", "<mask><mask>"]:
        assert not special & set(tokenizer.encode(text))
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.roles, loaded.fingerprint) == (tokenizer.roles, tokenizer.fingerprint)
    assert TokenizerPair.load(tmp_path).source.mask_id == 4


@pytest.mark.parametrize("kind", KINDS)
def test_without_them_nothing_changes(kind: str, tmp_path: Path) -> None:
    tokenizer = train(kind)
    assert (tokenizer.mask_id, tokenizer.sentinel_ids) == (None, ())
    prints = {tokenizer.fingerprint}
    prints |= {
        train(kind, mask=mask, sentinels=count).fingerprint for mask, count in ((True, 0), (False, 1), (True, 1))
    }
    assert len(prints) == 4
    tokenizer.save(tmp_path / "tokenizer.json")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    assert not {"mask_token", "additional_special_tokens"} & set(config)


def test_the_fingerprint_of_the_first_release_stays() -> None:
    """Runs store the fingerprint: a change of the hashed content fails here."""
    expected = "d2bc3f125110d702b6fd0a685764e9ab42e319caff827f0a9946b316dc6d768b"
    assert train_tokenizer("character", make_corpus(), vocab_size=199).fingerprint == expected


def test_sizes_count_them() -> None:
    with pytest.raises(InputError, match="vocab_size is 8, expected more than the 8 special tokens"):
        train_tokenizer("bpe", make_corpus(), vocab_size=8, mask=True, sentinels=3)
    with pytest.raises(InputError, match="needs at least 262: 6 special tokens and 256 bytes"):
        train_tokenizer("byte", [], vocab_size=261, mask=True, sentinels=1)
    with pytest.raises(InputError, match="sentinels is -1"):
        train_tokenizer("byte", [], vocab_size=300, sentinels=-1)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word"])
def test_texts_that_can_be_gone_through_again_are_never_held(kind: str) -> None:
    class Texts:
        held = 0

        def __iter__(self):
            for line in make_corpus():
                self.held += 1
                yield line

    texts = Texts()
    streamed = train_tokenizer(kind, texts, vocab_size=199)
    assert streamed.fingerprint == train_tokenizer(kind, make_corpus(), vocab_size=199).fingerprint
    assert texts.held >= len(make_corpus())


def test_a_mistake_in_the_stream_is_the_mistake_that_is_reported() -> None:
    class Texts:
        def __iter__(self):
            yield "some text"
            raise InputError("a.txt:7: invalid UTF-8")

    with pytest.raises(InputError, match=r"^a\.txt:7: invalid UTF-8$"):
        train_tokenizer("bpe", Texts(), vocab_size=199)


def make_published(names: list[str], vocab: dict[str, int]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(names)
    return backend


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_the_mask_of_a_published_tokenizer(tmp_path: Path) -> None:
    vocab = {name: index for index, name in enumerate([*BERT, "go", "stop", "hide"])}
    make_published(BERT, vocab).save(str(tmp_path / "tokenizer.json"))
    default = Tokenizer.load(tmp_path)
    assert (default.bos_id, default.eos_id, default.mask_id) == (2, 3, 4)
    assert 4 not in default.encode("go [MASK] stop")
    with_role = Tokenizer.load(tmp_path, roles={"mask": "hide"})
    assert (with_role.mask_id, with_role.fingerprint != default.fingerprint) == (7, True)
    config = {"cls_token": {"content": "go"}, "sep_token": "stop", "mask_token": "hide"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(InputError, match="the mask token 'hidden' is not in the vocabulary"):
        Tokenizer.load(tmp_path, roles={"mask": "hidden"})
    configured = Tokenizer.load(tmp_path)
    assert configured.mask_id == 7
    assert (configured.bos_id, configured.eos_id) == (2, 3)  # stand-ins count only where they are special


def test_stand_ins_for_start_and_end(tmp_path: Path) -> None:
    names = ["[PAD]", "[UNK]", "{in}", "{out}"]
    make_published(names, {name: index for index, name in enumerate(names)}).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"cls_token": "{in}", "sep_token": "{out}"}), "utf-8")
    assert Tokenizer.load(tmp_path).roles.bos == 2
    assert Tokenizer.load(tmp_path).roles.eos == 3


def test_sentinels_of_a_published_tokenizer_count_by_their_names(tmp_path: Path) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -3.0)]
    names = ["<extra_id_2>", "<extra_id_1>", "<extra_id_0>", "<extra_id_4>"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.add_special_tokens(["<pad>", "</s>", "<unk>", *names])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).sentinel_ids == (6, 5, 4)


def test_the_two_files_of_gpt2(data_dir: Path) -> None:
    """Rows 1.2 and 1.15 of the anchors."""
    pair = TokenizerPair.load(data_dir / "gpt2-tokenizer")
    tokenizer = pair.source
    assert pair.joint
    opening = "Chapter 1\n\n\n\nIt was a bright cold day in April"
    assert tokenizer.encode(opening) == [14126, 352, 628, 198, 198, 1026, 373, 257, 6016, 4692, 1110, 287, 3035]
    assert tokenizer.encode("THE END\n") == [10970, 23578, 198]
    started = [tokenizer.bos_id, *tokenizer.encode(" machine learning using PyTorch")]
    assert started == [50256, 4572, 4673, 1262, 9485, 15884, 354]
    assert tokenizer.tokens(started) == ["<|endoftext|>", "Ġmachine", "Ġlearning", "Ġusing", "ĠPy", "Tor", "ch"]
    assert (tokenizer.vocab_size, tokenizer.kind, tokenizer.roles.unk) == (50257, "pretrained", None)
    for text in (opening, "don't  stop\t<|endoftext|> 👩‍👧 naïve", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and 50256 not in ids


def two_files(folder: Path, vocab: object, merges: str) -> Path:
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text(merges, "utf-8")
    return folder


def test_merges_of_other_tokenizers(tmp_path: Path) -> None:
    vocab = {"<s>": 0, "</s>": 1, "<mask>": 2, "a": 3, "b": 4, "Ġ": 5, "ab": 6, "Ġab": 7}
    folder = two_files(tmp_path, vocab, "#version: 0.2\r\na b\r\nĠ ab\r\n")
    plain = Tokenizer.load(folder)
    assert (plain.bos_id, plain.eos_id, plain.mask_id) == (0, 1, 2)
    assert plain.encode("ab ab") == [6, 7]
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": true}', "utf-8")
    assert Tokenizer.load(folder).encode("ab ab") == [7, 7]


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ({"a": 0, "b": "1"}, "", r"vocab\.json: entry 'b' has the id '1', expected 0 or more"),
        ({"a": 0, "b": 1}, "#version: 0.2\na b\n", r"merges\.txt:2: 'ab' is not in vocab\.json"),
        ({"a": 0, "b": 1}, "a b c\n", r"merges\.txt:1: expected two pieces separated by one space, got 'a b c'"),
        ([1], "", "one JSON object, got a list"),
    ],
)
def test_mistakes_in_the_two_files(tmp_path: Path, vocab: object, merges: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tokenizer.load(two_files(tmp_path, vocab, merges))


def test_half_of_the_two_files_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}", "utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json: expected a tokenizer\.json, but there is no such file"):
        Tokenizer.load(tmp_path)
