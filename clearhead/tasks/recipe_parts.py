"""Values that the recipes of several tasks share, and shared help texts of `clearhead new` and `clearhead evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, Value

TWO_FILES: Final = """  train.de, train.en   two text files; line 7 of one is paired with line 7 of
                       the other
  hf:OWNER/NAME:FIELD  two fields of a data set on the Hugging Face hub
  pairs.parquet:FIELD  two columns of a Parquet file"""
DATASETS: Final = """  hf:OWNER/NAME       a data set on the Hugging Face hub; append /CONFIG,
                      @REVISION, [SPLIT] and :FIELD if needed
  table.parquet       a Parquet file; append :FIELD"""
PAIR_OPTIONS: Final = (("source", "target"), ("valid_source", "valid_target"))
LONGER_PAIRS: Final = "longer pairs are left out of training"
TEXTS: Final = f"""  corpus.txt          a text file
  corpus/             a folder: all files in it and its subfolders
  corpus.jsonl        {{"text": "..."}} in each line; a line is a document
{DATASETS}"""
TEXT_OPTIONS: Final = (("text",), ("text_column", "document", "pattern", "valid_text"))
LONGER_TEXT: Final = "longer documents are cut into windows"
POOL: Final = {"pool": "states that represent the text: first | mean | last"}
EVALUATED_TEXT: Final = ("text_column", "document", "pattern", "batch_size")


_MODERN: Final[Mapping[str, Value]] = {"norm": "rms", "norm_place": "pre", "positions": "rotary"}
GATED: Final[Mapping[str, Value]] = {**_MODERN, "activation": "silu", "gated": True}
MUON: Final[Mapping[str, Value]] = {"optimizer": "muon", "schedule": "cosine", "warmup": 0.1, "clip": 1.0}
# The positions of T5: here as good as rotary positions, and the architecture can be saved as T5.
BUCKETS: Final[Mapping[str, Value]] = {
    "norm": "rms", "norm_place": "pre", "positions": "buckets", "bias": False,
}  # fmt: skip
ENCODER: Final = Architecture(GATED, saved_as="eurobert")
TEXT_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 2048, "learning_rate": 5e-3, "weight_decay": 0.1, "metric": "loss",
}  # fmt: skip
WORDS_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 1024, "learning_rate": 4e-3, "weight_decay": 0.1, "metric": "score",
}  # fmt: skip
