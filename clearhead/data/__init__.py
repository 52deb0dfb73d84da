"""From files of text to batches of ids: sources, filters, a store on disk, and batches of similar lengths."""

from clearhead.data.batches import (
    Batch,
    EpochBatches,
    Plan,
    TokenBatches,
    collate,
    epoch_batches,
    pair_batches,
    pair_plan,
    random_stream,
)
from clearhead.data.lines import read_lines
from clearhead.data.prepare import cache_root, cached_tokenizers, prepare_pairs
from clearhead.data.sources import (
    DatasetPairs,
    FilePair,
    JsonLinesPairs,
    PairSource,
    TsvPairs,
    parse_pair_source,
    read_pairs,
)
from clearhead.data.store import FilterReport, PairStore, SpecialIds

__all__ = [
    "Batch",
    "DatasetPairs",
    "EpochBatches",
    "FilePair",
    "FilterReport",
    "JsonLinesPairs",
    "PairSource",
    "PairStore",
    "Plan",
    "SpecialIds",
    "TokenBatches",
    "TsvPairs",
    "cache_root",
    "cached_tokenizers",
    "collate",
    "epoch_batches",
    "pair_batches",
    "pair_plan",
    "parse_pair_source",
    "prepare_pairs",
    "random_stream",
    "read_lines",
    "read_pairs",
]
