"""From prompts in ids to what a model says next: batches, the loop over tokens, and where each sequence ends.

A result does not depend on which prompts share a batch, up to the last bits of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.core import Transformer
from clearhead.errors import InputError, RunFailure
from clearhead.generate.batching import batches_by_cost, check_lengths, device_of, evaluation_mode
from clearhead.generate.generation_config import GenerationConfig
from clearhead.generate.options import GenerateOptions, SearchOptions
from clearhead.generate.prefill import check_model, read_prompts, token_limits
from clearhead.generate.processors import build_logits_processors, build_logits_warpers
from clearhead.generate.results import Candidate, Continuation, StopReason, length_normalised
from clearhead.generate.search.beam import continue_beams
from clearhead.generate.search.contrastive import ContrastiveSearch
from clearhead.generate.search.sampling import RandomStreams, Sampling, TokenChooser, sequence_seed
from clearhead.generate.streaming_decoder import Decode, StreamingDecoder

# Most tokens, prompts and limits together, that the cache of one batch holds.
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class GenerateRequest:
    """What to generate.

    Args:
        prompts: what the decoder reads, the start token included; none empty.
        options: how to continue them.
        eos_id: id that ends a sequence.
        pad_id: padding id.
        banned: ids that are never generated.
        sources: what the encoder of a two-stack model reads, one for each prompt; None for a decoder alone.
        decode: ids to text; needed for stop texts and for streaming.
        contexts: for each prompt, the ids that the text continues, on which the space in front of it can depend;
            None: the prompts.
        config: what the files of a checkpoint say besides; its end tokens end a sequence as `eos_id` does.
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

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, the first of them the one that search forces."""
        return (self.eos_id, *(index for index in self.config.eos_ids if index != self.eos_id))

    def context(self, prompt: int) -> Sequence[int]:
        """Return the ids that the text behind a prompt continues."""
        return self.prompts[prompt] if self.contexts is None else self.contexts[prompt]


def generate_ids(
    module: Transformer, request: GenerateRequest, *, on_token: Callable[[int, int, int], None] | None = None
) -> list[list[Continuation]]:
    """Continue each prompt, in the order given.

    Args:
        module: a decoder alone, or both stacks; run in evaluation mode, its own mode is restored.
        request: prompts and options.
        on_token: called with the number of the prompt, of the sequence at that prompt, and the id, as soon as each id
            is known; not in beam search, where nothing is known before the end.

    Returns:
        For each prompt `num_return_sequences` continuations; those of beam search best first, and fewer only where
        fewer exist.

    Raises:
        InputError: a model that cannot generate, or a prompt or source that it cannot read.
        RunFailure: the model's output is not a number, or the options ban every token.
    """
    limits = _checked_limits(module, request)
    results: list[list[Continuation]] = [[] for _ in request.prompts]
    with evaluation_mode(module):
        for batch in _batches(request, limits):
            if request.options.method == "beam":
                for prompt, found in zip(batch, _beams(module, request, batch, limits), strict=True):
                    results[prompt] = [_of_candidate(candidate) for candidate in found]
                continue
            rows = _rows(request, batch, limits, with_text=bool(request.options.stops))
            for step in _steps(module, request, batch, rows):
                if on_token is not None:
                    for row, _ in step:
                        on_token(row.prompt, row.number, row.ids[-1])
            for row in rows:
                results[row.prompt].append(row.continuation())
    return results


def stream_ids(module: Transformer, request: GenerateRequest) -> Generator[str, None, Continuation]:
    """Continue one prompt and yield its text as it becomes certain; the pieces together are the text.

    Args:
        module: as for `generate_ids`; it is in evaluation mode until the generator is exhausted or closed.
        request: one prompt, and how ids are decoded.

    Returns:
        The continuation, as the value of the generator.

    Raises:
        InputError: as for `generate_ids`; or beam search, or several sequences, which are no single growing text.
    """
    if request.options.method == "beam":
        raise InputError("a stream is text as it comes, but with beam_size above 1 no text is certain before the end")
    if len(request.prompts) != 1 or request.options.num_return_sequences != 1:
        raise InputError("a stream is one growing text: give one prompt and leave num_return_sequences at 1")
    return _stream(module, request, _checked_limits(module, request))


def _stream(module: Transformer, request: GenerateRequest, limits: list[int]) -> Generator[str, None, Continuation]:
    """Yield the text of one prompt; what is asked for has been checked when the generator was made."""
    with evaluation_mode(module):
        (row,) = rows = _rows(request, [0], limits, with_text=True)
        for step in _steps(module, request, [0], rows):
            yield from (piece for _, piece in step if piece)
    return row.continuation()


@dataclass
class _Row:
    """One sequence on its way."""

    prompt: int
    number: int
    limit: int
    end_ids: tuple[int, ...]
    growing: StreamingDecoder | None
    ids: list[int] = field(default_factory=list)
    log_probability: float = 0.0
    pieces: list[str] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def take(self, token: int, log_probability: float) -> str:
        """Add a token; return the text that it makes certain."""
        self.ids.append(token)
        self.log_probability += log_probability
        if token in self.end_ids:
            self.stop_reason = "end"
        elif len(self.ids) == self.limit:
            self.stop_reason = "length"
        if self.growing is None:
            return ""
        piece = "" if token in self.end_ids else self.growing.add(token)
        if self.stop_reason is not None:
            piece += self.growing.finish()
        if self.growing.is_stopped:
            self.stop_reason = "stop"
        self.pieces.append(piece)
        return piece

    def continuation(self) -> Continuation:
        """Return the finished sequence."""
        assert self.stop_reason is not None
        score = length_normalised(self.log_probability, len(self.ids), 1.0)
        text = None if self.growing is None else "".join(self.pieces)
        return Continuation(tuple(self.ids), score, self.log_probability, self.stop_reason, text)


def _checked_limits(module: Transformer, request: GenerateRequest) -> list[int]:
    """Return how many tokens may follow each prompt, after a look at everything that is asked for."""
    check_model(module, with_sources=request.sources is not None)
    assert request.decode is not None or not request.options.stops, "stop texts need a way to decode"
    limits = token_limits(module, request.prompts, request.options, most=request.config.max_length)
    if request.sources is not None:
        assert len(request.sources) == len(request.prompts)
        check_lengths(request.sources, module.max_positions, what="source")
    return limits


def _batches(request: GenerateRequest, limits: list[int]) -> Iterator[list[int]]:
    """Yield the numbers of prompts that run together."""
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
        # What is forced at the end comes at one length, so those that run together end together.
        for limit in sorted({limits[prompt] for prompt in batch}):
            yield [prompt for prompt in batch if limits[prompt] == limit]


def _rows(request: GenerateRequest, batch: list[int], limits: list[int], *, with_text: bool) -> list[_Row]:
    """Return the sequences of a batch, those of a prompt side by side."""
    rows = []
    for prompt in batch:
        for number in range(request.options.num_return_sequences):
            growing = None
            if with_text:
                assert request.decode is not None
                growing = StreamingDecoder(request.decode, request.options.stops, request.context(prompt))
            rows.append(_Row(prompt, number, limits[prompt], request.end_ids, growing))
    return rows


def _steps(
    module: Transformer, request: GenerateRequest, batch: list[int], rows: list[_Row]
) -> Iterator[list[tuple[_Row, str]]]:
    """Generate a token for every row that is not finished, again and again; yield the rows and their new text."""
    # Between two steps the caller's code runs, and it must not run in inference mode.
    with torch.inference_mode():
        method = _begin(module, request, batch, rows)
    while rows:
        with torch.inference_mode():
            tokens, log_probs = method.step()
        _check(log_probs, len(rows[0].ids) + 1)
        found = zip(rows, tokens, log_probs, strict=True)
        yield [(row, row.take(token, log_prob)) for row, token, log_prob in found]
        kept = [place for place, row in enumerate(rows) if row.stop_reason is None]
        if 0 < len(kept) < len(rows):
            with torch.inference_mode():
                method.keep(torch.tensor(kept, device=device_of(module)))
        rows = [rows[place] for place in kept]


def _begin(
    module: Transformer, request: GenerateRequest, batch: list[int], rows: list[_Row]
) -> Sampling | ContrastiveSearch:
    """Read the prompts of a batch and prepare the method for its rows."""
    options = request.options
    limits = {row.prompt: row.limit for row in rows}
    start = read_prompts(
        module, *_of_batch(request, batch), pad_id=request.pad_id, limits=[limits[prompt] for prompt in batch]
    )
    start = start.repeated(options.num_return_sequences)
    chain = build_logits_processors(
        options, request.end_ids, start.ids.shape[1], _banned(request, start.logits), start.read
    )
    chain += request.config.processors(start.ids.shape[1], rows[0].limit)
    if options.method == "contrastive":
        return ContrastiveSearch(module, start, chain, count=options.top_k, alpha=options.penalty_alpha)
    if options.method == "greedy":
        return Sampling(module, start, TokenChooser(chain, None))
    sources = request.sources or [()] * len(request.prompts)
    seeds = [
        sequence_seed(options.seed, row.number, [*request.prompts[row.prompt], *sources[row.prompt]]) for row in rows
    ]
    return Sampling(
        module, start, TokenChooser([*chain, *build_logits_warpers(options)], RandomStreams(seeds, start.ids.device))
    )


def _beams(module: Transformer, request: GenerateRequest, batch: list[int], limits: list[int]) -> list[list[Candidate]]:
    """Search with beams behind the prompts of a batch."""
    options = request.options
    with torch.inference_mode():
        start = read_prompts(
            module, *_of_batch(request, batch), pad_id=request.pad_id, limits=[limits[prompt] for prompt in batch]
        )
        return continue_beams(
            module,
            start,
            limits=[limits[prompt] for prompt in batch],
            end_ids=request.end_ids,
            banned_X=_banned(request, start.logits),
            chain=request.config.processors(start.ids.shape[1], limits[batch[0]]),
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
        )


def _of_batch(request: GenerateRequest, batch: list[int]) -> tuple[list[Sequence[int]], list[Sequence[int]] | None]:
    """Return the prompts and the sources of a batch."""
    sources = request.sources
    return [request.prompts[i] for i in batch], None if sources is None else [sources[i] for i in batch]


def _banned(request: GenerateRequest, logits: Tensor) -> Int[Tensor, " banned"]:
    """Return the banned ids that the model has outputs for, the end token never among them."""
    ids = sorted(index for index in set(request.banned) - {*request.end_ids} if index < logits.shape[1])
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _check(log_probs: list[float], number: int) -> None:
    """Refuse tokens that no model can have meant."""
    if any(math.isnan(value) for value in log_probs):
        raise RunFailure(f"the model's output at generated token {number} is not a number.")
    if any(value == -math.inf for value in log_probs):
        raise RunFailure(
            f"no token may follow at generated token {number}: the options ban every token of the vocabulary, "
            "or the model's output is infinite."
        )


def _of_candidate(candidate: Candidate) -> Continuation:
    """Return a result of beam search in the form of every method."""
    stop_reason: StopReason = "length" if candidate.cut_off else "end"
    return Continuation(candidate.ids, candidate.score, candidate.log_probability, stop_reason)
