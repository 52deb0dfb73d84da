"""Decode continuations and translations in ids: start requests, run their batches and collect the results.

Results do not depend on the prompts that share a batch: bit for bit if `Runner.is_batch_invariant` is true, otherwise
up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.base.errors import InputError, argument
from clearhead.base.hooks import naming_texts
from clearhead.base.machine import free_memory, refuse_memory
from clearhead.core import Transformer
from clearhead.fast.memory import cache_bytes, cache_dtype, cache_tokens
from clearhead.fast.native.load import uses_kernels
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import (
    CPU_CACHE_TOKENS,
    GPU_ROWS,
    check_lengths,
    device_of,
    position_limit,
    read_tokens,
)
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import (
    CHUNK_TOKENS,
    Prefill,
    Prefixes,
    check_model,
    prefill_chunks,
    prefill_prompts,
    token_limits,
)
from clearhead.generate.processors import Processor, build_logits_processors, is_timeless
from clearhead.generate.results import (
    BeginConstraint,
    Continuation,
    Decode,
    GeneratedSequence,
    Sentence,
    StreamingDecoder,
)
from clearhead.generate.running import (
    Generated,
    PrefilledMember,
    RunningBatch,
    SequenceProgress,
    run_queue,
)
from clearhead.generate.search.beam import Search, target_limits
from clearhead.generate.search.recorder import BeamRecorder
from clearhead.generate.search.sampling import RandomStream, Sampling, TokenChooser, sequence_seed

LONG_PROMPT: Final = 2**13
"""Prompt length in tokens from which a notice is logged: the time grows with the square of the length."""
LEAST_COUNTED: Final = 256
"""Prompt length in tokens from which the size of the KV cache is compared with the free memory."""
SLOT_DEVICES: Final = ("cuda",)
"""Kinds of devices on which a batch decodes in slots, by recorded steps."""
_LOGGER: Final = logging.getLogger("clearhead.generate")


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts in ids, or sources to translate, with their decoding options.

    Args:
        prompts: ids that the decoder reads, with the start token; none empty. The prompt of a translation is the start
            token alone.
        options: options of generation, or of a search for translations, whose hypotheses end with an end token.
        eos_id: id of the end token.
        pad_id: id of the padding token.
        banned: ids that are never generated, except end tokens and forced tokens.
        sources: ids that the encoder reads, one sequence for each prompt. None means a decoder-only model.
        decode: function from ids to text, needed for stop texts and for streaming.
        contexts: ids before the generated text, for each prompt; a leading space can depend on them. None means the
            prompts.
        config: generation settings of the checkpoint. Its end tokens end a sequence as `eos_id` does.
        recorder: records the candidates of beam search for a single prompt. None means no record.
        constraint: function that creates the constraint of a sequence, for greedy search and sampling. None means no
            constraint.
    """

    prompts: Sequence[Sequence[int]]
    options: GenerateOptions | SearchOptions
    eos_id: int
    pad_id: int
    banned: Sequence[int] = ()
    sources: Sequence[Sequence[int]] | None = None
    decode: Decode | None = None
    contexts: Sequence[Sequence[int]] | None = None
    config: GenerationConfig = field(default_factory=GenerationConfig)
    recorder: BeamRecorder | None = None
    constraint: BeginConstraint | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end a sequence."""
        return self.options.stops if isinstance(self.options, GenerateOptions) else ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All ids that end a sequence; beam search forces the first one at the length limit."""
        return (self.eos_id, *(index for index in self.config.eos_ids if index != self.eos_id))

    def context(self, prompt: int) -> Sequence[int]:
        """Return the ids before the generated text of a prompt."""
        return self.prompts[prompt] if self.contexts is None else self.contexts[prompt]


def generate_ids(module: Transformer, request: GenerateRequest) -> list[list[Continuation]]:
    """Continue each prompt, or translate each source, in the order of the request.

    Args:
        module: a decoder-only or encoder-decoder model. If it is in training mode, a replica in evaluation mode runs.
        request: prompts and options.

    Returns:
        `num_sequences` continuations for each prompt. Beam search returns the best first, fewer only if fewer exist.

    Raises:
        InputError: the model cannot generate, or cannot read a prompt or source.
        RunFailure: the model's output is not a number, or the options ban every token.
    """
    with_text = bool(request.stops) or request.constraint is not None
    starter = RequestStarter(in_evaluation(module), request, check_limits(module, request), with_text)
    done: list[Generated] = []
    for step in starter.run():
        done += [event.sequence for event in step if event.is_done]
    results: list[list[Continuation]] = [[] for _ in request.prompts]
    for sequence in done:
        if isinstance(sequence, Sentence):
            results[sequence.prompt] = sequence.best_candidates()
    for row in sorted((row for row in done if isinstance(row, GeneratedSequence)), key=lambda row: row.number):
        results[row.prompt].append(row.continuation())
    return results


def stream_ids(module: Transformer, request: GenerateRequest) -> Generator[str, None, Continuation]:
    """Continue one prompt and yield its text in pieces, each as soon as no later token can change it.

    Args:
        module: a decoder-only or encoder-decoder model, as for `generate_ids`.
        request: one prompt, with `decode`.

    Returns:
        The continuation, as the return value of the generator.

    Raises:
        InputError: as for `generate_ids`; or the request asks for beam search or several sequences.
    """
    if request.options.is_search:
        raise InputError(
            "a stream needs " + argument("beam_size") + " 1: with more beams, no text is final before the end"
        )
    if len(request.prompts) != 1 or request.options.num_sequences != 1:
        raise InputError("a stream is one text: give a prompt and leave " + argument("num_return_sequences") + " at 1")
    return _stream(RequestStarter(in_evaluation(module), request, check_limits(module, request), with_text=True))


def _stream(starter: RequestStarter) -> Generator[str, None, Continuation]:
    """Yield the text of one prompt; the request is already checked."""
    for step in starter.run():
        yield from (event.text for event in step if event.text)
    (row,) = (event.sequence for event in step)
    assert isinstance(row, GeneratedSequence)
    return row.continuation()


def check_limits(module: Transformer, request: GenerateRequest) -> list[int]:
    """Check a request and return the maximum number of tokens that may follow each prompt.

    Args:
        module, request: the arguments of `generate_ids`.

    Raises:
        InputError: as for `generate_ids`.
    """
    options, sources = request.options, request.sources
    assert sources is None or len(sources) == len(request.prompts)
    if request.prompts:
        _refuse_large_cache(module, request)
    if isinstance(options, SearchOptions):
        assert sources is not None, "a translation needs a source for each prompt"
        check_lengths(sources, module.spec.position_limit, noun="source")
        return target_limits(module, list(map(len, sources)), options)
    check_model(module, with_sources=sources is not None)
    assert request.decode is not None or not options.stops, "stop texts need `decode`"
    limits = token_limits(module, request.prompts, options, most=request.config.max_length)
    if sources is not None:
        check_lengths(sources, position_limit(module, options), noun="source")
    longest = max(map(len, [*request.prompts, *(sources or ())]), default=0)
    if longest >= LONG_PROMPT:
        _LOGGER.info("reading a prompt of %s tokens; the time grows with the square of the length", f"{longest:,}")
    return limits


def _refuse_large_cache(module: Transformer, request: GenerateRequest) -> None:
    """Refuse a request if the KV cache of its longest prompt, with its source, exceeds the free memory."""
    sources = request.sources or [()] * len(request.prompts)
    pairs = list(zip(request.prompts, sources, strict=True))
    number, (prompt, source) = max(enumerate(pairs, start=1), key=lambda item: sum(map(len, item[1])))
    count = len(prompt) + len(source)
    if count < LEAST_COUNTED:
        return
    target_token, source_token = cache_bytes(module.spec, cache_dtype(module))
    # All sequences of a prompt share the keys and values of its source.
    needed = request.options.num_rows * len(prompt) * target_token + len(source) * source_token
    subject = f"the KV cache of prompt {number} ({count:,} tokens)"
    refuse_memory(needed, subject, free=free_memory(device_of(module)), advice="shorten it")


def running_batch(
    module: Transformer, *, rows: int, tokens: int, sources: int = 0, needs_every_token: bool = False
) -> RunningBatch:
    """Return an empty running batch: in slots, with recorded steps, on a GPU; otherwise with a growing cache.

    Args:
        module: the model in evaluation mode.
        rows: number of rows that decode at the same time.
        tokens: maximum number of tokens of a row, prompt and generated.
        sources: maximum number of source tokens of a row; 0 for a decoder-only model.
        needs_every_token: True reports each token of each row. False may report rows without text at their end only.
    """
    if device_of(module).type not in SLOT_DEVICES or not uses_kernels():
        return RunningBatch(module)
    from clearhead.generate.slots.batch import SlotSize, slot_batch
    from clearhead.generate.slots.beams import BeamBatch

    size = SlotSize(rows, tokens, sources)
    return slot_batch(BeamBatch, module, size, needs_every_token=needs_every_token) or RunningBatch(module)


@dataclass(frozen=True, eq=False)
class RequestStarter:
    """Reads the prompts of a checked request and starts their sequences or searches.

    Args:
        module: the model in evaluation mode.
        request: prompts and options.
        limits: maximum number of generated tokens for each prompt, from `check_limits`.
        with_text: True decodes the ids to text.
    """

    module: Transformer
    request: GenerateRequest
    limits: Sequence[int]
    with_text: bool

    def run(self) -> Iterator[list[SequenceProgress]]:
        """Generate for all prompts in one running batch; yield the progress of the sequences after each step."""
        options, most = self.request.options, self.request.options.batch_size
        budget = options.batch_tokens if isinstance(options, SearchOptions) else None
        if most is None and self._is_on_gpu:
            most = max(1, GPU_ROWS // options.num_rows)
        if budget is None:
            budget = cache_tokens(self.module) if self._is_on_gpu else CPU_CACHE_TOKENS
        costs = self._costs()
        batch = self._batch(min(len(costs), most or len(costs), max(1, budget // max(costs, default=1))))
        try:
            yield from run_queue(batch, costs, self._start_groups, budget=budget, most=most)
        finally:
            batch.close()

    def _batch(self, prompts: int) -> RunningBatch:
        """Return an empty batch in which this number of prompts can run together."""
        request, options = self.request, self.request.options
        if not request.prompts:
            return RunningBatch(self.module)
        tokens = max(len(prompt) + limit for prompt, limit in zip(request.prompts, self.limits, strict=True))
        sources = max(map(len, request.sources or ()), default=0)
        return running_batch(self.module, rows=prompts * options.num_rows, tokens=tokens, sources=sources)

    @property
    def _is_on_gpu(self) -> bool:
        return device_of(self.module).type != "cpu"

    def start(self, numbers: Sequence[int]) -> PrefilledMember:
        """Read some prompts and start them as one member of a batch.

        Args:
            numbers: indices of the prompts. Their rules must be equal, see `GenerationConfig.rules_of`.
        """
        return self.start_prefilled(numbers, self.prefill(numbers))

    def prefill(self, numbers: Sequence[int]) -> Prefill:
        """Run the model over some prompts, and return their KV cache and next logits."""
        request = self.request
        with naming_texts(numbers):
            return prefill_prompts(
                self.module,
                [request.prompts[number] for number in numbers],
                None if request.sources is None else [request.sources[number] for number in numbers],
                pad_id=request.pad_id,
                limits=[self.num_read_later(number) for number in numbers],
            )

    def num_read_later(self, number: int) -> int:
        """Return the maximum number of generated tokens that the decoder reads, without a translation's last token."""
        # The decoder never reads the last token of a translation.
        return self.limits[number] - isinstance(self.request.options, SearchOptions)

    def start_prefilled(self, numbers: Sequence[int], prefill: Prefill) -> PrefilledMember:
        """Start some prompts that the model has read already, as one member of a batch."""
        request, options = self.request, self.request.options
        if isinstance(options, SearchOptions) or options.is_search:
            search = Search(
                [Sentence(number, self.limits[number]) for number in numbers],
                request.end_ids,
                options.search(request.config.early_stopping) if isinstance(options, GenerateOptions) else options,
                prefill.ids,
                chain=self._chain(numbers[0], prefill),
                open_ended=isinstance(options, GenerateOptions),
                recorder=request.recorder,
            )
            return PrefilledMember(search, prefill.cache, prefill.logits)
        rows, prefill = self._rows(numbers), prefill.repeat(options.num_return_sequences)
        chain, streams = self._chain(numbers[0], prefill), []
        if options.method == "sample":
            sources = request.sources or [()] * len(request.prompts)
            streams = [
                RandomStream(
                    sequence_seed(options.seed, row.number, [*request.prompts[row.prompt], *sources[row.prompt]])
                )
                for row in rows
            ]
        chooser = TokenChooser(chain, options if streams else None)
        kind = _sampling_kind(request, options) if all(map(is_timeless, chain)) else None
        return PrefilledMember(Sampling(rows, prefill.ids, chooser, streams, kind), prefill.cache, prefill.logits)

    def _costs(self) -> list[int]:
        """Return each prompt's cost for batching: rows times source tokens (translation) or most cached tokens.

        A translation counts its cached tokens too if the memory of a GPU is the budget.
        """
        request, rows = self.request, self.request.options.num_rows
        if isinstance(request.options, SearchOptions) and (request.options.batch_tokens or not self._is_on_gpu):
            return [rows * len(source) for source in request.sources or ()]
        costs = [rows * (len(prompt) + limit) for prompt, limit in zip(request.prompts, self.limits, strict=True)]
        if request.sources is not None:
            costs = [cost + rows * len(source) for cost, source in zip(costs, request.sources, strict=True)]
        return costs

    def _start_groups(self, numbers: list[int]) -> list[PrefilledMember]:
        """Start prompts in groups that share their logits processors: some depend on the lengths of prompt and text."""
        groups: dict[Hashable, list[int]] = {}
        for number in numbers:
            rules = self.request.config.rules_of(len(self.request.prompts[number]), self.limits[number])
            groups.setdefault(rules, []).append(number)
        return [self.start(some) for group in groups.values() for some in self._split_reading(group)]

    def _split_reading(self, numbers: list[int]) -> list[list[int]]:
        """Split prompts so that a GPU, whose memory holds more keys than activations, reads some of them at a time."""
        if not self._is_on_gpu:
            return [numbers]
        texts = [*self.request.prompts, *(self.request.sources or ())]
        rows = max(1, read_tokens(self.module) // max(map(len, texts)))
        return [numbers[start : start + rows] for start in range(0, len(numbers), rows)]

    def _rows(self, numbers: Sequence[int]) -> list[GeneratedSequence]:
        """Return the sequences of some prompts; the sequences of a prompt are adjacent."""
        request, rows = self.request, []
        for prompt in numbers:
            for number in range(request.options.num_sequences):
                decoder = None
                if self.with_text:
                    assert request.decode is not None
                    decoder = StreamingDecoder(request.decode, request.stops, request.context(prompt))
                constraint = None if request.constraint is None else request.constraint()
                rows.append(
                    GeneratedSequence(
                        prompt, number, self.limits[prompt], request.end_ids, decoder, constraint=constraint
                    )
                )
        return rows

    def _chain(self, number: int, prefill: Prefill) -> list[Processor]:
        """Return the logits processors for a prompt and for the prompts that start in the same group."""
        request, options, prompt_length = self.request, self.request.options, prefill.ids.shape[1]
        num_prompt = len(request.prompts[number])
        if isinstance(options, GenerateOptions):
            shortest = min(request.config.min_length - num_prompt, options.max_new_tokens)
            options = replace(options, min_new_tokens=max(options.min_new_tokens, shortest))
        banned_X = _banned_ids(request, prefill.logits)
        chain = build_logits_processors(options, request.end_ids, prompt_length, banned_X, prefill.source_ids)
        return chain + request.config.processors(prompt_length, self.limits[number], num_prompt=num_prompt)


class PromptReader:
    """Reads one prompt chunk by chunk between the steps of a running batch, or a short one together with others.

    Args:
        module: the model in evaluation mode.
        request: one prompt with its options.
        prefixes: shared beginnings of prompts, as for `prefill_chunks`.
    """

    def __init__(self, module: Transformer, request: GenerateRequest, prefixes: Prefixes | None = None) -> None:
        limits = check_limits(module, request)
        self._starter = RequestStarter(module, request, limits, with_text=request.decode is not None)
        self._request, self._prefixes = request, prefixes
        self._chunks = prefill_chunks(
            module,
            request.prompts[0],
            None if request.sources is None else request.sources[0],
            pad_id=request.pad_id,
            limit=self._starter.num_read_later(0),
            prefixes=prefixes,
        )
        self.num_shared: int = 0
        self._has_begun = False
        self.is_done: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and its source."""
        return sum(len(some[0]) for some in (self._request.prompts, self._request.sources) if some is not None)

    @property
    def kind(self) -> Hashable:
        """A value that is equal for readers that may read together. None means that this reader reads alone."""
        request, prompt = self._request, self._request.prompts[0]
        has_shared_start = self._prefixes is not None and self._prefixes.count(prompt) > 0
        if has_shared_start or len(prompt) > CHUNK_TOKENS:
            return None
        # All sentences of one search have the same options.
        options = (tuple(prompt), request.options, *_rules(request)) if self._is_search else ()
        return PromptReader, request.pad_id, options

    @property
    def _is_search(self) -> bool:
        """True if the sources of several readers start as one search, which takes less time per token."""
        return self._request.options.is_search and self._request.sources is not None

    def step(self, others: Sequence[PromptReader] = ()) -> list[PrefilledMember] | None:
        """Read the next chunk, together with other readers of the same kind.

        Returns:
            The started members of all readers after the last chunk, None before.
        """
        if others:
            return self._step_with(others)
        if self._prefixes is not None and self._request.sources is None and not self._has_begun:
            self.num_shared = self._prefixes.count(self._request.prompts[0])
        self._has_begun = True
        prefill = next(self._chunks)
        return None if prefill is None else [self._start(prefill)]

    def _step_with(self, others: Sequence[PromptReader]) -> list[PrefilledMember]:
        readers = [self, *others]
        together, numbers = self._merge_readers(readers), range(len(readers))
        prefill = together.prefill(numbers)
        if self._is_search:
            for reader in readers:
                reader.is_done = True
            return [together.start_prefilled(numbers, prefill)]
        if prefill.cache.states or not prefill.cache.self_attention:
            # The state that custom modules keep for a batch cannot be split into rows.
            return [start for reader in readers for start in reader.step() or ()]
        starts = []
        for reader, alone in zip(readers, prefill.split_prompts(), strict=True):
            if reader._prefixes is not None:
                reader._prefixes.keep(reader._request.prompts[0], alone.cache)
            starts.append(reader._start(alone))
        return starts

    def _merge_readers(self, readers: Sequence[PromptReader]) -> RequestStarter:
        """Return one starter for the prompts of all readers."""
        requests = [reader._request for reader in readers]
        sources = [request.sources[0] for request in requests if request.sources is not None]
        prompts = [request.prompts[0] for request in requests]
        return replace(
            self._starter,
            request=replace(self._request, prompts=prompts, sources=sources or None),
            limits=[reader._starter.limits[0] for reader in readers],
        )

    def _start(self, prefill: Prefill) -> PrefilledMember:
        self.is_done = True
        return self._starter.start_prefilled([0], prefill)


def _sampling_kind(request: GenerateRequest, options: GenerateOptions) -> Hashable:
    """Return a value that is equal for requests whose sequences choose their tokens in the same way."""
    options = replace(options, seed=None, max_new_tokens=1, must_fit=False, num_return_sequences=1, stop=())
    return replace(options, batch_size=None), *_rules(request), request.constraint is None


def _rules(request: GenerateRequest) -> tuple[object, ...]:
    """Return the values of a request that, besides its options, decide which tokens may be generated."""
    return request.end_ids, frozenset(request.banned), request.config


def _banned_ids(request: GenerateRequest, logits: Tensor) -> Int[Tensor, " banned"]:
    """Return the banned ids, except end tokens and ids beyond the logits."""
    ids = sorted(index for index in set(request.banned) - {*request.end_ids} if index < logits.shape[1])
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)
