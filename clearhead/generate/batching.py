"""Group sequences of similar cost, such as length, into batches, and pad the sequences.

Shapes: B sentences of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from clearhead.base.errors import ContextTooLong, InputError, argument, nth_text
from clearhead.base.hooks import is_watching
from clearhead.base.machine import free_memory
from clearhead.base.progress import update
from clearhead.core import Transformer
from clearhead.core.stack import Layer
from clearhead.generate.options import GenerateOptions
from clearhead.text.long_texts import LONGEST_PROMPT

CPU_CACHE_TOKENS: Final = 8192
"""Default maximum number of tokens in the KV cache of a batch on a CPU, including tokens to come."""
CPU_READ_TOKENS: Final = 2048
GPU_READ_TOKENS: Final = 65_536
WATCHED_TOKENS: Final = 8192
"""Maximum number of padded tokens in a batch whose activations are recorded or edited."""
GPU_ROWS: Final = 256
"""Maximum number of rows that a GPU decodes together, if the caller sets no batch size."""
LAYER_ACTIVATIONS: Final = 8
"""Bytes of activations per token for each output of a layer's matrices: an fp32 number and its copy."""


def batches_by_cost(
    costs: Sequence[int], *, budget: int, most_rows: int | None, before: int = 0, total: int | None = None
) -> Iterator[list[int]]:
    """Yield lists of indices, costliest first, so that rows * greatest cost stays within the budget.

    Inside `capture` or `edit`, the indices keep the order of the sentences: see `batch_costs`.

    Args:
        costs: cost of each sentence, without padding.
        budget: largest value of rows * greatest cost. A sentence above it gets a batch for itself.
        most_rows: maximum number of sentences in a batch. None means that only the budget limits it.
        before: number of sentences that were batched before these, to report progress.
        total: number of sentences in all calls, to report progress. None means those of this call.
    """
    costs = batch_costs(costs)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    start = 0
    while start < len(order):
        rows = max(budget // max(costs[order[start]], 1), 1)
        if most_rows is not None:
            rows = min(rows, most_rows)
        yield order[start : start + rows]
        start = min(start + rows, len(order))
        most = len(order) if total is None else total
        update(min(before + start, most), most, "examples")


def batch_costs(costs: Sequence[int]) -> Sequence[int]:
    """Return the cost of each sentence for sorting into batches; equal costs keep the order of the sentences.

    Inside `capture` or `edit`, every sentence gets the cost of the costliest. Rows then keep the order of sentences:
    row 0 is the first sentence.
    """
    return [max(costs, default=0)] * len(costs) if is_watching() else costs


def pad_ids(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Return sequences as a right-padded int64 tensor, and the mask of their real tokens."""
    longest = max(len(sequence) for sequence in sequences)
    ids_BT = torch.tensor([[*sequence, *[pad_id] * (longest - len(sequence))] for sequence in sequences], device=device)
    lengths_B1 = torch.tensor([[len(sequence)] for sequence in sequences], device=device)
    return ids_BT, torch.arange(longest, device=device) < lengths_B1


def check_lengths(sequences: Sequence[Sequence[int]], max_positions: int | None, *, noun: str) -> None:
    """Refuse sequences that are empty or too long.

    The limit is the number of the model's positions, or `LONGEST_PROMPT` tokens for a model without such a limit.

    Raises:
        InputError: a sequence is empty or too long; one report names the first of them, counted from 1.
    """
    faults, kind = [], InputError
    for number, sequence in enumerate(sequences, start=1):
        if not sequence:
            faults.append(nth_text(number, noun) + " has no tokens: leave it out.")
        elif len(sequence) > (max_positions or LONGEST_PROMPT):
            kind = ContextTooLong if max_positions else InputError
            limit = (
                f"the model has {max_positions} positions" if max_positions else f"at most {LONGEST_PROMPT:,} are read"
            )
            faults.append(nth_text(number, noun) + f" has {len(sequence)} tokens, but {limit}: split or shorten it.")
    if faults:
        raise kind.from_faults(faults, subject=f"the {noun}s")


def position_limit(module: Transformer, options: GenerateOptions) -> int | None:
    """Return the maximum number of tokens that a call may read and generate; None means no limit.

    Args:
        module: the model.
        options: the options of the generation.

    Raises:
        InputError: `beyond_positions` has no effect on this model.
    """
    if not options.beyond_positions:
        return module.spec.position_limit
    if module.spec.declared_length is None:
        raise InputError(
            argument("beyond_positions") + " is for checkpoints that compute their positions and declare "
            "max_position_embeddings, and this model does not: leave it out"
        )
    return module.max_positions


def read_tokens(module: nn.Module) -> int:
    """Return the default number of padded tokens that a model reads in one batch.

    On a CPU the hidden states of a batch should fit into the caches: MiniLM is 1.4 times as fast with 2,048 tokens as
    with 8,192. On a GPU a batch has 65,536 tokens, or fewer if the activations of a layer need half the free memory.
    """
    device = device_of(module)
    if device.type == "cpu":
        return CPU_READ_TOKENS
    layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
    outputs = [sum(weight.shape[-2] for weight in layer.parameters() if weight.dim() > 1) for layer in layers]
    token_bytes = LAYER_ACTIVATIONS * max(outputs, default=1)
    return min(GPU_READ_TOKENS, max(1, free_memory(device) // 2 // token_bytes))


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters; the CPU for a module without any."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
