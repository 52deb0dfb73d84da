from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 36, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
NESTED = {
    "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "rope_theta": 777.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 333.0},
}

CASES = [
    Case("olmo", "olmo", SIZES),
    Case("olmo/options", "olmo", SIZES | {"clip_qkv": 0.4, "attention_bias": True, "tie_word_embeddings": True}),
    Case("olmo2", "olmo2", SIZES),
    Case("olmo2/options", "olmo2", SIZES | {"attention_bias": True, "num_key_value_heads": None, "rms_norm_eps": 1e-3}),
    Case("olmo3", "olmo3", SIZES | {"num_hidden_layers": 5, "sliding_window": 5}),
    Case(
        "olmo3/options",
        "olmo3",
        SIZES
        | {
            "sliding_window": 3, "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": NESTED, "tie_word_embeddings": True,
        },
    ),
]  # fmt: skip
