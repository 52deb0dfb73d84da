"""Effects: how much an outcome changes when a head, or its attention to one token, is switched off.

The model runs once for each, in batches of equal rows that differ in what is switched off. Layers below it are not run
again.

Legend: B rows of a batch, H heads, Q queries, K keys, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from clearhead.base.printing import Printed
from clearhead.base.progress import Notify, counter
from clearhead.generate.batching import read_tokens
from clearhead.interpret.maps.hook_points import Place, edit
from clearhead.interpret.maps.outcome import Outcome
from clearhead.interpret.maps.recording import AttentionRecord
from clearhead.interpret.maps.streams import Streams


@dataclass(frozen=True, repr=False)
class HeadEffect(Printed):
    """The effect of one head.

    Args:
        stack: such as "decoder.self".
        layer, head: its numbers.
        change: of the log-probability of the outcome when the head is switched off (below zero where it helps), or
            gives what it gave in another text.
    """

    stack: str
    layer: int
    head: int
    change: float


def head_effects(
    streams: Streams, records: Sequence[AttentionRecord], outcome: Outcome, notify: Notify | None = None
) -> list[HeadEffect]:
    """Return the effect of every head: its part of the mixed values is zero at every position.

    Args:
        streams, records: of one run of the model.
        outcome: what is followed.
        notify: called with counts; None: `progress.update` is.

    Source: arXiv 1905.10650, section 3.1.
    """
    total, before = sum(record.num_heads for record in records), measured(streams, outcome)
    tell = counter("heads", notify)
    found: list[HeadEffect] = []
    for record in records:
        for heads in row_batches(streams, range(record.num_heads)):

            def without(mixed_BHQE: Tensor, heads: Sequence[int] = heads) -> Tensor:
                mixed_BHQE = mixed_BHQE.clone()
                mixed_BHQE[torch.arange(len(heads)), list(heads)] = 0.0
                return mixed_BHQE

            changes = measured_with(streams, record, outcome, len(heads), without) - before
            rows = zip(heads, changes.tolist(), strict=True)
            found += [HeadEffect(record.stack, record.layer, head, change) for head, change in rows]
            tell(len(found), total)
    return found


def key_effects(
    streams: Streams, record: AttentionRecord, head: int, outcome: Outcome, notify: Notify | None = None
) -> Float32[Tensor, " keys"]:
    """Return the effect of the attention of one head to each key: its weight on that key is zero for every query.

    The other weights stay as they are, so that switching off every key is switching off the head. (To mask the key
    before the softmax instead, arXiv 2304.14767, would also raise the other weights, and add their effect.)

    Args:
        streams: of one run of the model.
        record: of an attention in that run.
        head: its number.
        outcome: what is followed.
        notify: called with counts; None: `progress.update` is.
    """
    before = measured(streams, outcome)
    weight_QK = record.weights([head])[0, 0]
    value_KE = record.value_BKSE[0, record.kv_head(head)]
    found: list[Tensor] = []
    done, total, tell = 0, len(value_KE), counter("keys", notify)
    for keys in row_batches(streams, range(total)):
        # What a key adds to the mixed values is subtracted from them, so that no row needs weights of its own.
        added_BQE = weight_QK.T[keys.start : keys.stop, :, None] * value_KE[keys.start : keys.stop, None].float()

        def without(mixed_BHQE: Tensor, added_BQE: Tensor = added_BQE) -> Tensor:
            mixed_BHQE = mixed_BHQE.clone()
            mixed_BHQE[:, head] -= added_BQE.to(mixed_BHQE.dtype)
            return mixed_BHQE

        found.append(measured_with(streams, record, outcome, len(keys), without) - before)
        done += len(keys)
        tell(done, total)
    return torch.cat(found).cpu()


def measured(streams: Streams, outcome: Outcome) -> Float32[Tensor, " one"]:
    """Return the log-probability of an outcome in the run itself."""
    return outcome.log_probability(streams.logits(streams.hidden, outcome.logits_position))


def measured_with(
    streams: Streams, record: AttentionRecord, outcome: Outcome, rows: int, change: Callable[[Tensor], Tensor]
) -> Float32[Tensor, " rows"]:
    """Return the log-probability of the outcome in each row, where the mixed values of one attention are changed."""

    def at_depth(mixed_BHQE: Tensor, at: Place) -> Tensor:
        return change(mixed_BHQE) if at.depth == record.layer else mixed_BHQE

    stack = record.address.partition(".")[0]
    with edit(streams.module, {f"{record.address}.mixed": at_depth}):
        hidden_BTD = streams.continue_from(stack, record.layer, rows)
        return outcome.log_probability(streams.logits(hidden_BTD, outcome.logits_position))


def row_batches(streams: Streams, items: range) -> Iterator[range]:
    """Cut a range into parts whose rows of tokens fit into a batch."""
    tokens = max(streams.last.ids.shape[1], streams.source.ids.shape[1])
    size = max(1, read_tokens(streams.module) // tokens)
    for start in range(0, len(items), size):
        yield items[start : start + size]
