from __future__ import annotations

from tests.parity.architectures.harness import Case

BLOOM = {"vocab_size": 37, "hidden_size": 33, "n_layer": 3, "n_head": 3, "pad_token_id": 0}
MPT = {"vocab_size": 37, "d_model": 33, "n_layers": 3, "n_heads": 3, "max_seq_len": 29, "pad_token_id": 0}

CASES = [
    Case("bloom", "bloom", BLOOM),
    Case(
        "bloom/options",
        "bloom",
        BLOOM
        | {
            "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False, "hidden_dropout": 0.3,
            "attention_dropout": 0.2, "n_head": 11,
        },
    ),
    Case("mpt", "mpt", MPT),
    Case(
        "mpt/options",
        "mpt",
        MPT
        | {
            "attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.3}, "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
    ),
]  # fmt: skip
