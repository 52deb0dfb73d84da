"""Makers of tiny folders of every kind from which a model can be loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import clearhead as ch
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.checkpoints.hf.tokenizer_folders import SENTENCES, merges, pieces_model, processor, word_list, write

_CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
_SEQ2SEQ = Hyperparameters(layers=1, width=14, heads=2, feedforward=22, max_positions=31)
_DECODER = Hyperparameters(
    family="decoder", layers=2, width=16, heads=2, feedforward=22, activation="silu", gated=True, norm="rms",
    norm_place="pre", positions="rotary", bias=False, embedding_scale=1.0, max_positions=31,
)  # fmt: skip
_ENCODER = Hyperparameters(
    family="encoder", layers=1, width=14, heads=2, feedforward=22, activation="gelu", positions="learned",
    embedding_norm=True, segments=2, max_positions=31, embedding_scale=1.0, norm_eps=1e-12,
)  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _model(kind: Any, hparams: Hyperparameters, vocab_size: int) -> ch.Model:
    tokenizer = train_tokenizer("byte-bpe", SENTENCES, vocab_size=300)
    torch.manual_seed(3)
    spec = build_spec(hparams, source_vocab=vocab_size, target_vocab=vocab_size)
    pair = TokenizerPair(tokenizer, tokenizer, joint=True)
    return ch.Model(ch.build(spec).eval(), pair, TaskRecord(kind=kind, max_length=24))


def decoder(folder: Path) -> None:
    """A causal language model in the layout of the hub, with chat templates and generation settings."""
    _model("generate", _DECODER, 300).save(folder, format="hf")
    settings = {"eos_token_id": [1, 2], "max_new_tokens": 5, "num_beams": 2, "bad_words_ids": [[7], [8, 9]]}
    write(folder, {"generation_config.json": settings, "chat_template.jinja": _CHAT})
    write(folder / "additional_chat_templates", {"tools.jinja": _CHAT})


def shards(folder: Path) -> None:
    """A causal language model in two safetensors files with an index, and the tokenizer files of GPT-2."""
    vocabulary, pairs = merges(("<|endoftext|>",))
    _model("generate", _DECODER, len(json.loads(vocabulary)) + 1).save(folder, format="hf", max_shard_size=20_000)
    assert (folder / "model.safetensors.index.json").is_file(), "its weights are in several files"
    for name in _TOKENIZER_FILES:
        (folder / name).unlink()
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": [{"name": "default", "template": _CHAT}]}
    older = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>", "lstrip": False}}
    added = {"<|user|>": len(json.loads(vocabulary))}
    write(folder, {"vocab.json": vocabulary, "merges.txt": pairs, "tokenizer_config.json": config})
    write(folder, {"special_tokens_map.json": older, "added_tokens.json": added})


def write_pickled(folder: Path) -> None:
    """A causal language model in pickled files with an index, and a SentencePiece model."""
    pieces = pieces_model("bpe")
    _model("generate", _DECODER, processor(pieces).get_piece_size()).save(folder, format="hf")
    tensors = list(load_file(folder / "model.safetensors").items())
    for name in ("model.safetensors", *_TOKENIZER_FILES):
        (folder / name).unlink()
    parts = {"pytorch_model-00001-of-00002.bin": tensors[::2], "pytorch_model-00002-of-00002.bin": tensors[1::2]}
    for name, shard in parts.items():
        torch.save(dict(shard), folder / name)
    index = {"metadata": {}, "weight_map": {key: name for name, shard in parts.items() for key, _ in shard}}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    write(folder, {"pytorch_model.bin.index.json": index, "tokenizer.model": pieces, "tokenizer_config.json": config})


def translator(folder: Path) -> None:
    """A translator in the layout of the hub, with a SentencePiece model for each side."""
    source, target = pieces_model("unigram"), pieces_model("bpe")
    models = [processor(content) for content in (source, target)]
    words = [model.id_to_piece(number) for model in models for number in range(3, model.get_piece_size())]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *words, "<pad>"]))}
    _model("translate", _SEQ2SEQ, len(vocabulary)).save(folder, format="hf")
    for name in _TOKENIZER_FILES:
        (folder / name).unlink()
    write(folder, {"source.spm": source, "target.spm": target, "vocab.json": vocabulary})
    ids = {"decoder_start_token_id": len(vocabulary) - 1, "eos_token_id": 0, "pad_token_id": len(vocabulary) - 1}
    write(folder, {"tokenizer_config.json": {"tokenizer_class": "MarianTokenizer"}, "generation_config.json": ids})


def encoder(folder: Path) -> None:
    """A sentence encoder with its pooling, in the layout of the hub, with a list of words."""
    model = _model("embed", _ENCODER, word_list().count("\n"))
    spec = model.spec.model_copy(update={"head": ch.spec.Head(layers=(ch.spec.Pool(by="mean"), ch.spec.L2Normalize()))})
    ch.Model(ch.build(spec).eval(), model.tokenizers, model.task).save(folder, format="hf")
    (folder / "tokenizer.json").unlink()
    write(folder, {"vocab.txt": word_list(), "tokenizer_config.json": {"tokenizer_class": "BertTokenizer"}})


def write_saved(folder: Path) -> None:
    """A model in our own layout, with the files of the checkpoint that it came from."""
    source = folder.with_name(f"{folder.name}.source")
    translator(source)
    ch.load(source, device="cpu", precision="fp32").save(folder)


def run(folder: Path) -> None:
    """A run that was trained for a few steps from another model, with checkpoints, an average and averaged weights."""
    source, text = folder.with_name(f"{folder.name}.source"), folder.with_name(f"{folder.name}.txt")
    decoder(source)
    text.write_text("".join(f"{line}\n" for line in SENTENCES), encoding="utf-8")
    data = {name: {"text": str(text), "document": "line"} for name in ("train", "valid")}
    train = {
        "run": str(folder), "steps": 4, "validate_every": 2, "batch_tokens": 60, "average": 2, "ema": 0.5,
        "precision": "fp32", "threads": 1, "device": "cpu",
    }  # fmt: skip
    task = {"kind": "generate", "init": str(source)}
    ch.train({"task": task, "data": {**data, "max_length": 24}, "train": train})


KINDS: dict[str, Callable[[Path], None]] = {
    "decoder": decoder,
    "shards": shards,
    "pickled": write_pickled,
    "translator": translator,
    "encoder": encoder,
    "saved": write_saved,
    "run": run,
}
