"""The processors that options ask for, in the order in which the transformers library applies them.

Shapes: R rows, S tokens read, X banned ids.
"""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.processors import (
    BannedIds,
    MinimumLength,
    MinP,
    NoRepeatNGram,
    NoSourceNGram,
    Processor,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)


def repetition_processors(
    options: GenerateOptions | SearchOptions, read_RS: Int[Tensor, "rows source"]
) -> list[Processor]:
    """Return what keeps text from repeating itself, or what was read, in order.

    Args:
        options: what is asked for.
        read_RS: what was read for each row: the source, or the prompt of a decoder alone; `NO_ID` where it is shorter.
    """
    chain: list[Processor] = []
    if options.repetition_penalty != 1:
        chain.append(RepetitionPenalty(options.repetition_penalty))
    if options.no_repeat_ngram_size > 0:
        chain.append(NoRepeatNGram(options.no_repeat_ngram_size))
    if options.encoder_no_repeat_ngram_size > 0:
        chain.append(NoSourceNGram(options.encoder_no_repeat_ngram_size, read_RS))
    return chain


def processors(
    options: GenerateOptions,
    end_ids: tuple[int, ...],
    prompt_length: int,
    banned_X: Int[Tensor, " banned"],
    read_RS: Int[Tensor, "rows source"],
) -> list[Processor]:
    """Return what changes the logits before a method looks at them, in order."""
    chain = repetition_processors(options, read_RS)
    if options.min_new_tokens > 0:
        chain.append(MinimumLength(options.min_new_tokens, end_ids, prompt_length))
    if len(banned_X):
        chain.append(BannedIds(banned_X))
    return chain


def warpers(options: GenerateOptions) -> list[Processor]:
    """Return what shapes the distribution that sampling draws from, in order; it comes after the processors."""
    chain: list[Processor] = []
    if options.divisor != 1:
        chain.append(Temperature(options.divisor))
    if options.top_k > 0:
        chain.append(TopK(options.top_k))
    if options.top_p < 1:
        chain.append(TopP(options.top_p))
    if options.min_p > 0:
        chain.append(MinP(options.min_p))
    return chain
