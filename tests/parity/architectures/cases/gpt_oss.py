from __future__ import annotations

from tests.parity.architectures.harness import Case

# transformers multiplies by experts in groups, which needs rows of a multiple of four numbers.
SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 14, "max_position_embeddings": 64, "pad_token_id": 0,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5,
}  # fmt: skip

CASES = [
    Case("gpt_oss", "gpt_oss", SIZES),
    Case(
        "gpt_oss/options",
        "gpt_oss",
        SIZES
        | {
            "attention_bias": False, "swiglu_limit": 0.5, "swiglu_alpha": 1.3, "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"], "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        },
    ),
]  # fmt: skip
