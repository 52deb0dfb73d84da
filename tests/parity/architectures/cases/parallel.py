from __future__ import annotations

from tests.parity.architectures.harness import Case

NEOX = {
    "vocab_size": 37, "hidden_size": 44, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 31,
    "max_position_embeddings": 29, "pad_token_id": 0, "rotary_pct": 0.46,
}  # fmt: skip
GPTJ = {
    "vocab_size": 37, "n_embd": 44, "n_layer": 3, "n_head": 2, "rotary_dim": 10, "n_positions": 29, "n_inner": 31,
    "pad_token_id": 0,
}  # fmt: skip
PHI = {
    "vocab_size": 37, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
    "intermediate_size": 31, "max_position_embeddings": 29, "pad_token_id": 0, "partial_rotary_factor": 0.4,
}  # fmt: skip

CASES = [
    Case("gpt_neox", "gpt_neox", NEOX),
    Case(
        "gpt_neox/options",
        "gpt_neox",
        NEOX
        | {
            "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "rotary_pct": 1.0,
            "rotary_emb_base": 777, "hidden_act": "relu", "layer_norm_eps": 1e-3,
        },
    ),
    Case("gptj", "gptj", GPTJ),
    Case("gptj/options", "gptj", GPTJ | {"rotary_dim": 22, "n_inner": None, "activation_function": "relu"}),
    Case("phi", "phi", PHI),
    Case("phi/options", "phi", PHI | {"qk_layernorm": True, "num_key_value_heads": None, "hidden_act": "gelu"}),
]  # fmt: skip
