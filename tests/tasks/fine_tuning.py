"""Tiny published checkpoints, data that they can learn in a few steps, and run files that start from them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from clearhead.training.progress.reports import TrainingProgress
from tests import hf_models as checkpoints
from tests.checkpoints.hf import tokenizer_folders

WORDS = "the cat sat on mat and dog looked at it small runs over green grass".split()
RUN_FILE = """
[task]
{task}
init = "{start}"
[data]
train = {train}
valid = {valid}
max_length = {max_length}
[model]
dropout = 0.0
attention_dropout = 0.0
{more}
[train]
run = "{folder}/run"
steps = {steps}
batch_tokens = 331
learning_rate = 1e-2
warmup = 3
validate_every = {steps}
device = "cpu"
"""


class MessageLog(TrainingProgress):
    """Progress display that stores the messages of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        """Store one message."""
        self.messages.append(text)


def encoder(folder: Path, kind: str = "BertForMaskedLM", **changes: Any) -> Path:
    """Save a BERT checkpoint of a given class, with a WordPiece vocabulary."""
    vocabulary = tokenizer_folders.word_list()
    torch.manual_seed(7)
    config = transformers.BertConfig(
        vocab_size=vocabulary.count("\n"), hidden_size=22, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=29, max_position_embeddings=41, initializer_range=0.2, **changes,
    )  # fmt: skip
    checkpoints.save(getattr(transformers, kind)(config), folder)
    tokenizer_config = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    return tokenizer_folders.write(folder, {"vocab.txt": vocabulary, "tokenizer_config.json": tokenizer_config})


def roberta(folder: Path, kind: str = "RobertaForMaskedLM", **changes: Any) -> Path:
    """Save a RoBERTa checkpoint, with BPE merges, its template for pairs, and positions that start after padding."""
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    vocabulary, merges = tokenizer_folders.merges(special)
    torch.manual_seed(8)
    config = transformers.RobertaConfig(
        vocab_size=len(json.loads(vocabulary)), hidden_size=22, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=29, max_position_embeddings=61, type_vocab_size=1, initializer_range=0.2, **changes,
    )  # fmt: skip
    checkpoints.save(getattr(transformers, kind)(config), folder)
    tokenizer_config = {"tokenizer_class": "RobertaTokenizer"}
    return tokenizer_folders.write(
        folder, {"vocab.json": vocabulary, "merges.txt": merges, "tokenizer_config.json": tokenizer_config}
    )


def bart(folder: Path, kind: str = "BartForSequenceClassification", **changes: Any) -> Path:
    """Save a BART checkpoint, whose classifier reads the text in encoder and decoder."""
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    vocabulary, merges = tokenizer_folders.merges(special)
    torch.manual_seed(10)
    config = transformers.BartConfig(
        vocab_size=len(json.loads(vocabulary)), d_model=22, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=29, decoder_ffn_dim=29,
        max_position_embeddings=61, init_std=0.2, **changes,
    )  # fmt: skip
    checkpoints.save(getattr(transformers, kind)(config), folder)
    tokenizer_config = {"tokenizer_class": "BartTokenizer"}
    return tokenizer_folders.write(
        folder, {"vocab.json": vocabulary, "merges.txt": merges, "tokenizer_config.json": tokenizer_config}
    )


def t5(folder: Path) -> Path:
    """Save a T5 checkpoint, whose decoder starts with the padding id, with a SentencePiece model and sentinels."""
    content = tokenizer_folders.pieces_model("unigram", t5=True)
    size = tokenizer_folders.processor(content).get_piece_size() + 100
    torch.manual_seed(9)
    config = transformers.T5Config(
        vocab_size=size, d_model=22, d_kv=11, d_ff=29, num_layers=2, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=0, initializer_factor=0.5,
    )  # fmt: skip
    checkpoints.save(transformers.T5ForConditionalGeneration(config), folder)
    tokenizer_config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}
    return tokenizer_folders.write(folder, {"spiece.model": content, "tokenizer_config.json": tokenizer_config})


def question(words: list[str]) -> str:
    """Return a JSON line that asks for the animal in a text; an animal at the start of the text counts as no answer."""
    index = next(index for index, word in enumerate(words) if word in ("cat", "dog"))
    start = sum(len(word) + 1 for word in words[:index])
    answer = {"answer": words[index], "start": start} if index else {"answer": None, "start": None}
    return json.dumps({"context": " ".join(words), "question": "cat and dog", **answer}) + "\n"


def write_data(folder: Path) -> dict[str, tuple[str, str]]:
    """Write training and validation data for every kind of task, and return the [data] tables that name them."""
    draw = random.Random(1)
    for split, count in (("train", 83), ("valid", 23)):
        texts = [draw.choices(WORDS, k=5) for _ in range(count)]
        for text in texts:
            text[draw.randrange(5)] = draw.choice(["cat", "dog"])
        lines = [" ".join(text) for text in texts]
        labels = ["good" if "dog" in text else "bad" for text in texts]
        tagged = [[(word, "B-ANIMAL" if word in ("cat", "dog") else "O") for word in text] for text in texts]
        contents = {
            "txt": "".join(f"{line}\n" for line in lines),
            "tsv": "text\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in zip(lines, labels, strict=True)),
            "conll": "\n\n".join("\n".join(f"{a} {b}" for a, b in sentence) for sentence in tagged) + "\n",
            "other": "".join(f"{' '.join(reversed(text))}\n" for text in texts),
            "jsonl": "".join(map(question, texts)),
        }
        for ending, content in contents.items():
            (folder / f"{split}.{ending}").write_text(content, encoding="utf-8")

    def both(form: str) -> tuple[str, str]:
        train, valid = (form.replace("PART", f"{folder}/{split}") for split in ("train", "valid"))
        return train, valid

    return {
        "classify": both('{ text = "PART.tsv", labels = "label" }'),
        "tag": both('{ text = "PART.conll" }'),
        "text": both('{ text = "PART.txt", document = "line" }'),
        "answer": both('{ text = "PART.jsonl" }'),
        "pairs": both('{ source = "PART.txt", target = "PART.other" }'),
    }


def write_run(
    folder: Path, start: Path | str, task: str, data: str, *, steps: int = 20, max_length: int = 20, more: str = ""
) -> Path:
    """Write the data of a task and a run file that starts from a checkpoint."""
    train, valid = write_data(folder)[data]
    path = folder / "run.toml"
    text = RUN_FILE.format(
        folder=folder, start=start, task=task, train=train, valid=valid, steps=steps, max_length=max_length, more=more
    )
    path.write_text(text, encoding="utf-8")
    return path
