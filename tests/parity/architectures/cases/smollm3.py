from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 36, "intermediate_size": 31, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

CASES = [
    Case("smollm3", "smollm3", SIZES),
    Case(
        "smollm3/options",
        "smollm3",
        SIZES
        | {
            "no_rope_layers": [0, 1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
        },
    ),
]  # fmt: skip
