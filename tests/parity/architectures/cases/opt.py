from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 22, "ffn_dim": 31, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 29, "pad_token_id": 1,
}  # fmt: skip

CASES = [
    Case("opt", "opt", SIZES, pad=1),
    Case(
        "opt/after",
        "opt",
        SIZES
        | {
            "do_layer_norm_before": False, "tie_word_embeddings": False, "dropout": 0.3, "attention_dropout": 0.2,
            "activation_function": "gelu",
        },
        pad=1,
    ),
    Case(
        "opt/options",
        "opt",
        SIZES | {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True},
        pad=1,
    ),
]  # fmt: skip
