from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 36, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

CASES = [
    Case("cohere", "cohere", SIZES),
    Case(
        "cohere/options",
        "cohere",
        SIZES
        | {
            "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.7, "tie_word_embeddings": False,
            "layer_norm_eps": 1e-3, "num_key_value_heads": None,
        },
    ),
]  # fmt: skip
