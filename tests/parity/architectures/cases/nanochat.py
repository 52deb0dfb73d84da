from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 36, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

CASES = [
    Case("nanochat", "nanochat", SIZES),
    Case(
        "nanochat/options",
        "nanochat",
        SIZES
        | {
            "num_key_value_heads": None, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3,
            "final_logit_softcapping": 0.7, "rope_parameters": {"rope_type": "default", "rope_theta": 333.0},
        },
    ),
]  # fmt: skip
