from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {"vocab_size": 37, "n_positions": 29, "n_embd": 22, "n_layer": 3, "n_head": 2, "pad_token_id": 0}

CASES = [
    Case("gpt2", "gpt2", SIZES),
    Case(
        "gpt2/options",
        "gpt2",
        SIZES
        | {
            "n_inner": 31, "activation_function": "relu", "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True, "resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.4,
        },
    ),
    Case("gpt2/unscaled", "gpt2", SIZES | {"scale_attn_weights": False, "activation_function": "gelu"}),
]  # fmt: skip
