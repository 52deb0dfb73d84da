"""Classifiers whose decoder repeats the encoder's input predict the same as transformers, in batches of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import clearhead
from tests.checkpoints.hf import tokenizer_folders
from tests.tasks.answer.test_use import byte_merges

TEXTS = ["the cat sat on the mat, and the dog looked at it.", "dog", "a small dog runs over the green grass in 1998!"]
LABELS = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
BART = {
    "d_model": 26, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 31, "decoder_ffn_dim": 29,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 61, "init_std": 0.7,
    "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip
T5 = {
    "d_model": 26, "d_kv": 10, "d_ff": 31, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0,
    "initializer_factor": 6.0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def pieces(folder: Path) -> dict[str, int]:
    model = tokenizer_folders.pieces_model("unigram", t5=True)
    tokenizer_folders.write(
        folder, {"spiece.model": model, "tokenizer_config.json": {"tokenizer_class": "T5Tokenizer"}}
    )
    return {"vocab_size": tokenizer_folders.processor(model).get_piece_size() + 100}


@pytest.mark.parametrize(
    ("model_type", "cls", "sizes", "tokens"),
    [
        ("bart", "BartForSequenceClassification", BART, byte_merges),
        ("t5", "T5ForSequenceClassification", T5, pieces),
    ],
)
def test_labels_are_those_of_the_other_library(
    model_type: str, cls: str, sizes: dict[str, object], tokens: object, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(model_type, **sizes, **tokens(tmp_path), **LABELS)
    torch.manual_seed(7)
    theirs = getattr(transformers, cls)(config).eval()
    theirs.save_pretrained(tmp_path)
    model = clearhead.load(tmp_path, precision="fp32", device="cpu")
    predictions = model.classify(TEXTS)
    for text, prediction in zip(TEXTS, predictions, strict=True):
        ids = torch.tensor([model.tokenizer.special_tokens.add_to(model.tokenizer.encode(text))[0]])
        with torch.no_grad():
            expected = theirs(input_ids=ids).logits.double().softmax(1)[0].numpy()
        assert np.allclose(list(prediction.probabilities.values()), expected, atol=1e-5)
    assert len({round(prediction.probability or 0, 3) for prediction in predictions}) == len(TEXTS)
