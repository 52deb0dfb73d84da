from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 36, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

CASES = [
    Case("starcoder2", "starcoder2", SIZES | {"sliding_window": 5}),
    Case(
        "starcoder2/options",
        "starcoder2",
        SIZES
        | {
            "use_bias": False, "norm_epsilon": 1e-3, "tie_word_embeddings": False, "hidden_act": "relu",
            "residual_dropout": 0.3, "embedding_dropout": 0.2,
        },
    ),
]  # fmt: skip
