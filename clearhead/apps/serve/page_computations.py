"""Forward passes of one model for the live page, cached by the request of the page.

A page sends its texts and edits with every request. So the application stores no state of a page, and no page sees the
edits of another one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Generic, TypeVar

import torch
from jaxtyping import Float, Float32
from pydantic import Field
from torch import Tensor

from clearhead.apps.serve.interventions import Data, Edits, Intervention, check, editing, python_lines
from clearhead.apps.serve.long_text import is_long, long_sample
from clearhead.apps.serve.work import Work
from clearhead.base.errors import InputError
from clearhead.base.printing import num_parameters
from clearhead.interpret.maps.attention_maps import AttentionMaps, attend_first_layer, in_precision
from clearhead.interpret.maps.hook_points import capture
from clearhead.interpret.maps.map_inputs import ReadKwargs, predicts_text
from clearhead.interpret.maps.outcome import ModelOutcome, OutcomeChoice, OutputNames
from clearhead.interpret.maps.page import SampleOptions, run_sample
from clearhead.interpret.view.explorer.data import Sample
from clearhead.interpret.view.explorer.encode import Encoder, compress_array
from clearhead.model.facade import Model
from clearhead.spec.tasks.registry import find_task

MOST_NUMBERS = 2**23
"""Maximum number of probabilities that are stored for one run."""
MOST_OPERATIONS = 2 * 10**10
"""Most multiplications for which a page measures the effect of every head without being asked: about a second."""
NUM_CANDIDATES = 6
SMALLEST_PROBABILITY = 1e-45
"""The smallest probability in float32."""


@dataclass(frozen=True)
class Outputs:
    """Predicted outputs (tokens or labels) of one forward pass, with their probabilities.

    Args:
        positions: the positions in the last stack at which outputs are predicted. None means one output for the whole
            text.
        labels: the output that follows each position in the text, -1 if unknown.
        probabilities: the probability of every output at each position. None means that the model has none.
        state: the mean of the last hidden states.
        written: the text that the model generated. None means no text.
    """

    positions: tuple[int | None, ...]
    labels: tuple[int, ...]
    probabilities: Float32[Tensor, "positions outputs"] | None
    state: Float32[Tensor, " width"]
    written: str | None


@torch.no_grad()
def outputs_of(maps: AttentionMaps, hidden_1TD: Float[Tensor, "1 tokens width"], written: str | None) -> Outputs:
    """Return the predicted outputs of a forward pass.

    Args:
        maps: the attention maps of the run.
        hidden_1TD: the output of the last stack.
        written: the text that the model generated. None means no text.
    """
    state = hidden_1TD[0].float().mean(0).cpu()
    head = maps.module.head
    try:
        names = maps.output_names
    except InputError:
        return Outputs((), (), None, state, written)
    assert head is not None
    if head.is_pooled:
        logits = head(hidden_1TD, (maps.inputs.target or maps.inputs.source).mask)
        return Outputs((None,), (-1,), names.probabilities(logits.float()).cpu(), state, written)
    positions = _positions(maps, names)
    logits = head(hidden_1TD[:, positions])[0, :, : len(names.names)].float()
    known = maps.inputs.labels if names.tokenizer is not None and maps.module.decoder is not None else ()
    labels = tuple(known[position] if position < len(known) else -1 for position in positions)
    return Outputs(tuple(positions), labels, names.probabilities(logits).cpu(), state, written)


def _positions(maps: AttentionMaps, names: OutputNames) -> list[int]:
    """Return the positions to show: those of mask tokens, or the last ones, as many as can be stored."""
    ids = (maps.inputs.target or maps.inputs.source).ids[0].tolist()
    mask_id = None if names.tokenizer is None or maps.module.decoder is not None else names.tokenizer.mask_id
    masks = [position for position, index in enumerate(ids) if index == mask_id]
    most = min(512, max(1, MOST_NUMBERS // len(names.names)))
    return masks[:most] or list(range(max(0, len(ids) - most), len(ids)))


@dataclass(frozen=True)
class OutputComparison:
    """Outputs of the unchanged and of the edited run, at the same positions.

    Args:
        maps: the unchanged run.
        before: the outputs of the unchanged run.
        after: the outputs of the edited run. None means that there are no edits.
    """

    maps: AttentionMaps
    before: Outputs
    after: Outputs | None

    def to_json(self, of: OutcomeChoice) -> dict[str, Any]:
        """Return both outputs as JSON.

        Args:
            of: two outputs whose difference is included. None means no difference.
        """
        before, after = self.before, self.after or self.before
        written = [before.written, None if self.after is None else self.after.written]
        if before.probabilities is None or after.probabilities is None:
            # For an embedding: the angle between both vectors.
            similarity = float(torch.cosine_similarity(before.state, after.state, dim=0))
            states = [before.state.tolist(), after.state.tolist()]
            return {"written": written, "rows": [], "similarity": similarity, "states": states}
        pairs = zip(before.probabilities, after.probabilities, strict=True)
        rows = [self._row(*row) for row in zip(before.positions, before.labels, pairs, strict=True)]
        tokenizer = self.maps.output_names.tokenizer
        end = None if tokenizer is None else tokenizer.eos_id
        difference = None if of is None else self._difference(self.maps.outcome(of))
        return {"written": written, "rows": rows, "end": end, "difference": difference}

    def _difference(self, outcome: ModelOutcome) -> dict[str, Any] | None:
        """Return the difference of the log-probabilities of two outputs, before and after the edits."""
        position = outcome.logits_position
        if position not in self.before.positions:
            return None
        row = self.before.positions.index(position)
        values = [
            sum(
                sign * math.log(max(float(run.probabilities[row, index]), SMALLEST_PROBABILITY))
                for index, sign in outcome.signs.items()
            )
            for run in (self.before, self.after or self.before)
            if run.probabilities is not None
        ]
        name = self.maps.output_names.difference(outcome, " rather than ")
        return {"name": name, "position": position, "values": values}

    def _row(self, position: int | None, label: int, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Return one row of the page: the token at a position, the next token, and the most probable outputs."""
        likely = chain.from_iterable(
            probabilities.topk(min(NUM_CANDIDATES, len(probabilities))).indices.tolist() for probabilities in pair
        )
        tokens = self.maps.target_tokens or self.maps.tokens
        return {
            "position": position,
            "reads": "" if position is None else tokens[position],
            "follows": None if label < 0 else self._candidate(label, pair),
            "candidates": [self._candidate(index, pair) for index in dict.fromkeys(likely)],
        }

    def _candidate(self, index: int, pair: tuple[Tensor, Tensor]) -> list[Any]:
        """Return the text of an output, its index, and its probability before and after the edits."""
        return [
            self.maps.output_names.display_name(index),
            index,
            *(float(probabilities[index]) for probabilities in pair),
        ]


KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
InputText = Annotated[str, Field(max_length=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


class PageRequest(Data):
    """Request of a page: the texts, edits and outputs that determine a run.

    Args:
        text, target, generate: the texts and the number of generated tokens, as in `Model.attention`.
        edits: the edits of the run.
        of: two outputs (tokens or labels) to compare. None means that one output is followed.
        position: the position in the last stack at which the outputs are predicted. None means the end of the text.
        is_beginning: True to compute only the first layer, and only if the text is long.
    """

    text: InputText
    target: InputText | None = None
    generate: Annotated[int, Field(ge=0, le=1024)] = 0
    edits: Edits = ()
    of: tuple[Name, Name] | None = None
    position: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    is_beginning: bool = False

    @property
    def unchanged(self) -> PageRequest:
        """The same request without edits."""
        return self.model_copy(update={"edits": ()})

    @property
    def texts(self) -> PageRequest:
        """The same request without edits and compared outputs."""
        return self.model_copy(update={"edits": (), "of": None, "position": None})

    @property
    def name(self) -> str:
        """A hash of the request; equal requests have equal names."""
        return hashlib.sha256(self.model_dump_json().encode("utf-8", "replace")).hexdigest()[:24]


class RecentValues(Generic[KeyT, ValueT]):
    """Cache of the most recently used values.

    Args:
        most: the maximum number of values.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    def get(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """Return the cached value of a key, or compute and cache it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return value


@dataclass
class ShownRun:
    """A run in the form that its page shows.

    Args:
        request: the request of the page.
        runs: the unchanged run, and the edited one if there are edits.
        page: the samples of the page as JSON.
        outputs: the outputs as JSON, see `OutputComparison.to_json`.
        python: the lines of Python that compute the same run.
        encoder: the arrays of the page.
    """

    request: PageRequest
    runs: list[AttentionMaps]
    page: dict[str, Any]
    outputs: dict[str, Any]
    python: list[str]
    encoder: Encoder
    _made: dict[int, list[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def blob(self, number: int) -> str:
        """Return one array of the page, compressed as in a saved page.

        Raises:
            InputError: the page has no array of this number.
        """
        if not 0 <= number < self.encoder.num_blobs:
            raise InputError(f"there is no array {number}; there are {self.encoder.num_blobs}")
        maker = bisect_right(self.encoder.starts, number) - 1
        with self._lock:
            if maker not in self._made:
                self._made[maker] = list(map(compress_array, self.encoder.makers[maker]()))
            return self._made[maker][number - self.encoder.starts[maker]]


class Runs:
    """A model in float32 with caches of its recent runs, for the live page.

    Args:
        model: the model; float32 makes its numbers independent of the machine.
        title: the heading of the page.
        reading: the options for reading texts, as in `Model.attention`.

    Attributes:
        bases: the unchanged runs with their outputs, by texts.
        samples: the unchanged runs as a page draws them, by request without edits.
        shown: the runs as their pages show them, by the name of the request.
        requests: the requests, by name.
    """

    def __init__(self, model: Model, title: str, reading: ReadKwargs) -> None:
        self.model: Model = model.with_module(in_precision(model.module, "fp32"))
        self.title = title
        self.reading = reading
        self.bases: RecentValues[PageRequest, tuple[AttentionMaps, Outputs]] = RecentValues(4)
        self.samples: RecentValues[PageRequest, Sample] = RecentValues(4)
        self.shown: RecentValues[str, ShownRun] = RecentValues(6)
        self.requests: RecentValues[str, PageRequest] = RecentValues(1024)

    @property
    def has_two_stacks(self) -> bool:
        """True if the model has an encoder and a decoder."""
        return self.model.module.encoder is not None and self.model.module.decoder is not None

    @property
    def predicts_text(self) -> bool:
        """True if the model generates text token by token."""
        return predicts_text(self.model.module, self.model.task)

    @property
    def predicts(self) -> bool:
        """True if the model gives probabilities of tokens or labels."""
        task = find_task(self.model.task.kind)
        return self.model.module.head is not None and task.outputs not in ("vector", "span")

    def page(self, encoder: Encoder, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the content of a page (title, facts and samples) as JSON; the encoder stores the arrays."""
        facts = [["parameters", f"{num_parameters(self.model.module):,}"]]
        encoded = [encoder.sample(sample) for sample in samples]
        return {"title": self.title, "facts": facts, "timeline": False, "samples": encoded, "spans": encoder.spans}

    def writes(self, request: PageRequest) -> bool:
        """Return whether the model generates text for a request."""
        return self.predicts_text and request.target is None and (self.has_two_stacks or request.generate > 0)

    def decode_written(self, request: PageRequest, maps: AttentionMaps) -> str | None:
        """Return the text that the model generated; None if it generated none."""
        reading = maps.inputs
        if not self.writes(request) or reading.num_given is None:
            return None
        return maps.tokenizers.target.decode(list(reading.labels[reading.num_given - 1 :]))

    def python_of_request(self, request: PageRequest, of: OutcomeChoice) -> list[str]:
        """Return the lines of Python that compute the result of a request.

        Args:
            request: the request of the page.
            of: the outputs that the request compares. None means that it compares none.
        """
        module = self.model.module
        texts = repr(request.text) if request.target is None else f"{request.text!r}, {request.target!r}"
        call = f"maps = model.attention({texts})"
        if of is not None:
            call = f"print(model.attention({texts}).effects(of={of!r}))"
        elif self.writes(request) and module.encoder is not None:
            call = f"print(model.translate({texts}, beam_size={self.reading.get('beam_size') or 1}))"
        elif self.writes(request):
            call = f"print(model.generate({texts}, max_new_tokens={request.generate}, temperature=0))"
        elif not self.predicts_text:
            call = f"print(model.predict({request.text!r}))"
        return self.python(request.edits, call)

    def python(self, edits: Sequence[Intervention], call: str) -> list[str]:
        """Return the lines of Python that run a call with edits; see `python_lines`."""
        return python_lines(edits, [_sharing(self.model.module, intervention) for intervention in edits], call)


@dataclass(frozen=True)
class Computation:
    """Runs of one model for one request; they stop when the client disconnects.

    Args:
        runs: the model with its most recent runs.
        work: the computation; it is cancelled when the client has disconnected.
    """

    runs: Runs
    work: Work

    def watching(self) -> AbstractContextManager[None]:
        """Return a context manager in which the model checks before each layer whether the client still waits."""
        return self.work.watching(self.runs.model)

    def show(self, request: PageRequest) -> ShownRun:
        """Return the run of a request in the form that its page shows.

        Args:
            request: the request.

        Raises:
            InputError: the text cannot be read, or an edit is not possible.
        """
        self.runs.requests.get(request.name, lambda: request)
        return self.runs.shown.get(request.name, partial(self._show, request))

    def show_named(self, name: str) -> ShownRun:
        """Return a run by the name of its request; a run that has left the cache is computed again.

        Raises:
            InputError: no recent request has this name.
        """

        def refuse() -> PageRequest:
            raise InputError("this run is no longer stored: reload the page")

        return self.show(self.runs.requests.get(name, refuse))

    def base(self, request: PageRequest) -> tuple[AttentionMaps, Outputs]:
        """Return the unchanged run of the texts of a request, with its outputs."""
        return self.runs.bases.get(request.texts, partial(self._run, request))

    def changing(self, edits: Sequence[Intervention], lengths: Mapping[str, int]) -> AbstractContextManager[object]:
        """Return a context manager in which the model runs with the edits.

        Args:
            edits: the edits.
            lengths: the number of tokens that each stack reads, by "encoder" and "decoder".

        Raises:
            InputError: an edit is not possible.
        """
        module = self.runs.model.module
        for intervention in edits:
            check(intervention, module, lengths)
        others = [self._activation(intervention) if intervention.kind == "patch" else None for intervention in edits]
        return editing(module, edits, others)

    def _activation(self, intervention: Intervention) -> Tensor:
        """Return the activation at the address of a patch, computed on the second text.

        Raises:
            InputError: the text cannot be read.
        """
        other, _ = self.base(PageRequest(text=intervention.text, target=intervention.target))
        with self.watching(), capture(self.runs.model.module, intervention.address) as seen:
            other.with_module(other.module)
        records = [record for record in seen[intervention.address] if intervention.depth in (None, record.depth)]
        if not records:
            raise InputError(f"'{intervention.address}' is not computed at depth {intervention.depth}")
        return records[-1].tensor.detach()

    def _run(self, request: PageRequest) -> tuple[AttentionMaps, Outputs]:
        with self.watching(), capture(self.runs.model.module, "hidden") as seen:
            maps = self._attention(request)
        return maps, outputs_of(maps, seen["hidden"][-1].tensor, self.runs.decode_written(request, maps))

    def _attention(self, request: PageRequest) -> AttentionMaps:
        runs = self.runs
        return runs.model.attention(request.text, request.target, request.generate, precision="auto", **runs.reading)

    def _show_beginning(self, request: PageRequest) -> ShownRun:
        """Return the page of a long text with the first layer only; empty for short, edited or generated texts."""
        model = self.runs.model
        stacks = [model.module.encoder, model.module.decoder]
        depth = max(len(stack.order) for stack in stacks if stack is not None)
        nothing = ShownRun(request, [], {}, {}, [], Encoder())
        if request.edits or self.runs.writes(request) or depth == 1:
            return nothing
        reading = model.read(request.text, request.target, request.generate, **self.runs.reading)
        maps = attend_first_layer(model.module, model.tokenizers, model.task, reading)
        if not is_long(maps, depth):
            return nothing
        page = self.runs.page(nothing.encoder, [long_sample(maps, "unchanged", lambda: None)])
        return replace(nothing, runs=[maps], page=page)

    def _show(self, request: PageRequest) -> ShownRun:
        if request.is_beginning:
            with self.watching():
                return self._show_beginning(request)
        base, before = self.base(request)
        of = outputs_to_compare(base, request)
        first = self.runs.samples.get(request.unchanged, partial(self._sample, base, "unchanged", of))
        samples, runs, after = [first], [base], None
        if request.edits:
            with self.watching(), self.changing(request.edits, stack_lengths(base)):
                with capture(self.runs.model.module, "hidden") as seen:
                    changed = base.with_module(base.module)
                again = self._attention(request) if self.runs.writes(request) else changed
                after = outputs_of(changed, seen["hidden"][-1].tensor, self.runs.decode_written(request, again))
                samples.append(self._sample(changed, "changed", of))
                runs.append(changed)
        encoder = Encoder()
        page = self.runs.page(encoder, samples)
        outputs = OutputComparison(base, before, after).to_json(of)
        return ShownRun(request, runs, page, outputs, self.runs.python_of_request(request, of), encoder)

    def _sample(self, maps: AttentionMaps, label: str, of: OutcomeChoice) -> Sample:
        if is_long(maps):
            return long_sample(maps, label, self.work.check)
        with self.watching():
            effects = of is not None or self._effects_are_quick(maps)
            return run_sample(maps, label, SampleOptions(of=of, effects=effects))

    def _effects_are_quick(self, maps: AttentionMaps) -> bool:
        """Return whether the text has an output to follow, and the model is small enough to run it once per head."""
        try:
            maps.outcome(None)
        except InputError:
            return False
        num_heads = sum(record.num_heads for record in maps.records.values())
        num_tokens = sum(stack_lengths(maps).values())
        return num_heads * num_tokens * num_parameters(maps.module) <= MOST_OPERATIONS


def outputs_to_compare(maps: AttentionMaps, request: PageRequest) -> OutcomeChoice:
    """Return the two outputs that a request compares, as `AttentionRun.outcome` takes them; None if it compares none.

    Raises:
        InputError: the position or an output does not exist.
    """
    if request.of is None:
        return None
    position = position_of(maps, request.position)
    labels, tokenizer = maps.inputs.labels, maps.output_names.tokenizer
    if request.position is None and tokenizer is not None and labels and labels[-1] == tokenizer.eos_id:
        # The text has ended: compare at its last token, not after the end.
        position = maps.outcome(None).position
    of = request.of if position is None else (position, *request.of)
    maps.outcome(of)
    return of


def position_of(maps: AttentionMaps, position: int | None) -> int | None:
    """Return the position of an output as `AttentionRun.outcome` counts it; None for the output of a whole text.

    Args:
        maps: the attention maps of a run.
        position: the position in the last stack at which the output is predicted. None means the default.
    """
    head = maps.module.head
    if position is None or head is None or head.is_pooled:
        return None
    return position + int(maps.module.decoder is not None and maps.output_names.tokenizer is not None)


def stack_lengths(maps: AttentionMaps) -> dict[str, int]:
    """Return the number of tokens that each stack reads, by "encoder" and "decoder"."""
    return {stack.partition(".")[0]: len(maps.query_tokens(stack)) for stack in maps.stacks}


def _sharing(module: Any, intervention: Intervention) -> int:
    """Return the number of depths of the edited stack if the edit names a depth of a layer, else 1."""
    parts = intervention.address.split(".")
    if intervention.depth is None or parts[1] != "layers":
        return 1
    return len(getattr(module, parts[0]).order)
