"""Tiny random checkpoints in the layout of the hub, made by transformers, each with a new tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from tests.checkpoints.hf import tokenizer_folders


def save(model: transformers.PreTrainedModel, folder: Path, settings: dict[str, object] | None = None) -> Path:
    model.eval().save_pretrained(folder)
    if settings is not None:
        tokenizer_folders.write(folder, {"generation_config.json": settings})
    return folder


def language_model(folder: Path, settings: dict[str, object] | None = None) -> Path:
    """Write a causal language model whose tokenizer has BPE merges."""
    vocabulary = _with_merges(folder)
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=61, n_embd=26, n_layer=2, n_head=2, initializer_range=0.4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return save(transformers.GPT2LMHeadModel(config), folder, settings)


def endless_model(folder: Path) -> Path:
    """Write a causal language model with BPE merges that reads millions of tokens and never ends a text."""
    vocabulary = _with_merges(folder)
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2**21, initializer_range=0.4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[0] = 0
    return save(model, folder)


def _with_merges(folder: Path) -> int:
    """Write a tokenizer of merges with a chat template; return the size of its vocabulary."""
    vocabulary, merges = tokenizer_folders.merges(("<|endoftext|>",))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "eos_token": "<|endoftext|>",
    }
    tokenizer_folders.write(folder, {"vocab.json": vocabulary, "merges.txt": merges, "tokenizer_config.json": config})
    return len(json.loads(vocabulary))


def translator(folder: Path, settings: dict[str, object] | None = None) -> Path:
    """Write an encoder-decoder with a SentencePiece model for each side and one vocabulary."""
    source, target = tokenizer_folders.pieces_model("unigram"), tokenizer_folders.pieces_model("bpe")
    models = [tokenizer_folders.processor(content) for content in (source, target)]
    pieces = [model.id_to_piece(number) for model in models for number in range(3, model.get_piece_size())]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(["</s>", "<unk>", *pieces, "<pad>"]))}
    torch.manual_seed(5)
    pad = vocabulary["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), d_model=22, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=29, decoder_ffn_dim=31, max_position_embeddings=47, init_std=0.3,
        pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad, forced_eos_token_id=0, scale_embedding=True,
        activation_function="swish", decoder_vocab_size=len(vocabulary),
    )  # fmt: skip
    save(transformers.MarianMTModel(config), folder, settings)
    return tokenizer_folders.write(
        folder,
        {
            "source.spm": source,
            "target.spm": target,
            "vocab.json": vocabulary,
            "tokenizer_config.json": {"tokenizer_class": "MarianTokenizer"},
        },
    )


def rotary_model(folder: Path, *, rows: int = 0, **settings: object) -> Path:
    """Write a causal language model with rotary positions and the tokenizer of `language_model`.

    Args:
        folder: the folder to write.
        rows: the number of embedding rows beyond the entries of the tokenizer.
        settings: values of the config, which declares 61 positions by default.
    """
    vocabulary = _with_merges(folder)
    torch.manual_seed(3)
    settings = {"max_position_embeddings": 61, **settings}
    config = transformers.LlamaConfig(
        vocab_size=vocabulary + rows, hidden_size=26, intermediate_size=29, num_hidden_layers=2,
        num_attention_heads=2, head_dim=14, num_key_value_heads=1, initializer_range=0.4, bos_token_id=0,
        eos_token_id=0, **settings,
    )  # fmt: skip
    return save(transformers.LlamaForCausalLM(config), folder)
