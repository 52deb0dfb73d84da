"""From lists of ids to finished translations: sort, batch, search, and restore the order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clearhead.core import Transformer
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of, evaluation_mode, pad_ids
from clearhead.generate.beam import beam_search
from clearhead.generate.generation_config import GenerationRules
from clearhead.generate.hypothesis import Candidate
from clearhead.generate.options import SearchOptions


def translate_ids(
    module: Transformer,
    sources: Sequence[Sequence[int]],
    *,
    bos_id: int,
    eos_id: int,
    pad_id: int,
    options: SearchOptions,
    rules: GenerationRules | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[list[Candidate]]:
    """Return the best translations of each source, best first, in the order of the sources.

    A result does not depend on which sentences share a batch, up to the last bits of the arithmetic.

    Args:
        module: an encoder-decoder model; searched in evaluation mode, its own mode is restored.
        sources: ids as the encoder reads them (end token included where the model was trained with one), none empty.
        bos_id: id the decoder starts from.
        eos_id: id that ends a hypothesis.
        pad_id: padding id, for sources and hypotheses.
        options: beam size, length penalty, limits and batch budget.
        rules: what the files of a checkpoint say besides.
        on_batch: called with the number of sentences done, after each batch.

    Raises:
        InputError: an empty source, one beyond the model's positions, or a length beyond the decoder's.
    """
    check_lengths(sources, module.max_positions, what="source")
    device = device_of(module)
    results: list[list[Candidate]] = [[] for _ in sources]
    costs = [len(source) * options.beam_size for source in sources]
    num_done = 0
    with evaluation_mode(module):
        for batch in batches_by_cost(costs, budget=options.batch_tokens, most_rows=options.batch_size):
            ids_NS, mask_NS = pad_ids([sources[i] for i in batch], pad_id, device)
            found = beam_search(
                module, ids_NS, mask_NS, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id, options=options, rules=rules
            )
            for i, candidates in zip(batch, found, strict=True):
                results[i] = candidates
            num_done += len(batch)
            if on_batch is not None:
                on_batch(num_done)
    return results
