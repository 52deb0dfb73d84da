"""Models and texts of `gpu_speed.py`: random weights and generated texts, so that no file from elsewhere is needed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_sizes import ModelSize
from inference_cases import TARGET, read_tokens
from inference_models import SYLLABLES, marian, one_token_words
from large_models import write_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
POOLING = {"word_embedding_dimension": 0, "pooling_mode_mean_tokens": True}
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
"""Folders and classes of the modules of a sentence-transformers model."""
CAPTION_WORDS = (4, 10)
"""The least and the largest number of words of a caption; on average it has 15 tokens."""
SENTENCE_WORDS = (6, 24)
"""The same for a sentence of the translation data."""


def write_gpt2(folder: Path, size: ModelSize) -> Path:
    """Write a GPT-2 whose tokenizer has one token per byte, if the folder has none."""
    if (folder / "config.json").exists():
        return folder
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size.vocabulary, n_positions=size.positions, n_embd=size.width, n_layer=size.layers,
        n_head=size.heads, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(size.vocabulary, folder)
    model.save_pretrained(folder)
    return folder


def write_marian(folder: Path, size: ModelSize) -> Path:
    """Write a Marian, if the folder has none."""
    if not (folder / "config.json").exists():
        marian(folder, size.layers, size.width, size.heads, size.vocabulary)
    return folder


def write_minilm(folder: Path, size: ModelSize) -> Path:
    """Write an encoder of MiniLM's shape in the format of sentence-transformers, if the folder has none."""
    if (folder / "modules.json").exists():
        return folder
    import tokenizers
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    names = [*special, *SYLLABLES, *(f"##{syllable}" for syllable in SYLLABLES)]
    names += [f"filler{number}" for number in range(size.vocabulary - len(names))]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(names) + "\n", encoding="utf-8")
    tokenizers.BertWordPieceTokenizer(str(vocabulary)).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "model_max_length": 512})
    config = transformers.BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=4 * size.width, max_position_embeddings=size.positions,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": size.positions // 2, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    _write_json(folder / "1_Pooling" / "config.json", POOLING | {"word_embedding_dimension": size.width})
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(MODULES)
    ]
    _write_json(folder / "modules.json", modules)
    return folder


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def make_prompts(case: str, rows: int) -> list[str]:
    """Return prompts for the byte tokenizer, each with the tokens of a case."""
    chance = random.Random(1)
    return ["".join(chance.choices(LETTERS, k=read_tokens(case))) for _ in range(rows)]


def make_sources(folder: Path, rows: int) -> list[str]:
    """Return sentences for the Marian of a folder, each of `TARGET` tokens with its end token."""
    chance, words = random.Random(1), one_token_words(folder)
    return [" ".join(chance.choices(words, k=TARGET - 1)) for _ in range(rows)]


def make_captions(number: int) -> list[str]:
    """Return captions of words of one to three syllables."""
    chance = random.Random(3)
    words = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 3))) for _ in range(5000)]
    return [" ".join(chance.choices(words, k=chance.randint(*CAPTION_WORDS))) for _ in range(number)]


def write_training_text(file: Path, vocabulary: int, tokens: int) -> None:
    """Write random text from which a tokenizer of a vocabulary size can be trained.

    Args:
        file: the file to write.
        vocabulary: the number of entries: of words, or of characters if it is below 256.
        tokens: the number of words or characters.
    """
    chance = random.Random(4)
    units: Sequence[str] = LETTERS + LETTERS.upper() + "0123456789" if vocabulary < 256 else [*_words(vocabulary)]
    joint = "" if vocabulary < 256 else " "
    text = [*units, *chance.choices(units, k=max(0, tokens - len(units)))]
    lines = (joint.join(text[start : start + 500]) for start in range(0, len(text), 500))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _words(number: int) -> Iterator[str]:
    for index in range(number):
        letters = ""
        for _ in range(4):
            index, rest = divmod(index, len(LETTERS))
            letters += LETTERS[rest]
        yield letters


def write_sentence_pairs(folder: Path, number: int) -> None:
    """Write parallel files `train.en` and `train.de` of random words, with lengths as those of captions."""
    chance = random.Random(5)
    words = [*_words(9_500)]
    for name in ("train.en", "train.de"):
        lines = [" ".join(chance.choices(words, k=chance.randint(*SENTENCE_WORDS))) for _ in range(number)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
