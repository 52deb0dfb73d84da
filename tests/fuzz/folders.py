"""Tiny folders of every kind that a model is read from, made in a moment and without training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

import clearhead as ch
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.runs.checkpoint import Checkpoint, save_checkpoint, write_best
from clearhead.runs.metrics import Metrics, MetricsLog
from clearhead.task import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.hf.tokenizer_folders import SENTENCES, pieces_model, processor, write

_CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"


def _model(task: TaskRecord, hparams: Hyperparameters) -> ch.Model:
    tokenizer = train_tokenizer("byte-bpe", SENTENCES, vocab_size=300)
    torch.manual_seed(3)
    sizes = {"source_vocab": tokenizer.vocab_size, "target_vocab": tokenizer.vocab_size}
    module = ch.build(build_spec(hparams, **sizes)).eval()
    return ch.Model(module, TokenizerPair(tokenizer, tokenizer, joint=True), task)


def _translator() -> ch.Model:
    hparams = Hyperparameters(layers=1, width=14, heads=2, feedforward=22, max_positions=31)
    return _model(TaskRecord(kind="translate", max_length=24), hparams)


def _language_model() -> ch.Model:
    hparams = Hyperparameters(
        family="decoder", layers=2, width=16, heads=2, feedforward=22, activation="silu", gated=True, norm="rms",
        norm_place="pre", positions="rotary", bias=False, embedding_scale=1.0, max_positions=31,
    )  # fmt: skip
    return _model(TaskRecord(kind="generate", max_length=24), hparams)


def decoder(folder: Path) -> None:
    """A causal language model in the layout of the hub, with a chat template and generation settings."""
    _language_model().save(folder, format="hf")
    settings = {"eos_token_id": [1, 2], "max_new_tokens": 5, "num_beams": 2, "bad_words_ids": [[7], [8, 9]]}
    write(folder, {"generation_config.json": settings, "chat_template.jinja": _CHAT})


def pieces(folder: Path) -> None:
    """A translator in the layout of the hub, with a SentencePiece model for each side."""
    source, target = pieces_model("unigram"), pieces_model("bpe")
    models = [processor(content) for content in (source, target)]
    words = [model.id_to_piece(number) for model in models for number in range(3, model.get_piece_size())]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *words, "<pad>"]))}
    hparams = Hyperparameters(layers=1, width=14, heads=2, feedforward=22, max_positions=31)
    tokenizer = train_tokenizer("word", SENTENCES, vocab_size=len(vocabulary))
    module = ch.build(build_spec(hparams, source_vocab=len(vocabulary), target_vocab=len(vocabulary))).eval()
    pair = TokenizerPair(tokenizer, tokenizer, joint=True)
    ch.Model(module, pair, TaskRecord(kind="translate")).save(folder, format="hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    write(folder, {"source.spm": source, "target.spm": target, "vocab.json": vocabulary})
    ids = {"decoder_start_token_id": len(vocabulary) - 1, "eos_token_id": 0, "pad_token_id": len(vocabulary) - 1}
    write(folder, {"tokenizer_config.json": {"tokenizer_class": "MarianTokenizer"}, "generation_config.json": ids})


def encoder(folder: Path) -> None:
    """A sentence encoder with its pooling, in the layout of the hub."""
    hparams = Hyperparameters(
        family="encoder", layers=1, width=14, heads=2, feedforward=22, activation="gelu", positions="learned",
        embedding_norm=True, segments=2, max_positions=31, embedding_scale=1.0, norm_eps=1e-12,
    )  # fmt: skip
    model = _model(TaskRecord(kind="embed", max_length=24), hparams)
    spec = model.spec.model_copy(update={"head": ch.spec.Head(layers=(ch.spec.Pool(by="mean"), ch.spec.L2Normalize()))})
    ch.Model(ch.build(spec).eval(), model.tokenizers, model.task).save(folder, format="hf")


def saved(folder: Path) -> None:
    """A model in our own layout; its manifest is left out, so that changes reach what is behind it."""
    _translator().save(folder)
    (folder / "manifest.json").unlink()


def run(folder: Path) -> None:
    """A run directory with one checkpoint."""
    model = _language_model()
    model.save(folder)
    for name in ("manifest.json", "weights.safetensors"):
        (folder / name).unlink()
    optimizer = torch.optim.AdamW(model.module.parameters())
    state = {"choices": {"threads": 1, "tokenizer": model.tokenizers.fingerprint}}
    save_checkpoint(folder, Checkpoint(3, model.module.state_dict(), optimizer.state_dict(), None, state))
    write_best(folder, 3)
    log = MetricsLog(folder)
    log.append(Metrics(**asdict(Metrics(3, 70, 1.5, 0.25, 1e-3, 700.0, 0.5, 2.0))))
    write(folder, {"run.toml": '[task]\nkind = "generate"\n[train]\nsteps = 3\n'})


KINDS: dict[str, Callable[[Path], None]] = {one.__name__: one for one in (decoder, pieces, encoder, saved, run)}
