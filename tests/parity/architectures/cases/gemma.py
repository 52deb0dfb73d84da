from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 14, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

CASES = [
    Case("gemma", "gemma", SIZES),
    Case("gemma/options", "gemma", SIZES | {"attention_bias": True, "hidden_act": "relu", "rms_norm_eps": 1e-3}),
    Case("gemma2", "gemma2", SIZES | {"sliding_window": 5, "query_pre_attn_scalar": 29}),
    Case(
        "gemma2/options",
        "gemma2",
        SIZES
        | {
            "sliding_window": 3, "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "attention_bias": True,
            "hidden_activation": "gelu",
        },
    ),
    Case(
        "gemma3_text",
        "gemma3_text",
        SIZES | {"sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 29},
    ),
    Case(
        "gemma3_text/options",
        "gemma3_text",
        SIZES
        | {
            "sliding_window": 3, "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 2.0, "attention_bias": True, "hidden_activation": "gelu",
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 333.0},
            },
        },
    ),
]  # fmt: skip
