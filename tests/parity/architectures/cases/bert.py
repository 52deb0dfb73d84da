from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "hidden_size": 26, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 31,
    "max_position_embeddings": 29, "num_labels": 5,
}  # fmt: skip
OPTIONS = {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 1, "tie_word_embeddings": False}

CASES = [
    Case("bert", "bert", SIZES),
    Case("bert/options", "bert", SIZES | OPTIONS),
    Case("roberta", "roberta", SIZES | {"pad_token_id": 3}, pad=3, reads_ids=True),
    Case("roberta/options", "roberta", SIZES | OPTIONS, pad=1, reads_ids=True),
    Case("xlm-roberta", "xlm-roberta", SIZES, pad=1, reads_ids=True),
    Case("camembert", "camembert", SIZES, pad=1, reads_ids=True),
]
