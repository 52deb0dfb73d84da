"""Tiny checkpoints for question answering with the same weights in every version of transformers, and their questions.

`benchmarks/record_answers.py` runs this module with transformers 4.57, which has the pipeline. It imports nothing of
clearhead.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

POSITIONS, WIDTH = 61, 24
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECES = ("an", "##an", "er", "##er", "ing", "##ing", "th", "##th", "st", "##st", "on", "##on")
ENTRIES = (*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *PIECES, ".", ",", "?", "-")
MODELS = {"bert": "Bert", "distilbert": "DistilBert"}
WORDS = "the singer stands on another stone and then wanders north without rest".split()
QUESTION = "who wanders?"


def write(folder: Path, model_type: str) -> Path:
    """Write a checkpoint whose weights depend on the names of its tensors alone."""
    sizes: dict[str, Any] = {"max_position_embeddings": POSITIONS, "vocab_size": len(ENTRIES), "pad_token_id": 0}
    if model_type == "bert":
        sizes |= {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 31}
    else:
        sizes |= {"dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 31}
    model = getattr(transformers, f"{MODELS[model_type]}ForQuestionAnswering")(
        transformers.AutoConfig.for_model(model_type, **sizes)
    )
    draw = np.random.RandomState(17)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = draw.standard_normal(tuple(weight.shape))
            is_scale = "LayerNorm.weight" in name or "layer_norm.weight" in name
            weight.copy_(torch.from_numpy(1 + 0.1 * values if is_scale else 0.5 * values))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in ENTRIES), encoding="utf-8")
    config = json.dumps({"tokenizer_class": f"{MODELS[model_type]}Tokenizer"})
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return folder


def cases() -> list[dict[str, Any]]:
    """Return the contexts and options of the pipeline; a context of one window has no `doc_stride`."""
    draw = random.Random(23)
    contexts = [" ".join(draw.choices(WORDS, k=count)) + "." for count in (3, 5, 6, 23, 31, 44)]
    listed = []
    for context in contexts:
        for options in ({"top_k": 1}, {"top_k": 9}, {"top_k": 3, "max_answer_len": 4}):
            for allows in (False, True):
                stride = {} if len(context) < 45 else {"doc_stride": draw.choice([0, 7, 16, 25])}
                listed.append({"context": context, "handle_impossible_answer": allows, **options, **stride})
    return listed
