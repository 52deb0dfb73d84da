from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 60, "intermediate_size": 31, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0],
    "rope_theta": 777.0,
}  # fmt: skip

CASES = [
    Case("phi3", "phi3", SIZES | {"sliding_window": 5, "resid_pdrop": 0.3}),
    Case("phi3/long", "phi3", SIZES | {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    Case("phi3/partial", "phi3", SIZES | {"partial_rotary_factor": 0.4, "tie_word_embeddings": True}),
]
