from __future__ import annotations

from tests.parity.architectures.harness import Case

SIZES = {
    "vocab_size": 37, "d_model": 26, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 31,
    "decoder_ffn_dim": 23, "encoder_attention_heads": 2, "decoder_attention_heads": 13, "max_position_embeddings": 29,
    "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
OTHER = {"scale_embedding": True, "activation_function": "relu", "dropout": 0.3}
SCORES = ("final_logits_bias",)

CASES = [
    Case("bart", "bart", SIZES, pad=1, buffers=SCORES),
    Case("bart/options", "bart", SIZES | OTHER, pad=1),
    Case("mbart", "mbart", SIZES, pad=1, buffers=SCORES),
    Case("blenderbot", "blenderbot", SIZES, pad=1, buffers=SCORES),
    Case("pegasus", "pegasus", SIZES, pad=1, buffers=SCORES),
    Case("marian", "marian", SIZES | {"activation_function": "swish"}, pad=1, buffers=SCORES),
    Case("m2m_100", "m2m_100", SIZES, pad=1, reads_ids=True),
    Case(
        "m2m_100/options",
        "m2m_100",
        SIZES | OTHER | {"pad_token_id": 4, "scale_embedding": False},
        pad=4,
        reads_ids=True,
    ),
    Case(
        "marian/apart",
        "marian",
        SIZES | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 41},
        pad=1,
        buffers=SCORES,
    ),
    Case(
        "marian/apart, untied",
        "marian",
        SIZES | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 41, "tie_word_embeddings": False},
        pad=1,
    ),
    Case("marian/options", "marian", SIZES | OTHER, pad=1),
]
