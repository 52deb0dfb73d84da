"""Information flow: measure which output changes with which input, and compare with the masks of the spec.

The allowed dependencies are derived from the spec alone, without the code of the model. Legend: T tokens, S source
tokens; reach[i, j]: output i depends on input j.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from clearhead import spec
from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model.readers import Reader, Side, Trace, TracePoint, run
from clearhead.apps.check.model.report import CheckOutcome, Drawing
from clearhead.core import Sequence, Transformer
from clearhead.fast.computing import plain_format, replica_in_dtype
from clearhead.fast.stored import Stored, StoredRows

LENGTH = 11
LONGEST_WINDOW = 600
TOUCHED = 1e-9
"""Smallest relative change that counts as a dependency; rounding in double precision is far smaller."""
_MATHEMATICS: Final = "weights = softmax(scores, with -inf where a query may not attend)"
GROUP: Final = "information flow"
_REAL = (False, True, True, False, True, True, True, True, True, True, False)
_DOCUMENTS = (4, 4, 4, 1, 1, 7, 7, 7, 7, 7, 2)
Seen = Callable[[spec.Mask, Sequence], Tensor]
Draw = Callable[[int, int], Tensor]
"""Function that draws `count` ids below `vocabulary`: draw(count, vocabulary)."""


@dataclass(frozen=True)
class Scenario:
    """One experiment on information flow: an input sequence, and the tokens to change in it.

    Args:
        name: name of the experiment.
        sequence: input with one row.
        columns: tokens that are changed, one after the other.
    """

    name: str
    sequence: Sequence
    columns: tuple[int, ...]


def check_flow(module: Transformer, draw: Draw, rows_at_once: int) -> Iterator[CheckOutcome | Finding]:
    """Check the information flow of each stack, and yield outcomes and findings.

    Args:
        module: the model in double precision.
        draw: function that draws ids.
        rows_at_once: maximum batch size.
    """
    has_two = module.encoder is not None and module.decoder is not None
    sides: list[Side] = ["encoder"] if module.encoder is not None else []
    sides += ["decoder"] if module.decoder is not None else []
    source = Sequence(draw(7, module.num_source_ids)[None]) if has_two else None
    for side in sides:
        reader = Reader.of(module, side, source)
        mates = list(_check_mates(reader, draw, has_two and side == "decoder"))
        yield from mates
        if any(isinstance(result, Finding) for result in mates):
            rows_at_once = 1  # rows that read each other would hide all other results
        if _has_own_parts(reader.spec):
            reason = "the model has a custom module, and no mask declares the tokens that it may read"
            yield CheckOutcome(GROUP, f"{side}: masks", "not tried", reason)
            continue
        for scenario in _scenarios(reader, draw, f"{side}: " if has_two else ""):
            yield from _check_scenario(reader, scenario, rows_at_once)
    if has_two and not _has_own_parts(module.spec):
        yield from _check_memory(module, draw, rows_at_once)


def _has_own_parts(node: spec.Node) -> bool:
    return any(isinstance(child, spec.Part) for _, child in spec.walk(node))


def _scenarios(reader: Reader, draw: Draw, prefix: str) -> Iterator[Scenario]:
    most = reader.module.max_positions or LONGEST_WINDOW + LENGTH
    length = min(LENGTH, most)
    masks = [attention.mask for attention in _attentions(reader.spec)]
    kinds = " and ".join(dict.fromkeys(mask.kind for mask in masks)) or "no attention"
    whole, every = Sequence(draw(length, reader.vocabulary)[None]), tuple(range(length))
    yield Scenario(f"{prefix}{kinds}", whole, every)
    yield Scenario(f"{prefix}padding", replace(whole, mask=torch.tensor([_REAL[:length]])), every)
    yield Scenario(f"{prefix}documents", replace(whole, documents=torch.tensor([_DOCUMENTS[:length]])), every)
    for size in sorted({mask.before + mask.after for mask in masks if isinstance(mask, spec.Window)}):
        long = size + 4
        if length < long <= min(most, LONGEST_WINDOW):
            places = (0, 1, long // 2, long - 1)
            yield Scenario(f"{prefix}window of {size}", Sequence(draw(long, reader.vocabulary)[None]), places)


def _attentions(stack: spec.Stack) -> list[spec.Attention]:
    branches = [branch for layer in stack.depths for step in layer.steps for branch in step.branches]
    attentions = [branch.function for branch in branches if isinstance(branch.function, spec.Attention)]
    return [attention for attention in attentions if attention.source == "self"]


def expand_mask(mask: spec.Mask, sequence: Sequence) -> Tensor:
    """Build the matrix [T, T] of a mask, True = may attend, from its definition.

    Args:
        mask: mask of an attention.
        sequence: input with one row, with its padding and documents.
    """
    length = sequence.ids.shape[1]
    query, key = torch.arange(length)[:, None], torch.arange(length)
    real = torch.ones(length, dtype=torch.bool) if sequence.mask is None else sequence.mask[0]
    may = torch.ones(length, length, dtype=torch.bool)
    if isinstance(mask, spec.Window):
        position = real.cumsum(0)  # padding adds no distance
        apart = position[:, None] - position
        may = (apart <= mask.before) & (-apart <= mask.after)
    elif not isinstance(mask, spec.Full):
        may = key <= query
    if sequence.documents is not None:
        may = may & (sequence.documents[0][:, None] == sequence.documents[0])
    return may & real


def expected_reach(stack: spec.Stack, sequence: Sequence, seen: Seen = expand_mask) -> dict[tuple[int, int], Tensor]:
    """Return the dependencies allowed after each residual step, by chaining the masks of all attentions so far.

    Args:
        stack: spec of the stack.
        sequence: input with one row.
        seen: function that builds the matrix of a mask.
    """
    reach = torch.eye(sequence.ids.shape[1], dtype=torch.bool)
    reaches: dict[tuple[int, int], Tensor] = {}
    for depth, layer in enumerate(stack.depths):
        for number, step in enumerate(layer.steps):
            for branch in step.branches:
                function = branch.function
                if isinstance(function, spec.Attention) and function.source == "self":
                    chained = _chain(seen(function.mask, sequence), reach)
                    reaches[depth, number] = reaches.get((depth, number), reach) | chained
            reach = reaches.setdefault((depth, number), reach)
    return reaches


def _chain(attends: Tensor, reach: Tensor) -> Tensor:
    return (attends.double() @ reach.double()) > 0


def measure_reach(reader: Reader, scenario: Scenario, rows_at_once: int) -> dict[TracePoint, Tensor]:
    """Change one token at a time, and return which outputs of every residual step change with it.

    Returns:
        Bool [outputs at real tokens, changed tokens] for each point.
    """
    sequence, columns = scenario.sequence, scenario.columns
    other = _other_ids(reader, sequence.ids[0])
    rows = sequence.ids.repeat(len(columns) + 1, 1)
    for row, column in enumerate(columns, start=1):
        rows[row, column] = other[column]
    traces = [_states(reader, sequence, chunk) for chunk in rows.split(rows_at_once)]
    return {point: _find_changes(torch.cat([trace[point] for trace in traces])) for point in traces[0]}


def _states(reader: Reader, sequence: Sequence, ids: Tensor) -> Trace:
    """Return the states [B, real tokens, features] after every residual step, for rows of ids with changed tokens."""
    masks = {"mask": sequence.mask, "documents": sequence.documents}
    batch = Sequence(ids, **{name: None if field is None else field.expand(ids.shape) for name, field in masks.items()})
    if reader.memory is not None and len(reader.memory) != len(ids):
        mask = None if reader.memory_mask is None else reader.memory_mask.expand(len(ids), -1)
        reader = replace(reader, memory=reader.memory.expand(len(ids), -1, -1), memory_mask=mask)
    last = len(reader.stack.order)
    trace = run(reader, batch, head=False)
    return {
        point: value.unflatten(0, (len(ids), -1))
        for point, value in trace.items()
        if point.address.endswith(".after") or point.depth == last
    }


def _other_ids(reader: Reader, ids: Tensor) -> Tensor:
    """Return another id for each token: of four candidates, the id whose embedding differs most."""
    # The table itself would be widened as a whole.
    embed, count = reader.stack.embedding.rows, reader.vocabulary
    candidates = (ids[None] + torch.tensor([[1], [count // 3], [count // 2], [count - 1]])) % count
    differences = (embed(candidates) - embed(ids[None])).abs().amax(-1)
    return candidates.gather(0, differences.argmax(0, keepdim=True))[0]


def _find_changes(values: Tensor) -> Tensor:
    """Compare the first row with each other row; return True where a token differs: [tokens, rows - 1]."""
    scale = values[0].abs().amax().clamp(min=1e-300)
    moved = ((values[1:] - values[:1]).abs().amax(-1) / scale).nan_to_num(nan=math.inf)
    return (moved > TOUCHED).T


@dataclass(frozen=True)
class Reach:
    """Allowed and measured dependencies after every residual step, bool [outputs, inputs].

    Args:
        wanted, measured: allowed and measured dependencies by point.
        drawn: dependencies measured with random weights; None if not needed.
    """

    wanted: Mapping[TracePoint, Tensor]
    measured: Mapping[TracePoint, Tensor]
    drawn: Mapping[TracePoint, Tensor] | None

    def leak(self, point: TracePoint) -> Tensor:
        """Return the dependencies that were measured although the masks forbid them."""
        return self.measured[point] & ~self.wanted[point]

    def gap(self, point: TracePoint) -> Tensor:
        """Return allowed dependencies that are missing with the model's weights, and with random weights if drawn."""
        missing = self.wanted[point] & ~self.measured[point]
        return missing if self.drawn is None else missing & ~self.drawn[point]

    def first(self, kind: Callable[[TracePoint], Tensor]) -> TracePoint | None:
        """Return the first point with a leak or a gap; None if there is none."""
        return next((point for point in sorted(self.wanted) if bool(kind(point).any())), None)


def _reach(reader: Reader, scenario: Scenario, tokens: list[int], rows_at_once: int) -> Reach | None:
    """Measure the dependencies and derive the allowed ones; None if the stack has no layers."""
    columns = list(scenario.columns)
    by_step = {
        step: step_reach[tokens][:, columns]
        for step, step_reach in expected_reach(reader.spec, scenario.sequence).items()
    }
    if not by_step:
        return None
    measured = measure_reach(reader, scenario, rows_at_once)
    last = by_step[max(by_step)]
    wanted = {point: by_step.get((point.depth, point.step), last) for point in measured}
    drawn = None
    if any(bool((wanted[point] & ~measured[point]).any()) for point in measured):
        # Saturated or vanished weights can hide a dependency; random weights in the same modules do not.
        drawn = measure_reach(replace(reader, module=draw_twin(reader.module)), scenario, rows_at_once)
    return Reach(wanted, measured, drawn)


def _check_scenario(reader: Reader, scenario: Scenario, rows_at_once: int) -> Iterator[CheckOutcome | Finding]:
    sequence = scenario.sequence
    real = torch.ones_like(sequence.ids[0], dtype=torch.bool) if sequence.mask is None else sequence.mask[0]
    tokens: list[int] = real.nonzero()[:, 0].tolist()
    reach = _reach(reader, scenario, tokens, rows_at_once)
    if reach is None:
        return
    leak, gap, end = reach.first(reach.leak), reach.first(reach.gap), max(reach.wanted)
    reads = (reach.wanted[end] | reach.leak(end)) & ~reach.gap(end)
    drawing = Drawing(tuple(tokens), scenario.columns, reach.wanted[end], reads)
    if leak is not None:
        yield _leak_finding(reader, scenario, leak, tokens, reach)
        yield CheckOutcome(GROUP, scenario.name, "wrong", "outputs read tokens that the mask hides", drawing=drawing)
    elif gap is not None:
        yield _gap_finding(reader, scenario, gap, tokens, reach.gap(gap))
        yield CheckOutcome(GROUP, scenario.name, "wrong", "outputs miss tokens that the mask allows", drawing=drawing)
    else:
        says = f"{int(reads.sum())} of {reads.numel()} pairs are read: those that the mask allows"
        yield CheckOutcome(GROUP, scenario.name, "right", says, drawing=drawing)


def draw_twin(module: Transformer) -> Transformer:
    """Return a copy of a model in double precision with random weights, too small to saturate a softmax."""
    twin = replica_in_dtype(module, torch.float64)
    for number, submodule in enumerate(twin.modules()):
        state: dict[str, nn.Parameter | None] = vars(submodule)["_parameters"]
        lazy: tuple[str, ...] = ()
        if isinstance(submodule, StoredRows):
            # Rows are looked up one by one, so the whole table is drawn now.
            state["weight"] = nn.Parameter(submodule.weight, requires_grad=False)
            submodule.format = plain_format(submodule.weight)
        elif isinstance(submodule, Stored):
            # A second copy of all matrices may not fit into memory: each is drawn again when it is read.
            submodule.format = replace(
                submodule.format, widen=partial(_draw_weight, 8 * number, submodule.weight.shape)
            )
            lazy = submodule.format.names
        for index, (name, weight) in enumerate(state.items()):
            if weight is not None and name not in lazy:
                drawn = _draw_weight(8 * number + index, weight.shape, weight)
                state[name] = nn.Parameter(drawn, requires_grad=False)
    return twin


def _draw_weight(seed: int, shape: torch.Size, like: Tensor, *_: Tensor) -> Tensor:
    """Draw a weight in double precision, on the device of `like`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)
    return 1.0 + 0.3 * values if len(shape) < 2 else 0.5 * values / math.sqrt(shape[-1])


def _address(reader: Reader, point: TracePoint) -> str:
    """Return the address of a step's self-attention, else of the step; the name of the stack after its layers."""
    if point.depth >= len(reader.stack.order):
        return reader.side
    step = f"{reader.side}.layers.{reader.stack.order[point.depth]}.steps.{point.step}"
    for number, branch in enumerate(reader.spec.depths[point.depth].steps[point.step].branches):
        if isinstance(branch.function, spec.Attention) and branch.function.source == "self":
            return f"{step}.branches.{number}.function"
    return step


def _leak_finding(reader: Reader, scenario: Scenario, point: TracePoint, tokens: list[int], reach: Reach) -> Finding:
    """Return the finding for a mask that hides too little, with the mistakes that allow the same dependencies."""
    columns, step = list(scenario.columns), (point.depth, point.step)
    output, column = reach.leak(point).nonzero()[0].tolist()
    causes = []
    for cause, seen in LOOSER.items():
        looser = expected_reach(reader.spec, scenario.sequence, seen)
        if step in looser and torch.equal(looser[step][tokens][:, columns], reach.measured[point]):
            causes.append(cause)
    return Finding(
        where=_address(reader, point),
        says=(
            f"{scenario.name}: the output at token {tokens[output]} changes with token {columns[column]}, which the "
            f"mask hides; {_describe_causes(causes)}"
        ),
        mathematics=_MATHEMATICS,
    )


def _gap_finding(reader: Reader, scenario: Scenario, point: TracePoint, tokens: list[int], missing: Tensor) -> Finding:
    output, column = missing.nonzero()[0].tolist()
    return Finding(
        where=_address(reader, point),
        says=(
            f"{scenario.name}: the output at token {tokens[output]} does not change with token "
            f"{scenario.columns[column]}, which it may attend to, not even with drawn weights; likely cause: the mask "
            "hides more than is declared"
        ),
        mathematics=_MATHEMATICS,
    )


def _describe_causes(causes: list[str]) -> str:
    return f"likely cause: {' or '.join(causes)}" if causes else "no known mistake gives the same pairs"


def _check_mates(reader: Reader, draw: Draw, has_source: bool) -> Iterator[CheckOutcome | Finding]:
    """Change one whole row of a batch, and check that no other row changes."""
    length = min(LENGTH, reader.module.max_positions or LENGTH)
    ids = torch.stack([draw(length, reader.vocabulary) for _ in range(3)])
    changed = ids.clone()
    changed[1] = _other_ids(reader, ids[1])
    if has_source:
        assert reader.memory is not None
        reader = replace(reader, memory=reader.memory.repeat(3, 1, 1))
    pair = [_states(reader, Sequence(ids), rows) for rows in (ids, changed)]
    name = f"{reader.side}: batch mates"
    for point, before in pair[0].items():
        scale = before.abs().amax().clamp(min=1e-300)
        moved = ((pair[1][point] - before).abs().amax((1, 2)) / scale).nan_to_num(nan=math.inf) > TOUCHED
        if bool(moved[0] or moved[2]):
            says = "batch mates: a row of the batch changes with another row; likely cause: the axes of rows and heads "
            yield Finding(where=_address(reader, point), says=f"{says}are mixed, or something is shared between rows")
            yield CheckOutcome(GROUP, name, "wrong", "rows of a batch read each other")
            return
    yield CheckOutcome(GROUP, name, "right", "no row of a batch changes with another row")


def _check_memory(module: Transformer, draw: Draw, rows_at_once: int) -> Iterator[CheckOutcome | Finding]:
    """Change one source token after another, including padding, and check which target outputs change."""
    assert module.spec.encoder is not None and module.spec.decoder is not None
    length = min(LENGTH, module.max_positions or LENGTH)
    source = Sequence(draw(length, module.num_source_ids)[None], torch.arange(length)[None] < max(1, length - 3))
    target = Sequence(draw(min(5, length), module.num_target_ids)[None])
    attends = [
        isinstance(branch.function, spec.Attention) and branch.function.source == "memory"
        for layer in module.spec.decoder.depths
        for step in layer.steps
        for branch in step.branches
    ]
    assert source.mask is not None
    real, reach = source.mask[0], expected_reach(module.spec.encoder, source)
    encoded = reach[max(reach)] if reach else torch.eye(length, dtype=torch.bool)
    wanted = (encoded[real].any(0) & torch.tensor(any(attends))).expand(target.ids.shape[1], -1)
    measured = _source_reach(module, source, target, rows_at_once)
    missing = wanted & ~measured
    if bool(missing.any()):
        missing &= ~_source_reach(draw_twin(module), source, target, rows_at_once)
    leaks = measured & ~wanted
    tokens = tuple(range(target.ids.shape[1]))
    drawing = Drawing(tokens, tuple(range(length)), wanted, (wanted | leaks) & ~missing)
    if not bool((leaks | missing).any()):
        says = "every output reads all real tokens of the source, and no padding"
        yield CheckOutcome(GROUP, "memory", "right", says, drawing=drawing)
        return
    output, token = (leaks if bool(leaks.any()) else missing).nonzero()[0].tolist()
    does = "changes with" if bool(leaks.any()) else "does not change with"
    kind = "real" if bool(real[token]) else "padding"
    yield Finding(
        where="decoder",
        says=(
            f"memory: the output at token {output} {does} token {token} of the source, which is {kind}; likely cause: "
            "the mask of the source is not the mask of the memory"
        ),
        mathematics="a token of the target attends to all real tokens of the source",
    )  # fmt: skip
    yield CheckOutcome(GROUP, "memory", "wrong", f"an output {does} a token that is {kind}", drawing=drawing)


def _source_reach(module: Transformer, source: Sequence, target: Sequence, rows_at_once: int) -> Tensor:
    encoder = Reader(module, "encoder")
    length = source.ids.shape[1]
    other = _other_ids(encoder, source.ids[0])
    rows = source.ids.repeat(length + 1, 1)
    rows[torch.arange(length) + 1, torch.arange(length)] = other
    states = []
    for chunk in rows.split(rows_at_once):
        assert source.mask is not None
        mask = source.mask.expand(chunk.shape)
        reader = Reader.of(module, "decoder", Sequence(chunk, mask))
        trace = _states(reader, target, target.ids.expand(len(chunk), -1))
        states.append(trace[max(trace)])
    return _find_changes(torch.cat(states))


def _show_one_later(mask: spec.Mask, sequence: Sequence) -> Tensor:
    """Return a mask that shows each query one later key."""
    may = expand_mask(mask, replace(sequence, mask=None))
    wider = may | torch.cat([may[:, :1], may[:, :-1]], 1)
    return wider if sequence.mask is None else wider & sequence.mask[0]


def _show_one_earlier(mask: spec.Mask, sequence: Sequence) -> Tensor:
    may = expand_mask(mask, replace(sequence, mask=None))
    wider = may | torch.cat([may[:, 1:], may[:, -1:]], 1)
    return wider if sequence.mask is None else wider & sequence.mask[0]


LOOSER: Mapping[str, Seen] = {
    "there is no causal mask": lambda mask, sequence: expand_mask(spec.Full(), sequence),
    "the mask is off by one: it shows the next token": _show_one_later,
    "the window is one token too wide": _show_one_earlier,
    "there is no window": lambda mask, sequence: expand_mask(spec.Causal(), sequence),
    "padding is not masked": lambda mask, sequence: expand_mask(mask, replace(sequence, mask=None)),
    "documents are not masked": lambda mask, sequence: expand_mask(mask, replace(sequence, documents=None)),
    "nothing is masked": lambda mask, sequence: torch.ones(sequence.ids.shape[1], sequence.ids.shape[1]).bool(),
}
"""Wrong masks by the mistake that causes them."""
