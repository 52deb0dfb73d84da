"""Values and words that the recipes and commands of several tasks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, Value

TWO_FILES: Final = """  train.de, train.en   two text files: line 7 of one belongs to line 7 of the
                       other
  hf:OWNER/NAME:FIELD  twice: two fields of a data set on the Hugging Face hub
  pairs.parquet:FIELD  twice: two columns of a Parquet file"""
DATASETS: Final = """  hf:OWNER/NAME       a data set on the Hugging Face hub; behind it /CONFIG,
                      @REVISION, [SPLIT] and :FIELD where they are needed
  table.parquet       a Parquet file, with :FIELD behind it"""
PAIR_OPTIONS: Final = (("source", "target"), ("valid_source", "valid_target"))
LONGER_PAIRS: Final = "longer pairs are left out of training"
TEXTS: Final = f"""  corpus.txt          a text file
  corpus/             a folder: the files in it and in its folders
  corpus.jsonl        {{"text": "..."}} in each line, which is a document
{DATASETS}"""
TEXT_OPTIONS: Final = (("text",), ("text_column", "document", "pattern", "valid_text"))
LONGER_TEXT: Final = "longer documents are cut into windows"
POOL: Final = {"pool": "which states represent the text: first | mean | last"}
EVALUATED_TEXT: Final = ("text_column", "document", "pattern", "batch_size")


_MODERN: Final[Mapping[str, Value]] = {"norm": "rms", "norm_place": "pre", "positions": "rotary"}
GATED: Final[Mapping[str, Value]] = {**_MODERN, "activation": "silu", "gated": True}
MUON: Final[Mapping[str, Value]] = {"optimizer": "muon", "schedule": "cosine", "warmup": 0.1, "clip": 1.0}
# The positions of T5: as good as rotary ones here, and an architecture that others read.
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
