"""Tokenizers of checkpoints: ids, templates and roles equal those of the original library, on any text.

Ids are compared with transformers if it runs the files unchanged (vocab.txt, merges, and pieces with a vocabulary). If
it rebuilds a SentencePiece model in code, ids are compared with those of SentencePiece, mapped by the published rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.checkpoints.hf.tokenizers import CheckpointTokenizers, load_tokenizers
from clearhead.generate.results import StreamingDecoder
from clearhead.text import backend
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from tests.checkpoints.hf import tokenizer_folders

ALIKE = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CLASSIC = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def write_merges(folder: Path, special: tuple[str, ...], config: dict[str, object]) -> Path:
    vocabulary, lines = tokenizer_folders.merges(special)
    return tokenizer_folders.write(
        folder, {"vocab.json": vocabulary, "merges.txt": lines, "tokenizer_config.json": config}
    )


def encode_framed(text: CheckpointTokenizers, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
    source = text.pair.source
    assert source.has_own_special_tokens
    return source.special_tokens.add_to(source.encode(first), None if second is None else source.encode(second))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.mark.parametrize(
    "config",
    [{}, {"do_lower_case": False}, {"strip_accents": False}, {"do_lower_case": False, "strip_accents": True},
     {"tokenize_chinese_chars": False}],
    ids=str,
)  # fmt: skip
def test_a_word_list_means_what_it_means_elsewhere(folder: Path, config: dict[str, object]) -> None:
    directory = tokenizer_folders.write(
        folder / f"words-{abs(hash(str(config)))}",
        {
            "vocab.txt": tokenizer_folders.word_list(),
            "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", **config},
        },
    )
    other = transformers.BertTokenizer.from_pretrained(directory)
    text = load_tokenizers(directory)

    @ALIKE
    @given(tokenizer_folders.texts)
    def alike(sentence: str) -> None:
        assert encode_framed(text, sentence)[0] == other(sentence)["input_ids"]

    alike()
    pair = other("the cat", "a dog")
    assert encode_framed(text, "the cat", "a dog") == (pair["input_ids"], pair["token_type_ids"])
    roles = text.pair.source.roles
    assert (roles.pad, roles.unk, roles.bos, roles.eos, roles.mask) == (0, 1, 2, 3, 4)


def test_a_word_list_with_another_template(folder: Path) -> None:
    words = tokenizer_folders.word_list()
    for old, new in (("[PAD]", "<pad>"), ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>")):
        words = words.replace(old, new)
    directory = tokenizer_folders.write(folder / "mpnet", {"vocab.txt": words, "config.json": {"model_type": "mpnet"}})
    ids, segments = encode_framed(load_tokenizers(directory), "the cat", "a dog")
    other = transformers.MPNetTokenizer.from_pretrained(directory)
    assert ids == other("the cat", "a dog")["input_ids"]
    assert set(segments) == {0}


@pytest.mark.parametrize(
    ("name", "special", "config"),
    [
        ("GPT2Tokenizer", ("<|endoftext|>",), {}),
        ("GPT2Tokenizer", ("<|endoftext|>",), {"add_prefix_space": True}),
        ("GPT2Tokenizer", ("<pad>", "</s>", "<unk>"), {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>",
                                                       "unk_token": "<unk>", "add_bos_token": True}),
        ("RobertaTokenizer", CLASSIC, {}),
        ("RobertaTokenizer", CLASSIC, {"add_prefix_space": True}),
    ],
)  # fmt: skip
def test_merges_mean_what_they_mean_elsewhere(
    tmp_path: Path, name: str, special: tuple[str, ...], config: dict[str, object]
) -> None:
    directory = write_merges(tmp_path / "merges", special, {"tokenizer_class": name, **config})
    other = getattr(transformers, name).from_pretrained(directory)
    text = load_tokenizers(directory)

    @ALIKE
    @given(tokenizer_folders.texts)
    def alike(sentence: str) -> None:
        assert encode_framed(text, sentence)[0] == other(sentence)["input_ids"]

    alike()
    assert encode_framed(text, "the cat", "a dog")[0] == other("the cat", "a dog")["input_ids"]


def make_numbering(content: bytes, shift: int, unknown: int) -> Callable[[str], list[int]]:
    """Return a function from a text to ids by the published rule: the number of each piece plus a shift."""
    model = tokenizer_folders.processor(content)
    return lambda text: [
        unknown if model.is_unknown(number) else number + shift for number in model.encode(text, out_type=int)
    ]


LAYOUTS = {
    # class: (model, shift of the numbers, id of unknown text, ids before the text, ids after it)
    "T5Tokenizer": (("unigram", True), 0, 2, [], [1]),
    "XLMRobertaTokenizer": (("unigram", False), 1, 3, [0], [2]),
    "CamembertTokenizer": (("unigram", False), 4, 3, [5], [6]),
    "PegasusTokenizer": (("unigram", True), 103, 105, [], [1]),
    "LlamaTokenizer": (("bpe", False), 0, 0, [1], []),
    "NllbTokenizer": (("bpe", False), 1, 3, [], [2]),
    "MBartTokenizer": (("unigram", False), 1, 3, [], [2]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_of_pieces_become_ids_by_the_rule_of_the_class(tmp_path: Path, name: str) -> None:
    (kind, t5), shift, unknown, start, end = LAYOUTS[name]
    content = tokenizer_folders.pieces_model(kind, t5=t5)
    directory = tokenizer_folders.write(
        tmp_path, {"sentencepiece.bpe.model": content, "tokenizer_config.json": {"tokenizer_class": name}}
    )
    text = load_tokenizers(directory)
    expected = make_numbering(content, shift, unknown)

    @ALIKE
    @given(tokenizer_folders.texts)
    def alike(sentence: str) -> None:
        ids, segments = encode_framed(text, sentence)
        assert ids == [*start, *expected(sentence), *end]
        assert not any(segments)

    alike()


def test_bytes_stand_for_what_has_no_piece(tmp_path: Path) -> None:
    content = tokenizer_folders.pieces_model("bpe", bytes_too=True)
    tokenizer_folders.write(tmp_path, {"tokenizer.model": content, "config.json": {"model_type": "llama"}})
    tokenizer = load_tokenizers(tmp_path).pair.source
    assert tokenizer.encode("☃") == [
        tokenizer_folders.processor(content).piece_to_id(p) for p in ("▁", "<0xE2>", "<0x98>", "<0x83>")
    ]

    @ALIKE
    @given(tokenizer_folders.texts)
    def returns(sentence: str) -> None:
        plain = " ".join(
            tokenizer_folders.processor(content).decode(tokenizer_folders.processor(content).encode(sentence)).split()
        )
        assert " ".join(tokenizer.decode(tokenizer.encode(sentence)).split()) == plain

    returns()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("dummy", [True, False])
def test_a_model_that_keeps_spaces_gives_back_every_text(kind: str, dummy: bool, tmp_path: Path) -> None:
    """Test whole texts and streams of tokens after a prompt, with spaces at both ends too."""
    content = tokenizer_folders.pieces_model(kind, bytes_too=True, spaces=True, dummy=dummy)
    tokenizer_folders.write(tmp_path, {"tokenizer.model": content, "config.json": {"model_type": "llama"}})
    tokenizer = load_tokenizers(tmp_path).pair.source
    prompt = tokenizer.encode("the cat ")

    def stream_text(ids: list[int], context: list[int]) -> str:
        decoder = StreamingDecoder(tokenizer.decode, context=context)
        return "".join([*map(decoder.add, ids), decoder.finish()])

    @ALIKE
    @given(
        tokenizer_folders.texts.map(lambda text: text.replace("▁", " ")), st.sampled_from(["", " ", "  ", " \n ", "\t"])
    )
    def returns(sentence: str, space: str) -> None:
        for text in (sentence + space, space + sentence, space):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text == stream_text(ids, [])
            assert stream_text(ids, prompt) == tokenizer.decode([*prompt, *ids])[len("the cat ") :]

    returns()


def test_ids_at_the_ends_of_a_vocabulary(tmp_path: Path) -> None:
    t5 = tokenizer_folders.write(
        tmp_path / "t5",
        {"spiece.model": tokenizer_folders.pieces_model("unigram", t5=True), "tokenizer_config.json": {"extra_ids": 7},
         "config.json": {"model_type": "t5"}},
    )  # fmt: skip
    size = tokenizer_folders.processor(tokenizer_folders.pieces_model("unigram", t5=True)).get_piece_size()
    tokenizer = load_tokenizers(t5).pair.source
    assert tokenizer.sentinel_ids == tuple(size + 6 - number for number in range(7))
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (0, 1, 0, size + 7)
    other = transformers.T5Tokenizer.from_pretrained(t5)
    assert tokenizer.tokens([size, size + 6]) == other.convert_ids_to_tokens([size, size + 6])
    roberta = tokenizer_folders.write(
        tmp_path / "xlm",
        {
            "sentencepiece.bpe.model": tokenizer_folders.pieces_model("unigram"),
            "config.json": {"model_type": "xlm-roberta"},
        },
    )
    size = tokenizer_folders.processor(tokenizer_folders.pieces_model("unigram")).get_piece_size()
    assert load_tokenizers(roberta).pair.source.mask_id == size + 1


def test_languages_stand_where_their_class_puts_them(tmp_path: Path) -> None:
    content = tokenizer_folders.pieces_model("unigram")
    size = tokenizer_folders.processor(content).get_piece_size()
    files = {"sentencepiece.bpe.model": content}
    old = load_tokenizers(
        tokenizer_folders.write(
            tmp_path / "25", {**files, "tokenizer_config.json": {"tokenizer_class": "MBartTokenizer"}}
        )
    )
    assert (old.languages["ar_AR"], old.languages["zh_CN"]) == (size + 1, size + 25)
    german = old.special_tokens_for("de_DE")
    assert (german.prefix, german.suffix) == (
        (),
        (2, old.languages["de_DE"]),
    )
    assert old.pair.source.mask_id == size + 26 and old.language_is_start
    new = load_tokenizers(
        tokenizer_folders.write(
            tmp_path / "50", {**files, "tokenizer_config.json": {"tokenizer_class": "MBart50Tokenizer"}}
        )
    )
    assert len(new.languages) == 52 and not new.language_is_start
    german = new.special_tokens_for("de_DE")
    assert (german.prefix, german.suffix) == (
        (new.languages["de_DE"],),
        (2,),
    )
    with pytest.raises(InputError, match=r"no language 'de_DF' \(did you mean 'de_DE'\?\); it has: ar_AR, cs_CZ"):
        new.special_tokens_for("de_DF")


def strings(content: bytes, *, behind: tuple[str, ...] = ()) -> dict[str, int]:
    """Test a vocabulary in a different order than the model's, with a few pieces missing."""
    model = tokenizer_folders.processor(content)
    pieces = [model.id_to_piece(number) for number in range(3, model.get_piece_size())]
    listed = ["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces[:-5]), *behind]
    return {piece: index for index, piece in enumerate(dict.fromkeys(listed))}


def test_pieces_are_looked_up_where_there_is_a_vocabulary(tmp_path: Path) -> None:
    content = tokenizer_folders.pieces_model("unigram")
    vocabulary = strings(content)
    directory = tokenizer_folders.write(
        tmp_path,
        {"sentencepiece.bpe.model": content, "vocab.json": vocabulary,
         "tokenizer_config.json": {"tokenizer_class": "M2M100Tokenizer", "src_lang": "de"}},
    )  # fmt: skip
    other = transformers.M2M100Tokenizer.from_pretrained(directory)
    text = load_tokenizers(directory)

    @ALIKE
    @given(tokenizer_folders.texts)
    def alike(sentence: str) -> None:
        assert encode_framed(text, sentence)[0] == other(sentence)["input_ids"]
        ids = text.pair.source.encode(sentence)
        assert text.pair.source.decode(ids) == other.decode(ids, skip_special_tokens=True)

    alike()
    assert text.languages["zu"] == other.get_lang_id("zu") == len(vocabulary) + 99
    assert text.special_tokens_for("fr").prefix == (other.get_lang_id("fr"),)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("separate", [False, True])
def test_two_models_over_one_vocabulary(tmp_path: Path, separate: bool) -> None:
    source, target = tokenizer_folders.pieces_model("unigram"), tokenizer_folders.pieces_model("bpe")
    joint = strings(source, behind=tuple(p for p in strings(target) if p.startswith("▁")))
    codes = {">>fra<<": len(joint)} if not separate else {}
    files = {"source.spm": source, "target.spm": target, "vocab.json": joint | codes,
             "tokenizer_config.json": {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}}  # fmt: skip
    if separate:
        files["target_vocab.json"] = strings(target)
    directory = tokenizer_folders.write(tmp_path, files)
    other = transformers.MarianTokenizer.from_pretrained(directory)
    text = load_tokenizers(directory)
    pair = text.pair
    assert not pair.joint and pair.source.has_own_special_tokens

    @ALIKE
    @given(tokenizer_folders.texts)
    def alike(sentence: str) -> None:
        assert encode_framed(text, sentence)[0] == other(sentence)["input_ids"]
        ids = other(text_target=sentence)["input_ids"]
        assert [*pair.target.encode(sentence), pair.target.eos_id] == ids
        if separate:
            assert pair.target.decode(ids) == other.decode(ids, skip_special_tokens=True)

    alike()
    if not separate:
        assert encode_framed(text, ">>fra<< the cat")[0] == other(">>fra<< the cat")["input_ids"]
        assert encode_framed(text, ">>fra<< the cat")[0][0] == codes[">>fra<<"]


def test_what_is_added_by_the_configuration_alone(tmp_path: Path) -> None:
    vocabulary, lines = tokenizer_folders.merges(("<|endoftext|>",))
    size = len(json.loads(vocabulary))
    added = {
        str(size): {"content": "<|turn|>", "special": True},
        str(size + 1): {"content": "<think>", "special": False},
    }
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added, "pad_token": "<|turn|>"}
    directory = tokenizer_folders.write(
        tmp_path, {"vocab.json": vocabulary, "merges.txt": lines, "tokenizer_config.json": config}
    )
    tokenizer = load_tokenizers(directory).pair.source
    other = transformers.GPT2Tokenizer.from_pretrained(directory)
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (size + 2, size)
    sentence = "<|turn|>a<think>b"
    assert tokenizer.encode_with_special(sentence) == other(sentence)["input_ids"]
    assert size not in tokenizer.encode(sentence), "a special token that someone writes is plain text"
    config["added_tokens_decoder"] = {"5": {"content": "<|turn|>"}}
    tokenizer_folders.write(tmp_path, {"tokenizer_config.json": config})
    with pytest.raises(InputError, match=r"gives '<\|turn\|>' the id 5, but the tokenizer gives it \d+; restore"):
        load_tokenizers(directory)


def test_a_saved_one_is_the_same_one(tmp_path: Path) -> None:
    tokenizer_folders.write(
        tmp_path / "a",
        {"spiece.model": tokenizer_folders.pieces_model("unigram", t5=True), "config.json": {"model_type": "t5"}},
    )
    pair = load_tokenizers(tmp_path / "a").pair
    pair.save(tmp_path / "b")
    loaded = TokenizerPair.load(tmp_path / "b")
    assert loaded.fingerprint == pair.fingerprint and loaded.source.special_tokens == pair.source.special_tokens
    assert loaded.source.encode("a cat") == pair.source.encode("a cat")
    unframed = Tokenizer.load(tmp_path / "a")
    assert not unframed.has_own_special_tokens and unframed.encode("a cat") == pair.source.encode("a cat")


def test_a_large_file_is_handed_to_the_library_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard against loading a tokenizer four times; each took half a second with a vocabulary of 50,000."""
    vocabulary, merges = tokenizer_folders.merges(("<|endoftext|>",))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "src_lang": "en"}
    tokenizer_folders.write(tmp_path, {"vocab.json": vocabulary, "merges.txt": merges, "tokenizer_config.json": config})
    loaded, load = [], backend._load_backend
    monkeypatch.setattr(backend, "_load_backend", lambda document: loaded.append(1) or load(document))
    first = load_tokenizers(tmp_path).pair.source
    assert len(loaded) == 1
    # Another one is not taken for it, whatever has its place in memory.
    assert load_tokenizers(tmp_path).pair.source.encode("the cat") == first.encode("the cat") and len(loaded) == 2


def test_places_of_pieces(tmp_path: Path) -> None:
    tokenizer_folders.write(
        tmp_path,
        {"spiece.model": tokenizer_folders.pieces_model("unigram", t5=True), "config.json": {"model_type": "t5"}},
    )
    tokenizer = Tokenizer.load(tmp_path)
    text = "  der Hund  läuft 😀 schnell"
    ids, spans = tokenizer.encode_with_spans(text)
    assert ids == tokenizer.encode(text)
    joined = "".join(text[start:stop] for start, stop in spans)
    assert joined.replace(" ", "") == text.replace(" ", "")
    shown = [text[start:stop] for start, stop in spans]
    assert all(piece == piece.strip() or piece.isspace() for piece in shown)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"spiece.model": b"no model", "config.json": {"model_type": "t5"}}, "must be a SentencePiece model"),
        ({"spiece.model": b"", "config.json": {"model_type": "t5"}}, "must be a SentencePiece model"),
        ({"spiece.model": "ok"}, "tokenizer_config.json names no class"),
        ({"spiece.model": "ok", "tokenizer_config.json": {"tokenizer_class": "XlmRobertaTokenizer"}},
         r"'XlmRobertaTokenizer' is not known"),
        ({"spiece.model": "ok", "tokenizer_config.json": {"tokenizer_class": "AlbertTokenizer"}},
         "of class AlbertTokenizer needs a tokenizer.json"),
        ({"spiece.model": "ok", "tokenizer_config.json": {"tokenizer_class": "DebertaV2Tokenizer",
                                                          "do_lower_case": True}}, "do_lower_case = True"),
        ({"vocab.txt": "a\nb\n"}, r"the unknown token '\[UNK\]' must be one of its 2 entries"),
        ({"tokenizer_config.json": {}}, "there is no such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, files: dict[str, object], message: str) -> None:
    good = tokenizer_folders.pieces_model("unigram")
    tokenizer_folders.write(tmp_path, {name: good if content == "ok" else content for name, content in files.items()})
    with pytest.raises(InputError, match=message):
        load_tokenizers(tmp_path)


def test_the_real_ones(data_dir: Path) -> None:
    story = load_tokenizers(data_dir / "stories260K")
    assert encode_framed(story, "Once upon a time")[0][:2] == [1, story.pair.source.encode("Once")[0]]
    assert story.max_length == 512 and story.chat is None
    other = transformers.GPT2Tokenizer(
        str(data_dir / "gpt2-tokenizer" / "vocab.json"), str(data_dir / "gpt2-tokenizer" / "merges.txt")
    )
    text = load_tokenizers(data_dir / "gpt2-tokenizer")
    for sentence in [*tokenizer_folders.HARD, *tokenizer_folders.SENTENCES[:8]]:
        assert encode_framed(text, sentence)[0] == other(sentence)["input_ids"]
