"""Generation from prompts in ids: batches, the loop over tokens, and the end of each sequence.

Results do not depend on which prompts share a batch: to the last bit where
`Runner.is_batch_invariant`, elsewhere up to rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead import progress
from clearhead.core import Transformer
from clearhead.errors import InputError, RunFailure, argument
from clearhead.fast.replica import in_evaluation
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import Prefill, check_model, prefill_prompts, token_limits
from clearhead.generate.processors import build_logits_processors
from clearhead.generate.results import Candidate, Continuation, StopReason, length_normalised
from clearhead.generate.search.beam import continue_beams
from clearhead.generate.search.contrastive import ContrastiveSearch
from clearhead.generate.search.recorder import BeamRecorder
from clearhead.generate.search.sampling import RandomStreams, Sampling, TokenChooser, sequence_seed
from clearhead.generate.streaming_decoder import Decode, StreamingDecoder

# Most tokens in the KV cache of one batch, prompts and limits together.
BATCH_TOKENS = 8192
LONG_PROMPT: Final = 2**13
"""Tokens from which on reading a prompt can take long: the time grows with their square."""
_LOGGER: Final = logging.getLogger("clearhead.generate")


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate.

    Args:
        prompts: ids of the decoder with the start token; none empty.
        options: of generation.
        eos_id: id that ends a sequence.
        pad_id: padding id.
        banned: ids that are never generated.
        sources: ids of the encoder, one sequence for each prompt; None for a decoder-only model.
        decode: ids to text; needed for stop texts and for streaming.
        contexts: for each prompt the ids that the text continues, on which a leading space can depend; None: the
            prompts.
        config: of the checkpoint; its end tokens end a sequence as `eos_id` does.
        recorder: notes what beam search considers for a single prompt; None: nothing is noted.
    """

    prompts: Sequence[Sequence[int]]
    options: GenerateOptions
    eos_id: int
    pad_id: int
    banned: Sequence[int] = ()
    sources: Sequence[Sequence[int]] | None = None
    decode: Decode | None = None
    contexts: Sequence[Sequence[int]] | None = None
    config: GenerationConfig = field(default_factory=GenerationConfig)
    recorder: BeamRecorder | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All ids that end a sequence; search forces the first of them."""
        return (self.eos_id, *(index for index in self.config.eos_ids if index != self.eos_id))

    def context(self, prompt: int) -> Sequence[int]:
        """Return the ids that the text after a prompt continues."""
        return self.prompts[prompt] if self.contexts is None else self.contexts[prompt]


def generate_ids(module: Transformer, request: GenerateRequest) -> list[list[Continuation]]:
    """Continue each prompt, in the order given.

    Args:
        module: a decoder-only or encoder-decoder model; one in training runs as a replica in evaluation mode.
        request: prompts and options.

    Returns:
        For each prompt `num_return_sequences` continuations; those of beam search best first, and fewer only where
        fewer exist.

    Raises:
        InputError: a model that cannot generate, or a prompt or source that it cannot read.
        RunFailure: the model's output is not a number, or the options ban every token.
    """
    limits = _checked_limits(module, request)
    module = in_evaluation(module)
    results: list[list[Continuation]] = [[] for _ in request.prompts]
    for batch in _batches(request, limits):
        if request.options.method == "beam":
            for prompt, candidates in zip(batch, _search_beams(module, request, batch, limits), strict=True):
                results[prompt] = [_of_candidate(candidate) for candidate in candidates]
            continue
        rows = _rows(request, batch, limits, with_text=bool(request.options.stops))
        for step in _steps(module, request, batch, limits, rows):
            progress.update(len(step[0][0].ids), max(row.limit for row in rows), "tokens")
        for row in rows:
            results[row.prompt].append(row.continuation())
    return results


def stream_ids(module: Transformer, request: GenerateRequest) -> Generator[str, None, Continuation]:
    """Continue one prompt and yield the parts of its text as soon as they are final.

    Args:
        module: as for `generate_ids`.
        request: one prompt, and how ids are decoded.

    Returns:
        The continuation, as the value of the generator.

    Raises:
        InputError: as for `generate_ids`; or beam search or several sequences, which cannot be streamed.
    """
    if request.options.method == "beam":
        raise InputError("a stream needs " + argument("beam_size") + " 1: with more no text is final before the end")
    if len(request.prompts) != 1 or request.options.num_return_sequences != 1:
        raise InputError("a stream is one text: give a prompt and leave " + argument("num_return_sequences") + " at 1")
    return _stream(in_evaluation(module), request, _checked_limits(module, request))


def _stream(module: Transformer, request: GenerateRequest, limits: list[int]) -> Generator[str, None, Continuation]:
    """Yield the text of one prompt; the request is already checked."""
    (row,) = rows = _rows(request, [0], limits, with_text=True)
    for step in _steps(module, request, [0], limits, rows):
        yield from (piece for _, piece in step if piece)
    return row.continuation()


@dataclass
class _Row:
    """One unfinished sequence."""

    prompt: int
    number: int
    limit: int
    end_ids: tuple[int, ...]
    decoder: StreamingDecoder | None
    ids: list[int] = field(default_factory=list)
    log_probability: float = 0.0
    pieces: list[str] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def take(self, token: int, log_probability: float) -> str:
        """Add a token; return the text that it makes final."""
        self.ids.append(token)
        self.log_probability += log_probability
        if token in self.end_ids:
            self.stop_reason = "end"
        elif len(self.ids) == self.limit:
            self.stop_reason = "length"
        if self.decoder is None:
            return ""
        piece = "" if token in self.end_ids else self.decoder.add(token)
        if self.stop_reason is not None:
            piece += self.decoder.finish()
        if self.decoder.is_stopped:
            self.stop_reason = "stop"
        self.pieces.append(piece)
        return piece

    def continuation(self) -> Continuation:
        """Return the finished sequence."""
        assert self.stop_reason is not None
        score = length_normalised(self.log_probability, len(self.ids), 1.0)
        text = None if self.decoder is None else "".join(self.pieces)
        return Continuation(tuple(self.ids), score, self.log_probability, self.stop_reason, text)


def _checked_limits(module: Transformer, request: GenerateRequest) -> list[int]:
    """Check a request; return how many tokens may follow each prompt."""
    check_model(module, with_sources=request.sources is not None)
    assert request.decode is not None or not request.options.stops, "stop texts need a way to decode"
    limits = token_limits(module, request.prompts, request.options, most=request.config.max_length)
    if request.sources is not None:
        assert len(request.sources) == len(request.prompts)
        check_lengths(request.sources, module.max_positions, what="source")
    longest = max(map(len, [*request.prompts, *(request.sources or ())]), default=0)
    if longest >= LONG_PROMPT:
        _LOGGER.info("reading %s tokens at once, which takes the longer the more there are", f"{longest:,}")
    return limits


def _batches(request: GenerateRequest, limits: list[int]) -> Iterator[list[int]]:
    """Yield the prompts of each batch."""
    options = request.options
    rows = options.beam_size * options.num_return_sequences if options.method != "beam" else options.beam_size
    if options.method == "contrastive":
        rows *= options.top_k
    costs = [rows * (len(prompt) + limit) for prompt, limit in zip(request.prompts, limits, strict=True)]
    if request.sources is not None:
        costs = [cost + rows * len(source) for cost, source in zip(costs, request.sources, strict=True)]
    for batch in batches_by_cost(costs, budget=BATCH_TOKENS, most_rows=options.batch_size):
        if request.config.forced_eos_id is None:
            yield batch
            continue
        # The forced end token depends on the length, so all prompts of a batch have the same limit.
        for limit in sorted({limits[prompt] for prompt in batch}):
            yield [prompt for prompt in batch if limits[prompt] == limit]


def _rows(request: GenerateRequest, batch: list[int], limits: list[int], *, with_text: bool) -> list[_Row]:
    """Return the sequences of a batch, those of a prompt side by side."""
    rows = []
    for prompt in batch:
        for number in range(request.options.num_return_sequences):
            decoder = None
            if with_text:
                assert request.decode is not None
                decoder = StreamingDecoder(request.decode, request.options.stops, request.context(prompt))
            rows.append(_Row(prompt, number, limits[prompt], request.end_ids, decoder))
    return rows


def _steps(
    module: Transformer, request: GenerateRequest, batch: list[int], limits: list[int], rows: list[_Row]
) -> Iterator[list[tuple[_Row, str]]]:
    """Generate one token at a time for the unfinished rows; yield the rows and their new text."""
    # The caller's code runs between two steps, and must not run in inference mode.
    with torch.inference_mode():
        method = _start_method(module, request, batch, limits, rows)
    while rows:
        with torch.inference_mode():
            tokens, log_probs = method.step()
        _check(log_probs, len(rows[0].ids) + 1)
        steps = zip(rows, tokens, log_probs, strict=True)
        yield [(row, row.take(token, log_prob)) for row, token, log_prob in steps]
        kept = [index for index, row in enumerate(rows) if row.stop_reason is None]
        if 0 < len(kept) < len(rows):
            with torch.inference_mode():
                method.keep(torch.tensor(kept, device=device_of(module)))
        rows = [rows[index] for index in kept]


def _prefill(module: Transformer, request: GenerateRequest, batch: list[int], limits: list[int]) -> Prefill:
    """Read the prompts of a batch."""
    return prefill_prompts(
        module,
        [request.prompts[i] for i in batch],
        None if request.sources is None else [request.sources[i] for i in batch],
        pad_id=request.pad_id,
        limits=[limits[i] for i in batch],
    )


def _start_method(
    module: Transformer, request: GenerateRequest, batch: list[int], limits: list[int], rows: list[_Row]
) -> Sampling | ContrastiveSearch:
    """Read the prompts of a batch and prepare the method for its rows."""
    options = request.options
    prefill = _prefill(module, request, batch, limits).repeat(options.num_return_sequences)
    prompt_length, banned_X = prefill.ids.shape[1], _banned(request, prefill.logits)
    chain = build_logits_processors(options, request.end_ids, prompt_length, banned_X, prefill.source_ids)
    chain += request.config.processors(prompt_length, rows[0].limit)
    if options.method == "contrastive":
        return ContrastiveSearch(module, prefill, chain, count=options.top_k, alpha=options.penalty_alpha)
    if options.method == "greedy":
        return Sampling(module, prefill, TokenChooser(chain, None))
    sources = request.sources or [()] * len(request.prompts)
    seeds = [
        sequence_seed(options.seed, row.number, [*request.prompts[row.prompt], *sources[row.prompt]]) for row in rows
    ]
    streams = RandomStreams(seeds, prefill.ids.device)
    return Sampling(module, prefill, TokenChooser(chain, streams, options))


def _search_beams(
    module: Transformer, request: GenerateRequest, batch: list[int], limits: list[int]
) -> list[list[Candidate]]:
    """Continue the prompts of a batch by beam search."""
    options = request.options
    with torch.inference_mode():
        prefill = _prefill(module, request, batch, limits)
        return continue_beams(
            module,
            prefill,
            limits=[limits[prompt] for prompt in batch],
            end_ids=request.end_ids,
            banned_X=_banned(request, prefill.logits),
            chain=request.config.processors(prefill.ids.shape[1], limits[batch[0]]),
            options=SearchOptions(
                beam_size=options.beam_size,
                length_penalty=float(options.length_penalty),
                n_best=options.num_return_sequences,
                early_stopping=request.config.early_stopping,
                repetition_penalty=options.repetition_penalty,
                no_repeat_ngram_size=options.no_repeat_ngram_size,
                encoder_no_repeat_ngram_size=options.encoder_no_repeat_ngram_size,
                # Search counts the end token.
                min_length=options.min_new_tokens + 1 if options.min_new_tokens else 0,
            ),
            recorder=request.recorder,
        )


def _banned(request: GenerateRequest, logits: Tensor) -> Int[Tensor, " banned"]:
    """Return the banned ids that the model has outputs for, the end token never among them."""
    ids = sorted(index for index in set(request.banned) - {*request.end_ids} if index < logits.shape[1])
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _check(log_probs: list[float], number: int) -> None:
    """Refuse NaN and infinite outputs."""
    if any(math.isnan(value) for value in log_probs):
        raise RunFailure(f"the model's output at generated token {number} is not a number.")
    if any(value == -math.inf for value in log_probs):
        raise RunFailure(
            f"no token may follow at generated token {number}: the options ban every token of the vocabulary, "
            "or the model's output is infinite."
        )


def _of_candidate(candidate: Candidate) -> Continuation:
    """Return a result of beam search as a continuation."""
    stop_reason: StopReason = "length" if candidate.cut_off else "end"
    return Continuation(candidate.ids, candidate.score, candidate.log_probability, stop_reason)
