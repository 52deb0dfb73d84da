"""Tokenizer files of every kind, made on the spot from a few sentences: nothing is downloaded."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

SENTENCES = [
    "the cat sat on the mat, and the dog looked at it.",
    "a small dog runs over the green grass in 1998!",
    "ein kleiner Hund läuft über die grüne Straße.",
    "le café est à côté de l'hôtel, n'est-ce pas ?",
    "собака бежит по улице быстро",
    "小さな犬 が 走る 漢字 です",
    "ΑΒΓ αβγ élan naïve ÅÄÖ",
    "tabs and   spaces, (brackets) [and] {more} -- 3.14 50%",
] * 3

# What trips tokenizers up, beside everything that hypothesis draws.
HARD = [
    "",
    " ",
    "   \t\n ",
    "a",
    " a",
    "a ",
    "\u00a0non\u2003breaking\u200bspaces\ufeff",
    "x" * 150,
    "e\u0301 é \u0041\u030a Å ﬁ ½ ①",
    "😀 👩‍👩‍👧‍👦 🇩🇪 ❤️",
    "\x00\x01\x1f\x7f control",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी ไทย",
    "▁underline ▁ and ##hash",
    "line\r\nline\rline\u2028line",
    "  many    spaces   inside  ",
    "don't I'LL we'Ve",
]

# No text here spells a special token out: those are plain text in this library and tokens in others.
texts = st.one_of(
    st.sampled_from(HARD),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>[]|"), max_size=40),
    st.lists(st.sampled_from(" ".join(SENTENCES).split()), max_size=8).map(" ".join),
)


@cache
def pieces_model(
    kind: str,
    *,
    size: int = 173,
    t5: bool = False,
    lead: bool = False,
    bytes_too: bool = False,
    spaces: bool = False,
    dummy: bool = True,
) -> bytes:
    """A SentencePiece model: "unigram" or "bpe"; with T5's special ids, or with padding and end in front.

    With `spaces` it keeps every space of a text; without `dummy` it puts none in front.
    """
    written = io.BytesIO()
    if spaces:
        normalization: dict[str, Any] = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    else:
        normalization = {}
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if t5 else {}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=written,
        model_type=kind,
        vocab_size=size + (256 if bytes_too else 0),
        hard_vocab_limit=False,
        byte_fallback=bytes_too,
        user_defined_symbols=["@user"] if lead else [],
        minloglevel=2,
        add_dummy_prefix=dummy,
        **normalization,
        **ids,
    )
    return written.getvalue()


def processor(content: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def write(folder: Path, files: Mapping[str, bytes | str | object]) -> Path:
    """Write files; what is neither text nor bytes is written as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


@cache
def word_list() -> str:
    """A `vocab.txt`."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        [*SENTENCES, *(text.lower() for text in SENTENCES)],
        trainers.WordPieceTrainer(vocab_size=307, special_tokens=special, show_progress=False),
    )
    entries = backend.get_vocab()
    return "".join(f"{entry}\n" for entry in sorted(entries, key=lambda entry: entries[entry]))


@cache
def merges(special: tuple[str, ...]) -> tuple[str, str]:
    """A `vocab.json` and a `merges.txt`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=331, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = json.loads(backend.to_str())["model"]
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    return json.dumps(model["vocab"]), "\n".join(lines) + "\n"
