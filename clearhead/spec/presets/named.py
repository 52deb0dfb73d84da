"""Presets: named models of the literature as hyperparameters."""

from __future__ import annotations

from dataclasses import replace

from clearhead import spec
from clearhead.base.arguments import check_types
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

PRESETS: dict[str, Hyperparameters] = {
    # arXiv 1706.03762, table 3, rows "base" and "big".
    "transformer": Hyperparameters(feedforward=2048, activation_dropout=0.0),
    "transformer-big": Hyperparameters(width=1024, heads=16, feedforward=4096, dropout=0.3),
    # arXiv 1810.04805, section 3.
    "bert": Hyperparameters(
        family="encoder",
        layers=12,
        width=768,
        heads=12,
        feedforward=3072,
        activation="gelu",
        positions="learned",
        max_positions=512,
        segments=2,
        norm_eps=1e-12,
        embedding_norm=True,
        attention_dropout=0.1,
        embedding_scale=1.0,
        output_bias=True,
        output_transform=True,
        initialization="normal",
    ),
    # The GPT-2 report, table 2, first row.
    "gpt2": Hyperparameters(
        family="decoder",
        layers=12,
        width=768,
        heads=12,
        feedforward=3072,
        activation="gelu_tanh",
        norm_place="pre",
        positions="learned",
        max_positions=1024,
        attention_dropout=0.1,
        embedding_scale=1.0,
        initialization="normal",
    ),
    # arXiv 1910.10683, section 3.1.2 and the released "small" size.
    "t5-small": Hyperparameters(
        width=512,
        heads=8,
        head_size=64,
        feedforward=2048,
        norm="rms",
        norm_place="pre",
        positions="buckets",
        bias=False,
        attention_scale=1.0,
        embedding_scale=1.0,
        output_scale=512**-0.5,
        activation_dropout=0.1,
        attention_dropout=0.1,
        initialization="normal",
    ),
    # arXiv 2302.13971, section 2.2, at the size of the 260K-parameter TinyStories model.
    "llama-tiny": Hyperparameters(
        family="decoder",
        layers=5,
        width=64,
        heads=8,
        kv_heads=4,
        feedforward=172,
        activation="silu",
        gated=True,
        norm="rms",
        norm_eps=1e-5,
        norm_place="pre",
        positions="rotary",
        bias=False,
        dropout=0.0,
        embedding_scale=1.0,
        initialization="normal",
    ),
}


def _vocabulary(hparams: Hyperparameters, vocab_size: int) -> spec.Model:
    return build_spec(hparams, source_vocab=vocab_size, target_vocab=vocab_size)


@check_types
def transformer_base(vocab_size: int = 37000) -> spec.Model:
    """The original Transformer. Source: arXiv 1706.03762, table 3; the vocabulary: section 5.1."""
    return _vocabulary(PRESETS["transformer"], vocab_size)


@check_types
def transformer_big(vocab_size: int = 37000) -> spec.Model:
    """The large original Transformer. Source: arXiv 1706.03762, table 3; the vocabulary: section 5.1."""
    return _vocabulary(PRESETS["transformer-big"], vocab_size)


@check_types
def bert_base(vocab_size: int = 30522) -> spec.Model:
    """A bidirectional encoder with a masked-word head. Source: arXiv 1810.04805, section 3."""
    return _vocabulary(PRESETS["bert"], vocab_size)


@check_types
def gpt2(vocab_size: int = 50257) -> spec.Model:
    """A causal decoder with learned positions. Source: the GPT-2 report, section 2.3."""
    return _vocabulary(PRESETS["gpt2"], vocab_size)


@check_types
def t5_small(vocab_size: int = 32128) -> spec.Model:
    """An encoder-decoder with relative buckets. Source: arXiv 1910.10683, section 2.1."""
    return _vocabulary(PRESETS["t5-small"], vocab_size)


@check_types
def llama_tiny(vocab_size: int = 512, layers: int = 5) -> spec.Model:
    """A causal decoder with rotary positions and grouped heads. Source: arXiv 2302.13971, section 2.2."""
    return _vocabulary(replace(PRESETS["llama-tiny"], layers=layers), vocab_size)
