from __future__ import annotations

from tests.parity.architectures.harness import Case

ENCODER = {
    "vocab_size": 37, "hidden_size": 26, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "query_pre_attn_scalar": 11, "sliding_window": 4, "pad_token_id": 0,
}  # fmt: skip
DECODER = ENCODER | {"hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5,
                     "sliding_window": 3}  # fmt: skip
OTHER = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "attention_bias": True, "rms_norm_eps": 1e-3, "hidden_activation": "silu",
}  # fmt: skip

CASES = [
    Case("t5gemma", "t5gemma", {"encoder": ENCODER, "decoder": DECODER, "vocab_size": 37}),
    Case(
        "t5gemma/options",
        "t5gemma",
        {"encoder": ENCODER, "decoder": DECODER | OTHER, "vocab_size": 37, "tie_word_embeddings": False},
    ),
]
