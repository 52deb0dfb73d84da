"""Measured speeds of each kind of model, their limits, and the advice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from clearhead.apps.bench import limits as limits_module
from clearhead.apps.bench import speed as measured
from clearhead.apps.bench.limits import Limits, best_seconds, measure_limits
from clearhead.apps.bench.speed import Effort, Speed, advice, measure, weights_of_a_step
from clearhead.base.progress import use_display
from clearhead.core import build
from clearhead.model.facade import Model
from clearhead.spec import Model as Spec
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from tests.recording_display import RecordingDisplay
from tests.text.corpus import make_corpus

LIMITS = Limits(threads=1, bytes_per_second=1e9, flops={"fp32": 1e9})
EFFORT = Effort(new_tokens=4, repeats=2, seconds=1000.0, batch=3, contexts=(5, 17, 1000))
SMALL = Hyperparameters(layers=2, width=28, heads=4, feedforward=37)


def model_of(family: str, kind: str) -> Model:
    tokenizer = train_tokenizer("character", make_corpus(), vocab_size=97)
    size = tokenizer.vocab_size
    spec = build_spec(replace(SMALL, family=family), source_vocab=size, target_vocab=size)
    torch.manual_seed(3)
    return Model(
        build(spec).eval(), TokenizerPair(tokenizer, tokenizer, joint=True), TaskRecord(kind=kind, max_length=31)
    )


def measure_speeds(
    model: Model, effort: Effort = EFFORT, messages: Sequence[str] = ()
) -> dict[tuple[str, int, int], Speed]:
    with use_display(recorder := RecordingDisplay()):
        speeds = {
            (measurement.work, measurement.batch, measurement.context): measurement
            for measurement in measure(model, "fp32", LIMITS, effort)
        }
    assert len(recorder.messages) == len(messages) and all(map(re.fullmatch, messages, recorder.messages))
    return speeds


def test_a_decoder_reads_prompts_and_generates_at_every_context_it_has() -> None:
    model = model_of("decoder", "generate")
    speeds = measure_speeds(model)
    assert list(speeds) == [(*work, 5) for work in (("prompt", 1), ("decode", 1), ("decode", 3))] + [
        ("prompt", 1, 17),
        ("decode", 1, 17),
    ]
    for speed in speeds.values():
        assert speed.per_second > 0 and speed.share == speed.per_second / speed.limit
    decode = speeds["decode", 1, 17]
    assert decode.p50 is not None and decode.p95 is not None and decode.p95 >= decode.p50
    assert decode.per_second == pytest.approx(1 / decode.p50)
    # Weights, and keys and values of 17 tokens in 2 layers, in fp32, at 1 GB/s.
    assert decode.limit == pytest.approx(1e9 / (weights_of_a_step(model) + 4 * 17 * 2 * 2 * 28))


def test_two_stacks_translate_greedily_and_by_beam_search() -> None:
    speeds = measure_speeds(model_of("encoder-decoder", "translate"), replace(EFFORT, repeats=1, batch=2))
    assert list(speeds) == [(f"translate, {search}", batch, 25) for search in ("greedy", "beam 5") for batch in (1, 2)]


def test_an_encoder_encodes_sentences() -> None:
    speeds = measure_speeds(model_of("encoder", "fill"))
    assert list(speeds) == [("encode", 1, 25), ("encode", 3, 25)]
    assert all(speed.unit == "sentences" for speed in speeds.values())


def spec_with(tie: str) -> Spec:
    return build_spec(replace(SMALL, family="decoder", tie=tie), source_vocab=31, target_vocab=31)


@pytest.mark.parametrize("tie", ["decoder", "none"])
def test_a_step_reads_the_head_and_of_the_table_only_rows(tie: str) -> None:
    model = model_of("decoder", "generate")
    model = Model(build(spec_with(tie)), model.tokenizers, model.task)
    layers = sum(weight.nbytes for name, weight in model.module.named_parameters() if ".layers." in name)
    head = 4 * 31 * 28 if tie == "decoder" else 0  # not among the layers of the head, because it is the table
    assert weights_of_a_step(model) == layers + head


def test_limits_are_measured() -> None:
    limits = measure_limits(torch.device("cpu"), ("fp32", "bf16"), buffer_bytes=400_000, size=64, repeats=2)
    assert limits.bytes_per_second > 1e6 and set(limits.flops) == {"fp32", "bf16"}
    assert min(limits.flops.values()) > 1e6 and limits.threads == torch.get_num_threads()


@pytest.mark.parametrize(("isa", "times"), [({"avx2"}, 2), ({"avx2", "avx_vnni"}, 4)])
def test_8_bits_without_a_fast_product_are_measured_by_fp32(
    isa: set[str], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would multiply slowly, or with instructions that the kernels may not use."""
    monkeypatch.setattr(limits_module, "has_exact_int_mm", lambda: False)
    monkeypatch.setattr(limits_module, "processor", lambda: SimpleNamespace(isa=frozenset(isa)))
    monkeypatch.setattr(torch, "_int_mm", None)
    flops = measure_limits(torch.device("cpu"), ("fp32", "int8"), buffer_bytes=400_000, size=64, repeats=2).flops
    assert flops["int8"] == times * flops["fp32"]


def test_what_takes_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """All measurements together take little more than their time, unless single runs already exceed it."""
    calls: list[int] = []
    real = measured.stream_ids
    monkeypatch.setattr(measured, "stream_ids", lambda *args: calls.append(1) or real(*args))
    model = model_of("decoder", "generate")
    message = r"contexts of 17 are left out: 17 tokens take \d+ s"
    assert len(measure_speeds(model, replace(EFFORT, seconds=0.0), [message])) == 3 and len(calls) == 1, "once"
    calls.clear()
    measure_speeds(model, replace(EFFORT, seconds=100.0))
    assert len(calls) == 2 * (1 + EFFORT.repeats), "the first of several does not count"


def test_limits_that_take_long_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(limits_module, "SECONDS", 0.0)
    best_seconds(lambda: calls.append(1), torch.device("cpu"), 9)
    assert len(calls) == 1
    monkeypatch.setattr(limits_module, "SECONDS", 100.0)
    best_seconds(lambda: calls.append(1), torch.device("cpu"), 9)
    assert len(calls) == 1 + 10


def speed(precision: str, batch: int, rate: float, work: str = "decode", context: int = 32) -> Speed:
    return Speed(work, precision, batch, context, "tokens", rate, 100.0 * batch)


@pytest.mark.parametrize(
    ("speeds", "processors", "expected"),
    [
        ([speed("fp32", 1, 90.0)], 2, "1 of 2 processors are used: try --threads 2"),
        ([speed("fp32", 1, 50.0), speed("fp32", 16, 400.0)], 1, "16 texts at a time give 8.0 times the tokens"),
        ([speed("fp32", 1, 30.0, "prompt"), speed("fp32", 1, 20.0)], 1, "decode reaches 20% of the machine's limit"),
        ([speed("fp32", 1, 90.0), speed("fp32", 16, 99.0)], 1, "the speed is close to the machine's limit"),
    ],
)
def test_advice_names_what_gains_most(speeds: list[Speed], processors: int, expected: str) -> None:
    assert advice(speeds, LIMITS, default="fp32", processors=processors).startswith(expected)


def rates(work: str, context: int = 32, **per_second: float) -> list[Speed]:
    return [speed(precision, 1, rate, work, context) for precision, rate in per_second.items()]


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([rates("decode", fp32=50.0, bf16=90.0)], "--precision bf16 is the fastest here at decode (1.8 times fp32); "),
        ([rates("decode", fp32=90.0, bf16=91.0)], "fp32 is the fastest precision here; the speed is close"),
        (
            [rates("decode", fp32=50.0, int8=99.0, bf16=60.0), rates("prompt", fp32=80.0, int8=20.0, bf16=60.0)],
            "the fastest precision here is int8 at decode (2.0 times fp32), and fp32 at prompt; decode reaches 50%",
        ),
        (
            [rates("decode", fp32=10.0, int8=80.0), rates("decode", 500, fp32=10.0, int8=20.0)],
            "--precision int8 is the fastest here at decode (4.0 times fp32)",
        ),
        (
            [rates("decode", fp32=10.0, int8=40.0), rates("decode", 8000, int8=9.0)],
            "--precision int8 is the fastest here at decode (4.0 times fp32)",
        ),
        (
            [rates("decode", bf16=10.0, int8=40.0), rates("prompt", bf16=10.0, int8=20.0)],
            "--precision int8 is the fastest here at decode (4.0 times bf16) and prompt (2.0 times bf16)",
        ),
    ],
)
def test_advice_says_which_precision_is_the_fastest(works: list[list[Speed]], expected: str) -> None:
    speeds = [measurement for work in works for measurement in work]
    assert advice(speeds, LIMITS, default="fp32", processors=1).startswith(expected)
