from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 60, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0, "partial_rotary_factor": 0.4,
}  # fmt: skip

CASES = [
    Case("stablelm", "stablelm", SIZES),
    Case(
        "stablelm/options",
        "stablelm",
        SIZES
        | {
            "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True, "hidden_dropout": 0.3,
            "layer_norm_eps": 1e-3,
        },
    ),
]  # fmt: skip
