from __future__ import annotations

from tests.parity.architectures.cases.bert import OPTIONS, SIZES
from tests.parity.architectures.harness import Case

DISTILLED = {
    "vocab_size": 37, "dim": 26, "n_layers": 3, "n_heads": 2, "hidden_dim": 31, "max_position_embeddings": 29,
    "num_labels": 5,
}  # fmt: skip
NARROW = SIZES | {"embedding_size": 14}
GROUPS = {"num_hidden_layers": 5, "num_hidden_groups": 3}
MODERN = SIZES | {
    "hidden_size": 30, "num_attention_heads": 3, "num_hidden_layers": 5, "local_attention": 6, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
MODERN_OPTIONS = {
    "hidden_activation": "relu", "norm_eps": 1e-3, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3,
    "local_attention": 10, "classifier_bias": True, "classifier_activation": "silu", "decoder_bias": False,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 130.0},
    },
}  # fmt: skip
DISTANCES = SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
                     "max_relative_positions": 11}  # fmt: skip
SHARED = {
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
}
EURO = SIZES | {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
                "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}  # fmt: skip
EURO_OPTIONS = {
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 6,
    "tie_word_embeddings": True,
    "hidden_act": "relu",
}
ULTRA = SIZES | {
    "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 3,
    "prediction_head_size": 19, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ULTRA_OPTIONS = EURO_OPTIONS | {
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 130.0},
    },
}
CLASSIFY = "ForSequenceClassification"

CASES = [
    Case("distilbert", "distilbert", DISTILLED),
    Case("distilbert/options", "distilbert", DISTILLED | {"activation": "relu", "tie_word_embeddings": False}),
    Case("electra", "electra", NARROW),
    Case("electra/options", "electra", SIZES | OPTIONS | {"embedding_size": 26}),
    Case("albert", "albert", NARROW),
    Case("albert/groups", "albert", NARROW | OPTIONS | GROUPS),
    Case("mpnet", "mpnet", SIZES | {"bos_token_id": 3, "eos_token_id": 2}, pad=1, reads_ids=True),
    Case("modernbert", "modernbert", MODERN),
    Case("modernbert/options", "modernbert", MODERN | MODERN_OPTIONS),
    Case("modernbert/mean", "modernbert", MODERN | {"classifier_pooling": "mean"}, cls=f"ModernBert{CLASSIFY}"),
    Case("deberta", "deberta-v2", DISTANCES),
    Case("deberta/shared", "deberta-v2", DISTANCES | SHARED | {"legacy": False}),
    Case(
        "deberta/narrow",
        "deberta-v2",
        DISTANCES | {"embedding_size": 14, "pos_att_type": ["c2p"], "position_buckets": -1, "type_vocab_size": 2},
    ),
    Case("deberta/plain", "deberta-v2", SIZES | {"pos_att_type": ["p2c"], "tie_word_embeddings": False}),
    Case("eurobert", "eurobert", EURO),
    Case("eurobert/options", "eurobert", EURO | EURO_OPTIONS),
    Case("eurobert/bos", "eurobert", EURO | {"classifier_pooling": "bos"}, cls=f"EuroBert{CLASSIFY}"),
    Case("eurobert/mean", "eurobert", EURO | {"classifier_pooling": "mean"}, cls=f"EuroBert{CLASSIFY}"),
    Case("ultrabert", "ultrabert", ULTRA),
    Case("ultrabert/options", "ultrabert", ULTRA | ULTRA_OPTIONS),
    Case("ultrabert/mean", "ultrabert", ULTRA | {"classifier_pooling": "mean"}, cls=f"Ultrabert{CLASSIFY}"),
]
