"""Sequences of random tokens that repeat themselves, on which induction and duplicate-token heads show.

Source: arXiv 2209.11895, section "Induction heads".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead import core
from clearhead.core import Transformer
from clearhead.generate.batching import device_of
from clearhead.interpret.maps.head_statistics import HeadStatistics, Scores, repeat_scores, summarise, text_scores
from clearhead.interpret.maps.reading import Reading
from clearhead.interpret.maps.recording import AttentionRecord, record_run
from clearhead.text.pair import TokenizerPair
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.word_starts import word_boundaries

LENGTH = 25  # tokens before they repeat
SEQUENCES = 4


def heads_over_texts(
    module: Transformer,
    tokenizers: TokenizerPair,
    runs: Iterable[tuple[Reading, Sequence[AttentionRecord]]],
    *,
    seed: int,
) -> list[HeadStatistics]:
    """Return what each head does over several texts.

    Args:
        module: the model.
        tokenizers: of the model.
        runs: at least one; what its stacks read, and its attentions. Each is dropped before the next is asked for.
        seed: of the random tokens that repeat themselves.
    """
    found: dict[tuple[str, int], list[Scores]] = {}
    num_texts = 0
    for reading, records in runs:
        num_texts, read = num_texts + 1, reading
        for record in records:
            found.setdefault((record.stack, record.layer), []).append(text_scores(record))
    repeats = repeat_statistics(module, tokenizers, read, seed)
    rows = []
    for (stack, layer), texts in found.items():
        scores = {name: torch.cat([one[name] for one in texts]) for name in texts[0]}
        rows += summarise(stack, layer, scores | repeats.get((stack, layer), {}), num_texts)
    return rows


def repeat_statistics(
    module: Transformer, tokenizers: TokenizerPair, reading: Reading, seed: int = 0
) -> dict[tuple[str, int], Scores]:
    """Return the duplicate-token and induction scores of every attention, by stack and layer.

    Every stack reads random tokens twice, with the special tokens of a text around them; where both stacks have one
    vocabulary, the decoder reads what the encoder reads, and attention to the memory is scored too.

    Args:
        module: run in evaluation mode; its own mode is restored.
        tokenizers: of the model.
        reading: any text of the model, for its special tokens.
        seed: of the random tokens.

    Returns:
        nothing for an attention that cannot be scored: positions or vocabulary leave no room for two tokens, or the two
        vocabularies differ.
    """
    reader = tokenizers.target if module.encoder is None else tokenizers.source
    vocabularies = [_ordinary_ids(tokenizer) for tokenizer in (reader, tokenizers.target)[: len(reading.affixes)]]
    length = min(LENGTH, *map(len, vocabularies))
    if module.max_positions is not None:
        length = min(length, *((module.max_positions - len(affixes)) // 2 for affixes in reading.affixes))
    if length < 2:
        return {}
    draw, device = torch.Generator().manual_seed(seed), device_of(module)
    read: list[Tensor] = []
    is_second: list[Tensor] = []
    for ordinary, affixes in zip(vocabularies, reading.affixes, strict=True):
        if not read or not tokenizers.joint:
            drawn = _repeated(ordinary, length, draw)
        read.append(_framed(drawn, affixes).to(device))
        position = torch.arange(read[-1].shape[1], device=device) - len(affixes.prefix)
        is_second.append((length <= position) & (position < 2 * length))
    target = core.Sequence(read[1]) if len(read) == 2 else None
    last = len(read) - 1
    sides = {"encoder.self": (0, 0), "decoder.self": (last, last), "decoder.memory": (last, 0)}
    scores = {}
    for record in record_run(module, core.Sequence(read[0]), target):
        query, key = sides[record.stack]
        if query == key or tokenizers.joint:
            scores[record.stack, record.layer] = repeat_scores(record, read[query], read[key], is_second[query])
    return scores


def _ordinary_ids(tokenizer: Tokenizer) -> Int[Tensor, " entries"]:
    """Return the ids that a text can have."""
    return torch.from_numpy(word_boundaries(tokenizer).ordinary).nonzero()[:, 0]


def _repeated(ordinary: Int[Tensor, " entries"], length: int, draw: torch.Generator) -> Int[Tensor, "texts tokens"]:
    """Draw different tokens for each sequence, and repeat them once."""
    once_BN = torch.stack([ordinary[torch.randperm(len(ordinary), generator=draw)[:length]] for _ in range(SEQUENCES)])
    return once_BN.repeat(1, 2)


def _framed(ids_BN: Int[Tensor, "texts tokens"], affixes: PrefixSuffix) -> Int[Tensor, "texts framed_tokens"]:
    """Put the special tokens of a text around each sequence."""
    prefix, suffix = (ids_BN.new_tensor(side).expand(len(ids_BN), -1) for side in (affixes.prefix, affixes.suffix))
    return torch.cat([prefix, ids_BN, suffix], dim=1)
