from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 36, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

CASES = [
    Case(
        "granite",
        "granite",
        SIZES
        | {
            "embedding_multiplier": 5.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    Case("granite/options", "granite", SIZES | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
]  # fmt: skip
