from __future__ import annotations

from tests.parity.architectures.harness import Case

# transformers multiplies by experts in groups, which needs rows of a multiple of four numbers.
SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 14, "max_position_embeddings": 64, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip

CASES = [
    Case("mixtral", "mixtral", SIZES | {"num_local_experts": 5}),
    Case(
        "mixtral/options",
        "mixtral",
        SIZES | {"num_local_experts": 3, "sliding_window": 5, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    Case("qwen3_moe", "qwen3_moe", SIZES | {"num_experts": 5, "moe_intermediate_size": 20}),
    Case(
        "qwen3_moe/options",
        "qwen3_moe",
        SIZES
        | {
            "num_experts": 3, "moe_intermediate_size": 20, "norm_topk_prob": True, "mlp_only_layers": [1],
            "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
        },
    ),
]  # fmt: skip
