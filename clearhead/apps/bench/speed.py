"""Speed of a model at its task (prompts, tokens, sentences), and advice on how to make it faster.

Texts are random tokens and never end before their limit, so that results do not depend on the texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import geometric_mean
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.apps.bench.limits import Limits, Precision, seconds
from clearhead.base.progress import message
from clearhead.core.head import Linear
from clearhead.fast.memory import cache_bytes, cache_dtype
from clearhead.generate.batching import device_of
from clearhead.generate.continuation import GenerateRequest, generate_ids, stream_ids
from clearhead.generate.options import GenerateOptions
from clearhead.model.facade import Model
from clearhead.spec.cost import forward_flops
from clearhead.spec.tasks.registry import find_task
from clearhead.spec.token_counts import TokenCounts

SECONDS: Final = 15.0
"""Seconds for all measurements of a model in all precisions."""
CONTEXTS: Final = (32, 500, 2000, 8000)
"""Lengths of the prompt in tokens; batches use the first one."""
SENTENCE: Final = 25
"""Number of tokens of a sentence to translate or encode."""

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """Settings of a benchmark: prompt lengths, generated tokens, batch size and repetitions.

    Args:
        new_tokens: the number of tokens generated after a prompt.
        repeats: the maximum number of repetitions of a measurement, after a first run that does not count; the median
            counts.
        seconds: the seconds after which no measurement is repeated. A prompt that alone would take longer is left out.
        batch: the size of the measured batches of several texts; single texts are measured, too.
        contexts: the lengths of the prompt in tokens.
        seed: the seed of the random texts.
    """

    new_tokens: int = 32
    repeats: int = 5
    seconds: float = 5.0
    batch: int = 16
    contexts: tuple[int, ...] = CONTEXTS
    seed: int = 0


@dataclass(frozen=True)
class Speed:
    """Measured speed of a model at one kind of work, such as decoding, in tokens or sentences per second.

    Attributes:
        work: the measured work, such as "decode".
        precision: the precision of the weights.
        batch: the batch size.
        context: the number of tokens of each text before decoding began, or of the text that was read.
        unit: the unit, "tokens" or "sentences".
        per_second: the number of units per second, the median of the repetitions.
        limit: the number of units per second that the machine's limits allow.
        p50, p95: the median and the 95th percentile of the seconds per token. None means not measured.
    """

    work: str
    precision: str
    batch: int
    context: int
    unit: str
    per_second: float
    limit: float
    p50: float | None = None
    p95: float | None = None

    @property
    def share(self) -> float:
        """Speed as a fraction of the machine's limit."""
        return self.per_second / self.limit


def measure(model: Model, precision: Precision, limits: Limits, effort: Effort) -> Iterator[Speed]:
    """Measure a model and yield its speeds at encoding, decoding or translation, depending on its stacks.

    Args:
        model: the model, loaded in this precision.
        precision: the precision of its weights.
        limits: the limits of its device.
        effort: the settings of the measurements, such as prompt lengths and repetitions.

    Raises:
        InputError: the model cannot do its work, such as a multilingual model without languages.
    """
    bench = _Bench(model, precision, limits, effort)
    if model.module.decoder is None:
        yield from bench.encoding()
    elif model.module.encoder is None:
        yield from bench.decoding()
    else:
        yield from bench.translation()


class _Bench:
    """Speed measurements of one model in one precision."""

    def __init__(self, model: Model, precision: Precision, limits: Limits, effort: Effort) -> None:
        self.model, self.precision, self.limits, self.effort = model, precision, limits, effort
        self.device, self.chance = device_of(model.module), np.random.default_rng(effort.seed)
        self.seconds_each = effort.seconds

    def decoding(self) -> Iterator[Speed]:
        """Yield the speeds of prefill and decoding for one text at each length that fits, and of decoding a batch."""
        effort, fitting = self.effort, [*_fitting_contexts(self.model, self.effort)]
        self.seconds_each = effort.seconds / (len(fitting) + 1)
        times_limit = 0.0
        for number, (context, new) in enumerate(fitting):
            least = context / self._product_limit(context)
            # Expect the same ratio to the limit as for the context before it.
            if times_limit * least > effort.seconds:
                left_out = ", ".join(f"{length:,}" for length, _ in fitting[number:])
                message(f"contexts of {left_out} are left out: {context:,} tokens take {times_limit * least:.0f} s")
                return
            runs = self._repeat(lambda: self._stream(context, new))  # noqa: B023
            tokens = [later - earlier for run in runs for earlier, later in pairwise(run[1:])]
            first = statistics.median(run[1] - run[0] for run in runs)
            times_limit = first / least
            yield self._speed("prompt", 1, context, context / first, self._product_limit(context))
            middle = statistics.median(tokens)
            yield replace(
                self._speed("decode", 1, context, 1 / middle, self._read_limit(1, context)),
                p50=middle,
                p95=float(np.percentile(tokens, 95)),
            )
            if number == 0:
                rate, limit = self._batch_rate(context, new), self._read_limit(effort.batch, context)
                yield self._speed("decode", effort.batch, context, rate, limit)

    def translation(self) -> Iterator[Speed]:
        """Yield the tokens per second of translations, greedy and by beam search, of one sentence and of a batch."""
        self.seconds_each = self.effort.seconds / 4
        for beam_size in (1, 5):
            for batch in (1, self.effort.batch):
                texts = self._texts(batch)

                def run(texts: Sequence[str] = texts, beam_size: int = beam_size) -> float:
                    began = time.perf_counter()
                    translations = self.model.translate_n_best(
                        list(texts), n=1, beam_size=beam_size, max_length=SENTENCE
                    )
                    return sum(len(best.tokens) for (best, *_) in translations) / (time.perf_counter() - began)

                work = "translate, greedy" if beam_size == 1 else f"translate, beam {beam_size}"
                yield self._speed(work, batch, SENTENCE, self._median(run), self._read_limit(batch, SENTENCE))

    def encoding(self) -> Iterator[Speed]:
        """Yield the sentences per second of an encoder at its task."""
        self.seconds_each = self.effort.seconds / 2
        for batch in (1, self.effort.batch):
            texts = self._texts(batch)
            rate = self._median(lambda: batch / seconds(lambda: self._use(texts), self.device))  # noqa: B023
            limit = self._product_limit(SENTENCE) / SENTENCE
            yield replace(self._speed("encode", batch, SENTENCE, rate, limit), unit="sentences")

    def _speed(self, work: str, batch: int, context: int, per_second: float, limit: float) -> Speed:
        return Speed(work, self.precision, batch, context, "tokens", per_second, limit)

    def _median(self, run: Callable[[], float]) -> float:
        return statistics.median(self._repeat(run))

    def _repeat(self, run: Callable[[], T]) -> list[T]:
        """Repeat a measurement and return the results; the first one (warm-up) is dropped unless it is the only one."""
        began, results = time.perf_counter(), [run()]
        while len(results) <= self.effort.repeats and time.perf_counter() - began < self.seconds_each:
            results.append(run())
        return results[1:] or results

    def _stream(self, context: int, new: int) -> list[float]:
        """Generate tokens and return the clock times of the start and of each token.

        Each id is decoded to one letter, so that the stream holds back no text.
        """
        times = [time.perf_counter()]
        for _ in stream_ids(self.model.tree, self._request(1, context, new)):
            times.append(time.perf_counter())
        return times

    def _batch_rate(self, context: int, new: int) -> float:
        """Return the tokens per second of decoding a batch, without its prefill."""
        batch = self.effort.batch

        def run() -> float:
            first_only, every_token = (self._request(batch, context, count) for count in (1, new))
            begin = seconds(lambda: generate_ids(self.model.tree, first_only), self.device)
            whole = seconds(lambda: generate_ids(self.model.tree, every_token), self.device)
            return batch * (new - 1) / max(whole - begin, 1e-9)

        return self._median(run)

    def _request(self, batch: int, context: int, new_tokens: int) -> GenerateRequest:
        tokenizer = self.model.tokenizer
        options = GenerateOptions(max_new_tokens=new_tokens, min_new_tokens=new_tokens, temperature=0, batch_size=batch)
        return GenerateRequest(
            [self._ids(context) for _ in range(batch)],
            options,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            decode=lambda ids: "x" * len(ids),
        )

    def _ids(self, count: int) -> list[int]:
        size = min(self.model.tokenizer.vocab_size, self.model.module.num_source_ids)
        return [int(index) for index in self.chance.integers(0, size, size=count)]

    def _texts(self, count: int) -> list[str]:
        """Return random texts of about `SENTENCE` tokens."""
        return [self.model.tokenizers.source.decode(self._ids(SENTENCE)) or "a" for _ in range(count)]

    def _use(self, texts: list[str]) -> object:
        """Compute the predictions of an encoder for texts, or only its forward pass if its task predicts none."""
        if find_task(self.model.task.kind).outputs in ("labels", "token_labels", "vector"):
            return self.model.predict(texts)
        tokenizer = self.model.tokenizer
        rows = [ids[:SENTENCE] for ids in tokenizer.encode_batch(texts)]
        width = max(1, *map(len, rows))
        ids = torch.tensor([row + [tokenizer.pad_id] * (width - len(row)) for row in rows], device=self.device)
        mask = torch.tensor(
            [[position < max(1, len(row)) for position in range(width)] for row in rows], device=self.device
        )
        with torch.inference_mode():
            return self.model.tree(ids, mask=mask)

    def _product_limit(self, length: int) -> float:
        """Return the prompt tokens per second that the FLOP/s limit allows; a decoder has one output per prompt."""
        is_decoder = self.model.module.encoder is None
        counts = TokenCounts(
            first_tokens=length,
            first_pairs=length * (length + 1) // 2 if is_decoder else length**2,
            outputs=1 if is_decoder else length,
            sequences=1,
        )
        return length * self.limits.flops[self.precision] / forward_flops(self.model.spec, counts)

    def _read_limit(self, batch: int, context: int) -> float:
        """Return the tokens per second that memory bandwidth allows, if a step reads weights and KV cache once."""
        cache = batch * context * sum(cache_bytes(self.model.spec, cache_dtype(self.model.tree)))
        return batch * self.limits.bytes_per_second / (weights_of_a_step(self.model) + cache)


def weights_of_a_step(model: Model) -> int:
    """Return the bytes of weights that a decoding step reads: the decoder without its embedding table, and the head."""
    module = model.module
    assert module.decoder is not None, "decoding needs a model with a decoder"
    parts = [module.decoder] if module.head is None else [module.decoder, module.head]
    weights: set[Tensor] = {weight for submodule in parts for weight in _tensors(submodule)}
    weights -= set(_tensors(module.decoder.embedding))
    if module.head is not None:
        # A tied matrix belongs to the embedding, and the head reads all of it.
        linear = next(layer for layer in reversed(module.head.layers) if isinstance(layer, Linear))
        holder = linear.tied.module if linear.weight is None else linear
        weights.update(_tensors(holder))
    return sum(weight.nbytes for weight in weights)


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module; 8-bit weights are buffers."""
    return [*module.parameters(), *module.buffers()]


def _fitting_contexts(model: Model, effort: Effort) -> Iterator[tuple[int, int]]:
    """Yield (prompt length, new tokens) for each length that the model can read; if none, for a shorter prompt."""
    most = min((limit for limit in (model.module.max_positions, model.task.max_length) if limit is not None), default=0)
    fitting = [context for context in effort.contexts if not most or context + effort.new_tokens <= most]
    for context in fitting:
        yield context, effort.new_tokens
    if not fitting:
        yield most - most // 2, most // 2


# Minimum gain for advice, and the share of the limit below which a speed counts as far from it.
_GAIN = 1.15
_CLOSE = 0.6


def advice(speeds: Sequence[Speed], limits: Limits, *, default: str, processors: int) -> str:
    """Return advice for more speed: the fastest precision, if several were measured, and the best other change.

    Args:
        speeds: the measured speeds, at least one.
        limits: the limits of the device.
        default: the precision for comparison, if it was measured.
        processors: the number of processors that this process may use.
    """
    precisions = list(dict.fromkeys(speed.precision for speed in speeds))
    usual = default if default in precisions else precisions[0]
    sentences = [fastest_precision(speeds, usual)] if len(precisions) > 1 else []
    return "; ".join(
        [*sentences, _other_gain([speed for speed in speeds if speed.precision == usual], limits, processors)]
    )


def fastest_precision(speeds: Sequence[Speed], usual: str) -> str:
    """Return a message with the fastest precision for each kind of work, and its gain over the usual precision.

    Args:
        speeds: the speeds in several precisions.
        usual: the precision for comparison.
    """
    rates = {(speed.work, speed.batch, speed.context, speed.precision): speed.per_second for speed in speeds}
    gains: dict[str, dict[str, list[float]]] = {}
    for (work, batch, context, precision), rate in rates.items():
        # A long context may be measured in one precision only.
        if (base := rates.get((work, batch, context, usual))) is not None:
            gains.setdefault(work, {}).setdefault(precision, []).append(rate / base)
    winners: dict[str, list[str]] = {}
    for work, ratios in gains.items():
        means = {precision: geometric_mean(values) for precision, values in ratios.items()}
        best = max(means, key=lambda precision: means[precision])
        if means[best] < _GAIN:
            winners.setdefault(usual, []).append(work)
        else:
            winners.setdefault(best, []).append(f"{work} ({means[best]:.1f} times {usual})")
    if list(winners) == [usual]:
        return f"{usual} is the fastest precision here"
    if len(winners) == 1:
        (best,) = winners
        return f"--precision {best} is the fastest here at {_join_words(winners[best])}"
    listed = [f"{precision} at {_join_words(works)}" for precision, works in winners.items()]
    return f"the fastest precision here is {', and '.join(listed)}"


def _join_words(works: Sequence[str]) -> str:
    return ", ".join(works[:-1]) + (" and " if len(works) > 1 else "") + works[-1]


def _other_gain(speeds: Sequence[Speed], limits: Limits, processors: int) -> str:
    """Return advice for more speed in the same precision, such as more threads or larger batches."""
    single = [speed for speed in speeds if speed.batch == 1 and speed.work != "prompt"]
    usual = (single or speeds)[0]
    if limits.threads < processors:
        return f"{limits.threads} of {processors} processors are used: try --threads {processors}"
    same = [speed for speed in speeds if (speed.work, speed.context) == (usual.work, usual.context)]
    batch = max(same, key=lambda speed: speed.per_second)
    if batch.batch > 1 and batch.per_second > _GAIN * usual.per_second:
        gain = batch.per_second / usual.per_second
        return f"{batch.batch} texts at a time give {gain:.1f} times the {usual.unit} per second of one at a time"
    if usual.share < _CLOSE:
        return (
            f"{usual.work} reaches {usual.share:.0%} of the machine's limit: starting many small operations takes the "
            "rest, so a model with fewer and wider layers would be faster"
        )
    return "the speed is close to the machine's limit: only a smaller model, or weights of fewer bits, would be faster"
