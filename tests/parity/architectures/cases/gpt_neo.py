from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 22, "num_layers": 3, "num_heads": 2, "max_position_embeddings": 29,
    "window_size": 5, "attention_types": [[["global", "local"], 1], [["local"], 1]], "pad_token_id": 0,
}  # fmt: skip

CASES = [
    Case("gpt_neo", "gpt_neo", SIZES),
    Case(
        "gpt_neo/options",
        "gpt_neo",
        SIZES
        | {
            "intermediate_size": 31, "activation_function": "relu", "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False, "resid_dropout": 0.3, "embed_dropout": 0.2, "attention_dropout": 0.4,
            "attention_types": [[["global"], 3]],
        },
    ),
]  # fmt: skip
