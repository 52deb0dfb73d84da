"""Encoder-decoders give the texts of the pipelines that transformers 5 removed: translation, summarization, text2text.

Those pipelines were the tokenizer of a checkpoint, `generate` with the checkpoint's settings, and the tokenizer again.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import torch
import transformers

import clearhead as ch
from tests import hf_models as checkpoints
from tests.checkpoints.hf import tokenizer_folders

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")]
SCRIPTS = {"Latin": "abdeghiklmnorstu", "Cyrillic": "абвгдеиклмнорсту", "Greek": "αβγδεικλμνορστυ",
           "Arabic": "ابتدرسعفقكلمنهي", "Hangul": "가나다라마바사아자차카타파하"}  # fmt: skip
PER_SCRIPT, LIMIT, LIMIT_OF_TRANSLATIONS = 10, 14, 55
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1, "do_sample": False, "no_repeat_ngram_size": 3, "min_length": 5},
    "four beams": {
        "num_beams": 4, "do_sample": False, "no_repeat_ngram_size": 2, "length_penalty": 2.0, "early_stopping": True,
        "min_length": 4,
    },
}  # fmt: skip
SIZES: dict[str, Any] = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 29, "decoder_ffn_dim": 31, "max_position_embeddings": 61, "init_std": 0.6,
}  # fmt: skip
USUAL_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
PIECES = "sentencepiece.bpe.model"


@cache
def words_of(script: str) -> tuple[str, ...]:
    draw = random.Random(script)
    return tuple("".join(draw.choices(SCRIPTS[script], k=draw.randint(2, 6))) for _ in range(60))


@cache
def texts() -> tuple[str, ...]:
    """Fifty texts, ten in each script."""
    draw = random.Random(7)
    return tuple(
        " ".join(draw.choices(words_of(script), k=draw.randint(2, 7))) for script in SCRIPTS for _ in range(PER_SCRIPT)
    )


@cache
def pieces(*, is_t5: bool = False) -> bytes:
    """A unigram model of the five scripts."""
    written = io.BytesIO()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if is_t5 else {}
    sentences = [" ".join(words_of(script)[start : start + 6]) for script in SCRIPTS for start in range(0, 60, 3)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=written, model_type="unigram", vocab_size=397,
        hard_vocab_limit=False, minloglevel=2, **ids,
    )  # fmt: skip
    return written.getvalue()


def names(content: bytes) -> list[str]:
    model = tokenizer_folders.processor(content)
    return [model.id_to_piece(number) for number in range(3, model.get_piece_size())]


def bart(folder: Path) -> type:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=460, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    model = json.loads(backend.to_str())["model"]
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]) + "\n"
    tokenizer_config = {"tokenizer_class": "BartTokenizer"}
    tokenizer_folders.write(
        folder, {"vocab.json": model["vocab"], "merges.txt": merges, "tokenizer_config.json": tokenizer_config}
    )
    config = transformers.BartConfig(vocab_size=len(model["vocab"]), **SIZES, **USUAL_IDS, decoder_start_token_id=2)
    checkpoints.save(transformers.BartForConditionalGeneration(config), folder)
    return transformers.BartForConditionalGeneration


def that_ends(model: Any, bias: float) -> Any:
    """Raise the logit of the end token: `translate` gives a text that reaches the limit an end, pipelines do not."""
    end = model.model.shared.weight[USUAL_IDS["eos_token_id"]]
    with torch.no_grad():
        model.model.decoder.layer_norm.bias += bias * end / end.square().sum()
    return model


def mbart(folder: Path) -> type:
    size = tokenizer_folders.processor(pieces()).get_piece_size() + 1 + 27
    config = transformers.MBartConfig(vocab_size=size, **SIZES, **USUAL_IDS)
    checkpoints.save(that_ends(transformers.MBartForConditionalGeneration(config), bias=11.5), folder)
    tokenizer_folders.write(folder, {PIECES: pieces(), "tokenizer_config.json": {"tokenizer_class": "MBartTokenizer"}})
    return transformers.MBartForConditionalGeneration


def t5(folder: Path) -> type:
    content = pieces(is_t5=True)
    config = transformers.T5Config(
        vocab_size=tokenizer_folders.processor(content).get_piece_size() + 100, d_model=24, d_kv=8, d_ff=31, num_layers=1,
        num_heads=2, initializer_factor=3.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    checkpoints.save(transformers.T5ForConditionalGeneration(config), folder)
    tokenizer_config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}
    tokenizer_folders.write(folder, {"spiece.model": content, "tokenizer_config.json": tokenizer_config})
    return transformers.T5ForConditionalGeneration


def pegasus(folder: Path) -> type:
    content = pieces(is_t5=True)
    tokenizer_folders.write(
        folder, {"spiece.model": content, "tokenizer_config.json": {"tokenizer_class": "PegasusTokenizer"}}
    )
    config = transformers.PegasusConfig(
        vocab_size=tokenizer_folders.processor(content).get_piece_size() + 103, **SIZES, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, forced_eos_token_id=1,
    )  # fmt: skip
    checkpoints.save(transformers.PegasusForConditionalGeneration(config), folder)
    return transformers.PegasusForConditionalGeneration


def marian(folder: Path) -> type:
    vocabulary = {piece: index for index, piece in enumerate(["</s>", "<unk>", *names(pieces()), "<pad>"])}
    pad = vocabulary["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), **SIZES, pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad,
        forced_eos_token_id=0, scale_embedding=True,
    )  # fmt: skip
    checkpoints.save(transformers.MarianMTModel(config), folder)
    tokenizer_config = {"tokenizer_class": "MarianTokenizer"}
    files = {
        "source.spm": pieces(),
        "target.spm": pieces(),
        "vocab.json": vocabulary,
        "tokenizer_config.json": tokenizer_config,
    }
    tokenizer_folders.write(folder, files)
    return transformers.MarianMTModel


def m2m100(folder: Path) -> type:
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *names(pieces())])}
    config = transformers.M2M100Config(vocab_size=len(vocabulary) + 108, decoder_start_token_id=2, **SIZES, **USUAL_IDS)
    checkpoints.save(that_ends(transformers.M2M100ForConditionalGeneration(config), bias=10.0), folder)
    tokenizer_config = {"tokenizer_class": "M2M100Tokenizer"}
    tokenizer_folders.write(
        folder, {PIECES: pieces(), "vocab.json": vocabulary, "tokenizer_config.json": tokenizer_config}
    )
    return transformers.M2M100ForConditionalGeneration


CHECKPOINTS: dict[str, Callable[[Path], type]] = {
    "bart": bart, "mbart": mbart, "t5": t5, "pegasus": pegasus, "marian": marian, "m2m100": m2m100,
}  # fmt: skip
LANGUAGES = {"mbart": ("en_XX", "de_DE"), "m2m100": ("en", "de")}


def languages_of(tokenizer: Any) -> frozenset[int]:
    return frozenset(getattr(tokenizer, "lang_code_to_id", {}).values())


def pipeline_texts(folder: Path, kind: Any, languages: tuple[str, str] | None) -> list[str]:
    """What the pipelines of transformers 4 returned: tokenizer, generate, tokenizer."""
    read = {} if languages is None else dict(zip(("src_lang", "tgt_lang"), languages, strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **read)
    model = kind.from_pretrained(folder).eval()
    start: dict[str, int] = {}
    if languages is not None:
        language = tokenizer.convert_tokens_to_ids(languages[1])
        if kind is transformers.MBartForConditionalGeneration:
            start = {"decoder_start_token_id": language}
        else:
            start = {"forced_bos_token_id": tokenizer.get_lang_id(languages[1])}
    results = []
    for text in texts():
        with torch.no_grad():
            ids = model.generate(**tokenizer(text, return_tensors="pt"), **start)[0]
        # transformers 4 left the languages out as special tokens; version 5 shows those of M2M100.
        shown = [index for index in ids.tolist() if index not in languages_of(tokenizer)]
        results.append(tokenizer.decode(shown, skip_special_tokens=True))
    return results


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_texts_are_those_of_the_pipelines(name: str, settings: str, tmp_path: Path) -> None:
    torch.manual_seed(13)
    kind, languages = CHECKPOINTS[name](tmp_path), LANGUAGES.get(name)
    limit = LIMIT if languages is None else LIMIT_OF_TRANSLATIONS
    generation_config = {
        **json.loads((tmp_path / "generation_config.json").read_text()),
        **SETTINGS[settings],
        "max_length": limit,
    }
    tokenizer_folders.write(tmp_path, {"generation_config.json": generation_config})
    expected = pipeline_texts(tmp_path, kind, languages)
    model = ch.load(tmp_path, precision="fp32")
    if languages is None:
        written = [sequences[0].text for sequences in model.generate(list(texts()))]
    else:
        beams = SETTINGS[settings]["num_beams"]
        written = model.translate(list(texts()), beam_size=beams, from_language=languages[0], to_language=languages[1])
    assert written == expected
    assert len(set(written)) >= 20, "a model that writes the same text for all shows nothing"
