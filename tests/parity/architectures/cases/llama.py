from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 14, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8},
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    },
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

CASES = [
    Case("llama", "llama", SIZES),
    Case(
        "llama/options",
        "llama",
        SIZES
        | {
            "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu",
            "rms_norm_eps": 1e-3, "num_key_value_heads": None, "head_dim": None, "hidden_size": 36,
            "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
        },
    ),
    *(Case(f"llama/{kind}", "llama", SIZES | {"rope_parameters": {"rope_theta": 500.0, **value}})
      for kind, value in SCALINGS.items()),
    Case("mistral", "mistral", SIZES | {"sliding_window": 5}),
    Case("mistral/full", "mistral", SIZES | {"sliding_window": None}),
    Case("qwen2", "qwen2", SIZES | WINDOW),
    Case("qwen2/full", "qwen2", {name: value for name, value in SIZES.items() if name != "head_dim"}),
    Case("qwen3", "qwen3", SIZES | WINDOW | {"attention_bias": True}),
    Case("qwen3/full", "qwen3", SIZES | {"tie_word_embeddings": True}),
]  # fmt: skip
