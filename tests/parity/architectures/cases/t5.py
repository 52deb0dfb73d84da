from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "d_model": 26, "d_kv": 10, "d_ff": 31, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "decoder_start_token_id": 0,
}  # fmt: skip

CASES = [
    Case("t5", "t5", SIZES),
    Case("t5/v1.1", "t5", SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    Case("mt5", "mt5", SIZES),
    Case("umt5", "umt5", SIZES),
    Case("umt5/options", "umt5", SIZES | {"feed_forward_proj": "relu"}),
]  # fmt: skip
