"""Effects: the change of an output's log-probability if a head, or its attention to a token, is switched off.

The model runs once per change, in batches of equal rows that differ only in the change. Layers below the change do not
run again. A patch replaces activations by those of another text.

Legend: B rows of a batch, H heads, Q queries, K keys, E head size, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from clearhead.base.errors import InputError, argument
from clearhead.base.files import refuse_unwritable
from clearhead.base.printing import Printed
from clearhead.base.progress import Notify, counter
from clearhead.generate.batching import WATCHED_TOKENS, read_tokens
from clearhead.interpret.maps.hook_points import ActivationContext, capture, edit
from clearhead.interpret.maps.outcome import ModelOutcome
from clearhead.interpret.maps.recording import AttentionRecord
from clearhead.interpret.maps.streams import Streams


@dataclass(frozen=True, repr=False)
class HeadEffect(Printed):
    """Effect of one head on an output.

    Args:
        stack: stack with its source, such as "decoder.self".
        layer, head: numbers of the layer and of the head, from 0.
        change: change of the output's log-probability if the head is switched off, or if its output is replaced by
            that in another text. Below zero if the head helps.
    """

    stack: str
    layer: int
    head: int
    change: float


@dataclass(frozen=True)
class EffectMeter:
    """Measures the change of an output's log-probability if the mixed values (weights @ values) of a head are edited.

    Args:
        streams: residual streams of the run.
        outcome: output that is measured.
        records: recorded attentions of the run.
        notify: function called with the numbers of finished and of all items. None means the current progress display.
    """

    streams: Streams
    outcome: ModelOutcome
    records: Sequence[AttentionRecord]
    notify: Notify | None = None

    @cached_property
    def baseline(self) -> Float32[Tensor, " one"]:
        """Log-probability of the output in the unchanged run."""
        return self.log_probability(self.streams.hidden)

    def log_probability(self, hidden_BTD: Float[Tensor, "rows tokens width"]) -> Float32[Tensor, " rows"]:
        """Return the log-probability of the output in each batch row, computed from the last stack's hidden states."""
        return self.outcome.log_probability(self.streams.logits(hidden_BTD, self.outcome.logits_position))

    def measure(
        self, record: AttentionRecord, rows: int, change: Callable[[Tensor], Tensor]
    ) -> Float32[Tensor, " rows"]:
        """Return the log-probability change in each batch row if `change` edits the mixed values of one attention."""

        def at_depth(mixed_BHQE: Tensor, at: ActivationContext) -> Tensor:
            return change(mixed_BHQE) if at.depth == record.layer else mixed_BHQE

        stack = record.address.partition(".")[0]
        with edit(self.streams.module, {f"{record.address}.mixed": at_depth}):
            after = self.log_probability(self.streams.continue_from(stack, record.layer, rows))
        return after - self.baseline

    def split_batches(self, items: range) -> Iterator[range]:
        """Split a range of heads, keys or positions (one batch row each) into ranges that fit into a batch."""
        tokens = max(self.streams.last.ids.shape[1], self.streams.source.ids.shape[1])
        size = max(1, min(read_tokens(self.streams.module), WATCHED_TOKENS) // tokens)
        for start in range(0, len(items), size):
            yield items[start : start + size]

    def head_effects(self) -> list[HeadEffect]:
        """Return the effect of switching off every head: its mixed values are set to zero at every position.

        Source: arXiv 1905.10650, section 3.1.
        """
        total, tell = sum(record.num_heads for record in self.records), counter("heads", self.notify)
        effects: list[HeadEffect] = []
        for record in self.records:
            for heads in self.split_batches(range(record.num_heads)):

                def without(mixed_BHQE: Tensor, heads: Sequence[int] = heads) -> Tensor:
                    mixed_BHQE = mixed_BHQE.clone()
                    mixed_BHQE[torch.arange(len(heads)), list(heads)] = 0.0
                    return mixed_BHQE

                effects += _head_effects(record, heads, self.measure(record, len(heads), without))
                tell(len(effects), total)
        return effects

    def key_effects(self, record: AttentionRecord, head: int) -> Float32[Tensor, " keys"]:
        """Return the effect of one head's attention to each key: the key's weight is set to zero for every query.

        The other weights do not change, so switching off all keys switches off the head. (Masking the key before the
        softmax, as in arXiv 2304.14767, would also raise the other weights and mix in their effect.)

        Args:
            record: attention of the run.
            head: number of the head.
        """
        weight_QK = record.weights([head])[0, 0]
        value_KE = record.value_BKSE[0, record.kv_head(head)]
        effects: list[Tensor] = []
        done, total, tell = 0, len(value_KE), counter("keys", self.notify)
        for keys in self.split_batches(range(total)):
            # Subtract the contribution of each key from the mixed values: no row needs separate weights.
            added_BQE = weight_QK.T[keys.start : keys.stop, :, None] * value_KE[keys.start : keys.stop, None].float()

            def without(mixed_BHQE: Tensor, added_BQE: Tensor = added_BQE) -> Tensor:
                mixed_BHQE = mixed_BHQE.clone()
                mixed_BHQE[:, head] -= added_BQE.to(mixed_BHQE.dtype)
                return mixed_BHQE

            effects.append(self.measure(record, len(keys), without))
            done += len(keys)
            tell(done, total)
        return torch.cat(effects).cpu()


def _head_effects(record: AttentionRecord, heads: range, changes: Float32[Tensor, " heads"]) -> list[HeadEffect]:
    rows = zip(heads, changes.tolist(), strict=True)
    return [HeadEffect(record.stack, record.layer, head, change) for head, change in rows]


Positions = Mapping[str, Sequence[tuple[int, int]]]
"""Name of a stack -> pairs of a position in this text and its counterpart in the other text."""


@dataclass(frozen=True, repr=False)
class Patches(Printed):
    """Activation patching: changes of an output's log-probability if activations are replaced by another text's.

    Args:
        streams: name of a stack ("encoder", "decoder") -> change if the residual stream has the other text's vector at
            one depth and position. Depth 0 is the embedding, depth d the stream after d layers. NaN at a position
            without a counterpart.
        heads: change if a head's output is that in the other text, at every position with a counterpart.
        total: log-probability of the output in the other text minus that in this text. None means that the position
            that predicts the output has no counterpart.
        outcome: measured output, in words.
        tokens: name of a stack -> display texts of the tokens that it reads.
    """

    streams: Mapping[str, Float32[Tensor, "depths positions"]]
    heads: Sequence[HeadEffect]
    total: float | None
    outcome: str
    tokens: Mapping[str, Sequence[str]]

    def save_picture(self, path: str | Path, *, force: bool = False) -> None:
        """Draw the changes as heat maps: depths by positions of each stack, and layers by heads of each attention.

        Args:
            path: .png or .svg file to write.
            force: True to replace an existing file.

        Raises:
            InputError: the text has too many tokens for a picture, or the file exists or cannot be written.
        """
        # Imported here: matplotlib would add half a second to every command that loads a model.
        from clearhead.interpret.view.changes import ChangeMap, draw_changes

        refuse_unwritable(Path(path), force=force)
        panels = []
        for stack, changes in self.streams.items():
            names = [*map("layer {}".format, reversed(range(len(changes) - 1))), "embedding"]
            title = f"{stack}: the stream at one position"
            panels.append(ChangeMap(title, changes.flip(0).numpy(), names, self.tokens[stack]))
        for stack in dict.fromkeys(head.stack for head in self.heads):
            panels.append(ChangeMap(f"{stack}: heads", *self._table(stack)))
        draw_changes(panels, Path(path), title=f"{self.outcome}: effect of the other text")

    def _table(self, stack: str) -> tuple[Float[np.ndarray, "layers heads"], list[str], list[str]]:
        """Return a table of the head changes of a stack, highest layer first, and the names of its rows and columns."""
        stack_effects = [head for head in self.heads if head.stack == stack]
        layers = sorted({head.layer for head in stack_effects}, reverse=True)
        changes = np.full((len(layers), max(head.head for head in stack_effects) + 1), np.nan)
        for head in stack_effects:
            changes[layers.index(head.layer), head.head] = head.change
        return changes, list(map("layer {}".format, layers)), list(map(str, range(changes.shape[1])))


def align_positions(here: Streams, there: Streams, positions: Positions | None) -> dict[str, list[tuple[int, int]]]:
    """Return, for every stack, the pairs of corresponding positions of two texts.

    Args:
        here, there: residual streams of this text and of the other text, in the same model.
        positions: pairs for some stacks. None, or a missing stack, means that equal positions correspond; then both
            texts need equally many tokens.

    Raises:
        InputError: a stack or position does not exist, a position occurs twice, or counterparts are missing.
    """
    lengths = {name: (x[0].shape[1], there.before[name][0].shape[1]) for name, x in here.before.items()}
    known, name_text, pairs = dict(positions or {}), argument("positions"), {}
    for name in known.keys() - lengths.keys():
        raise InputError(name_text + f" has the key '{name}'; expected {' or '.join(lengths)}")
    for name, (here_length, there_length) in lengths.items():
        if name not in known and here_length != there_length:
            raise InputError(
                f"the {name} reads {here_length} tokens of this text and {there_length} of the other one: "
                "give texts of equal length, or pairs of positions: "
                + name_text
                + f"={{'{name}': [(here, there), ...]}}"
            )
        pairs[name] = list(known.get(name, [(position, position) for position in range(here_length)]))
        _check_pairs(pairs[name], name, here_length, there_length)
    return pairs


def _check_pairs(pairs: Sequence[tuple[int, int]], name: str, here_length: int, there_length: int) -> None:
    name_text = argument("positions")
    for here, there in pairs:
        if not (0 <= here < here_length and 0 <= there < there_length):
            expected = f"expected 0 to {here_length - 1} in this text and 0 to {there_length - 1} in the other one"
            raise InputError(name_text + f" pairs {here} with {there} in the {name}; {expected}")
    if len({here for here, _ in pairs}) < len(pairs):
        raise InputError(name_text + f" has a position of the {name} in this text twice: give each position once")


class Patcher:
    """Patches activations of one text into the run of another.

    Args:
        meter: measures the output of the text that is changed.
        there: residual streams of the other text, in a model of the same shape.
        positions: name of a stack -> pairs of corresponding positions.

    Source: Meng et al. 2022, arXiv 2202.05262, section 2.1 (causal tracing); Wang et al. 2022, arXiv 2211.00593.
    """

    def __init__(self, meter: EffectMeter, there: Streams, positions: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        self.meter: EffectMeter = meter
        self.there: Streams = there
        self.positions: dict[str, Tensor] = {name: torch.tensor(pairs).view(-1, 2) for name, pairs in positions.items()}
        self._tell, self._done = counter("places", meter.notify), 0
        self._total = sum(record.num_heads for record in meter.records)
        self._total += sum(len(pairs) * len(meter.streams.before[name]) for name, pairs in positions.items())

    def streams(self) -> dict[str, Float32[Tensor, "depths positions"]]:
        """Return the log-probability change if the residual stream is patched, for each stack, depth and position."""
        return {name: self._stream(name) for name in self.positions}

    def heads(self) -> list[HeadEffect]:
        """Return the log-probability change if the output of a head is patched, for each head."""
        points = [f"{record.address}.mixed" for record in self.meter.records]
        with torch.no_grad(), capture(self.there.module, points) as seen:
            self.there.module(self.there.source, self.there.target, head=False)
        effects: list[HeadEffect] = []
        for record in self.meter.records:
            (mixed_HQE,) = (
                seen_record.tensor[0]
                for seen_record in seen[f"{record.address}.mixed"]
                if seen_record.depth == record.layer
            )
            for heads in self.meter.split_batches(range(record.num_heads)):
                effects += _head_effects(record, heads, self._heads(record, mixed_HQE, heads))
                self._count(len(heads))
        return effects

    def total(self) -> float | None:
        """Return the output's log-probability in the other text minus that in this text; None without a counterpart."""
        outcome = self.meter.outcome
        position = outcome.logits_position
        if position is not None:
            counterparts = dict(self.positions[self.meter.streams.top].tolist())
            if position not in counterparts:
                return None
            position = counterparts[position]
        logits = self.there.logits(self.there.hidden, position)
        return float(outcome.log_probability(logits) - self.meter.baseline)

    def _stream(self, name: str) -> Float32[Tensor, "depths positions"]:
        streams, pairs = self.meter.streams, self.positions[name]
        here_states, there_states = streams.before[name], self.there.before[name]
        changes = torch.full((len(here_states), here_states[0].shape[1]), torch.nan)
        for depth, x_1TD in enumerate(here_states):
            for rows in self.meter.split_batches(range(len(pairs))):
                here, there = pairs[rows.start : rows.stop].T
                x_BTD = x_1TD.repeat(len(rows), 1, 1)
                x_BTD[torch.arange(len(rows)), here] = there_states[depth][0, there]
                hidden_BTD = streams.continue_from(name, depth, len(rows), x_BTD)
                changes[depth, here] = (self.meter.log_probability(hidden_BTD) - self.meter.baseline).cpu()
                self._count(len(rows))
        return changes

    def _heads(
        self, record: AttentionRecord, mixed_HQE: Float[Tensor, "heads queries head_size"], heads: range
    ) -> Float32[Tensor, " rows"]:
        here, there = self.positions[record.address.partition(".")[0]].T
        head_B = torch.tensor(heads)[:, None]

        def replace_heads(mixed_BHQE: Tensor) -> Tensor:
            mixed_BHQE = mixed_BHQE.clone()
            mixed_BHQE[torch.arange(len(heads))[:, None], head_B, here] = mixed_HQE[head_B, there]
            return mixed_BHQE

        return self.meter.measure(record, len(heads), replace_heads)

    def _count(self, rows: int) -> None:
        self._done += rows
        self._tell(self._done, self._total)
