"""Tokenizers on disk: saving and loading round-trips, changed files are refused, published files load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from clearhead.base.errors import InputError
from clearhead.text.backend import DocumentBackend
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import KINDS, train_tokenizer
from tests.text.corpus import make_corpus

SIZE = {"byte-bpe": 307, "byte": 260}


def train(kind: str = "bpe", seed: int = 5) -> Tokenizer:
    return train_tokenizer(kind, make_corpus(seed=seed), vocab_size=SIZE.get(kind, 199))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_is_the_same(kind: str, tmp_path: Path) -> None:
    saved = train(kind)
    saved.save(tmp_path / "deep" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "deep" / "tokenizer.json")
    assert loaded.fingerprint == saved.fingerprint
    assert (loaded.kind, loaded.roles, loaded.vocab_size) == (kind, saved.roles, saved.vocab_size)
    lines = make_corpus(seed=7)
    ids = saved.encode_batch(lines)
    assert loaded.encode_batch(lines) == ids
    assert [loaded.decode(row) for row in ids] == [saved.decode(row) for row in ids]
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "deep" / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_many_texts_are_tokenized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lines = train(), [*make_corpus(seed=7), ""]
    expected, batch_sizes = [tokenizer.encode(line) for line in lines], []
    whole = tokenizer._backend.encode_batch
    monkeypatch.setattr(
        tokenizer._backend, "encode_batch", lambda texts: batch_sizes.append(len(texts)) or whole(texts)
    )
    monkeypatch.setattr("clearhead.text.tokenizer._CHARACTERS", 100)
    assert tokenizer.encode_batch(lines) == expected and tokenizer.encode_batch([]) == []
    assert sum(batch_sizes) == len(lines) and len(batch_sizes) > 10


def test_the_saved_file_is_one_that_the_library_reads(tmp_path: Path) -> None:
    ours = train("unigram")
    ours.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for line in make_corpus(seed=11):
        assert theirs.encode(line).ids == ours.encode(line)


def test_fingerprints_tell_tokenizers_apart() -> None:
    prints = {train(kind, seed).fingerprint for kind in KINDS for seed in (5, 7)}
    assert len(prints) == 2 * len(KINDS) - 1  # bytes are bytes, whatever the text


def test_an_altered_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train().save(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["merges"] = document["model"]["merges"][:-1]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match="changed since it was saved"):
        Tokenizer.load(path)


def test_encode_is_one_row_of_a_batch_and_empty_text_has_no_ids() -> None:
    tokenizer = train()
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch(["Haus", ""]) == [tokenizer.encode("Haus"), []]
    assert tokenizer.decode([]) == ""


WORDS = [
    "the",
    "Zoé's",
    "tar-nished",
    "[CLS]",
    "[MASK]",
    "zoe",
    "東京",
    "\u0301e",
    "a\tb",
    "a\x1cb",
    "\u00a0",
    "a" * 101,
    "",
]


@pytest.mark.parametrize("splits", [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.WhitespaceSplit()])
@pytest.mark.parametrize("normal", [normalizers.BertNormalizer(), normalizers.NFC(), None])
def test_words_that_come_again_are_tokenized_once(
    splits: pre_tokenizers.PreTokenizer, normal: normalizers.Normalizer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"tzo[a'-",
        "##o",
        "##e",
        "##é",
        "##h",
        "é",
        "the",
        "東",
        "京",
    ]
    model = models.WordPiece({word: index for index, word in enumerate(vocabulary)}, unk_token="[UNK]")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = splits
    if normal is not None:
        whole.normalizer = normal
    whole.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    backend = DocumentBackend(json.loads(whole.to_str()))
    whole.encode_special_tokens = True
    draw, word_lists = random.Random(3), []
    plain = DocumentBackend._encode_words
    monkeypatch.setattr(
        DocumentBackend, "_encode_words", lambda self, words: (word_lists.append(list(words)), plain(self, words))[1]
    )
    texts = ["", " ", *(" ".join(draw.choices(WORDS, k=draw.randint(1, 17))) for _ in range(41))]
    expected = [encoding.ids for encoding in whole.encode_batch(texts, add_special_tokens=False)]
    assert backend.encode_batch(texts) == expected and len(set(map(tuple, expected))) > 30
    assert [sorted(words) for words in word_lists] == [sorted(WORDS)]
    assert backend.encode_batch([" ".join(WORDS)]) == [whole.encode(" ".join(WORDS), add_special_tokens=False).ids]
    assert len(word_lists) == 1, "words that do not come again are tokenized with their text"
    for wrong in ("a \ud800", 5):
        with pytest.raises(TypeError):
            backend.encode_batch([*texts, wrong])  # type: ignore[list-item]


def test_added_tokens_across_spaces_are_found() -> None:
    whole = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "new": 1, "york": 2}, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    whole.add_tokens(["new york"])
    assert DocumentBackend(json.loads(whole.to_str())).encode_batch(["new york new york york"] * 3) == [[3, 3, 2]] * 3


def test_what_is_no_text_is_named() -> None:
    tokenizer = train()
    with pytest.raises(InputError, match=r"text 2 of 3 has the lone surrogate '\\ud800' at character 2"):
        tokenizer.encode_batch(["a", "b\ud800", "c"])
    with pytest.raises(InputError, match=r"token id 199 is not in the vocabulary, expected 0 to 198"):
        tokenizer.tokens([5, 199])
    with pytest.raises(InputError, match="token id -1"):
        tokenizer.tokens([-1])


def write(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object] | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder / "tokenizer.json"


def unigram_like_t5() -> tokenizers.Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(piece, -3.0) for piece in ("▁", "a", "b", "<", "/", "s", ">")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "</s>", "<unk>"])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.enable_truncation(2)
    backend.enable_padding(length=13)
    return backend


def test_a_vocabulary_that_holds_its_end_token_never_takes_it_from_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, unigram_like_t5()))
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 2, 0, 1)
    ids = tokenizer.encode("ab </s> a")
    assert 1 not in ids and 0 not in ids
    assert tokenizer.decode(tokenizer.encode("abab")) == "abab"


def test_padding_truncation_and_added_ends_of_a_file_are_switched_off(tmp_path: Path) -> None:
    write(tmp_path, unigram_like_t5())
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.tokens(tokenizer.encode("abab")) == ["▁", "a", "b", "a", "b"]
    assert [len(row) for row in tokenizer.encode_batch(["a", "ababab"])] == [2, 7]


def test_roles_come_from_the_config_and_the_caller_wins(tmp_path: Path) -> None:
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "go": 4, "stop": 5}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    path = write(tmp_path, backend)
    default = Tokenizer.load(path)
    assert (default.pad_id, default.unk_id, default.bos_id, default.eos_id, default.kind) == (0, 1, 2, 3, "pretrained")
    write(tmp_path, backend, {"bos_token": {"content": "go"}, "eos_token": "stop", "unk_token": None})
    configured = Tokenizer.load(path)
    assert (configured.bos_id, configured.eos_id, configured.unk_id) == (4, 5, 1)
    with_role = Tokenizer.load(path, roles={"bos": "[SEP]"})
    assert (with_role.bos_id, with_role.eos_id) == (3, 5)
    assert with_role.fingerprint != configured.fingerprint
    with pytest.raises(InputError, match=r"bos token '\[SEQ\]' is not in the vocabulary \(did you mean '\[SEP\]'\?\)"):
        Tokenizer.load(path, roles={"bos": "[SEQ]"})
    with pytest.raises(InputError, match="'end' is not a role"):
        Tokenizer.load(path, roles={"end": "[SEP]"})


def test_a_byte_level_tokenizer_without_an_unknown_token(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({entry: index for index, entry in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.roles.unk is None
    assert tokenizer.pad_id == tokenizer.bos_id == tokenizer.eos_id == 256
    text = "x <|endoftext|> é"
    assert 256 not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_end_token_is_a_mistake_that_says_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(InputError, match="no end token among no added tokens: name it as the eos role"):
        Tokenizer.load(path)
    assert Tokenizer.load(path, roles={"eos": "b"}).eos_id == 1


def test_a_published_checkpoint(data_dir: Path) -> None:
    tokenizer = Tokenizer.load(data_dir / "stories260K" / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (512, 0, 1, 2)
    text = "Once upon a time, there was a little girl. </s> ☃"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 2 not in tokenizer.encode(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "in JSON, but expecting value"),
        ('{"a": 1,\n}', r":2: expected a tokenizer.json in JSON"),
        ("[]", "one JSON object, got a list"),
        ("{}", "the kind of the model must be BPE"),
        ('{"model": {"type": "BPE"}, "added_tokens": []}', "the tokenizers library cannot run this tokenizer.json"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Tokenizer.load(path)


def test_a_missing_file_or_one_in_another_encoding_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(InputError, match="not UTF-8"):
        Tokenizer.load(tmp_path)


def test_a_pair_of_one_is_one_file_and_a_pair_of_two_is_two(tmp_path: Path) -> None:
    first, second = train(), train("unigram")
    joint = TokenizerPair(source=first, target=first, joint=True)
    apart = TokenizerPair(source=first, target=second, joint=False)
    joint.save(tmp_path / "joint")
    apart.save(tmp_path / "apart")
    assert (tmp_path / "joint" / "tokenizer.json").is_file()
    assert not (tmp_path / "apart" / "tokenizer.json").exists()
    loaded = TokenizerPair.load(tmp_path / "joint")
    assert loaded.joint and loaded.fingerprint == joint.fingerprint
    loaded = TokenizerPair.load(tmp_path / "apart")
    assert not loaded.joint and loaded.fingerprint == apart.fingerprint
    assert (loaded.source.kind, loaded.target.kind) == ("bpe", "unigram")
    swapped = TokenizerPair(source=second, target=first, joint=False)
    split = TokenizerPair(source=first, target=first, joint=False)
    assert len({pair.fingerprint for pair in (joint, apart, swapped, split)}) == 4


def test_half_a_pair_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has none of them"):
        TokenizerPair.load(tmp_path)
    train().save(tmp_path / "source.tokenizer.json")
    with pytest.raises(InputError, match=r"target.tokenizer.json is missing"):
        TokenizerPair.load(tmp_path)
    with pytest.raises(InputError, match="same tokenizer for both sides"):
        TokenizerPair(source=train(), target=train("word"), joint=True)
