from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 84, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 29, "pad_token_id": 0,
}  # fmt: skip
NEW = SIZES | {"new_decoder_architecture": True, "num_kv_heads": 3}

CASES = [
    Case("falcon", "falcon", SIZES),
    Case(
        "falcon/steps",
        "falcon",
        SIZES | {"parallel_attn": False, "multi_query": False, "bias": True, "attention_dropout": 0.2},
    ),
    Case("falcon/heads", "falcon", SIZES | {"multi_query": False, "ffn_hidden_size": 31, "activation": "relu"}),
    Case("falcon/two", "falcon", NEW | {"bias": True, "hidden_dropout": 0.3, "layer_norm_epsilon": 1e-3}),
    Case(
        "falcon/one",
        "falcon",
        NEW
        | {
            "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
        },
    ),
    # Its eager form adds the penalty twice, so that only the other one says what the model is.
    Case("falcon/alibi", "falcon", SIZES | {"alibi": True, "parallel_attn": False}, attention="sdpa"),
]  # fmt: skip
