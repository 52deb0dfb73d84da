"""Tiny models of every form that the residual stream takes, one text for each, and its recorded run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from clearhead import spec
from clearhead.core import Sequence, Transformer, build
from clearhead.interpret.maps.recording import AttentionRecord, recording
from clearhead.interpret.maps.streams import Streams
from tests.laws.hf_parts import HF_PARTS, base
from tests.laws.tiny import VOCAB

SOURCE, TARGET = 7, 5


class Run(NamedTuple):
    """A model, the records of its attentions, and its streams, for one text."""

    module: Transformer
    records: list[AttentionRecord]
    streams: Streams


def parallel() -> spec.Model:
    """Attention and feed-forward side by side in one step, which scales the second."""
    model = base("decoder/pre-grouped/rotary")
    layers = []
    for layer in model.decoder.layers:
        branches = [branch for step in layer.steps for branch in step.branches]
        branches[1] = branches[1].model_copy(update={"scale": 0.7})
        layers.append(spec.Layer(steps=(spec.Step(branches=tuple(branches)),)))
    return model.model_copy(update={"decoder": model.decoder.model_copy(update={"layers": tuple(layers)})})


def with_head_layers(*layers: spec.HeadLayer, name: str = "encoder/post/learned") -> spec.Model:
    return base(name, tie="none").model_copy(update={"head": spec.Head(layers=layers)})


CASES: dict[str, Callable[[], spec.Model]] = {
    "encoder": lambda: base("encoder/post/learned"),
    "decoder, grouped keys": lambda: base("decoder/pre-grouped/rotary"),
    "decoder, norms behind": lambda: base("decoder/post/alibi"),
    "two stacks": lambda: base("encoder-decoder/post/sinusoidal"),
    "two stacks, norms before": lambda: base("encoder-decoder/pre-grouped/buckets"),
    "parallel branches": parallel,
    "classifier by the mean": lambda: with_head_layers(spec.Pool(by="mean"), spec.LayerNorm(), spec.Linear(size=3)),
    "classifier by several pools": lambda: with_head_layers(
        spec.Pool(by=("weighted", "mean", "last")), spec.Linear(size=3)
    ),
    "tagger": lambda: with_head_layers(spec.Linear(size=5, scale=0.6)),
    **{
        name: HF_PARTS[name]
        for name in (
            "layer norm with offset", "rms norm with offset", "capped outputs", "sink",
            "experts with biases", "shared layers", "shared layers with a memory",
        )
    },
}  # fmt: skip
NONLINEAR: dict[str, Callable[[], spec.Model]] = {
    "masked model with a transform": lambda: base("encoder/post/learned", output_transform=True),
    "classifier by the first": lambda: with_head_layers(
        spec.Pool(by="first"), spec.Linear(size=11, scale=1.7), spec.Activation(function="tanh"), spec.Linear(size=3)
    ),
}


def make(name: str) -> Transformer:
    """Build a case with random biases and norms, in evaluation mode."""
    torch.manual_seed(len(name))
    module = build(spec.Model.from_json({**CASES, **NONLINEAR}[name]().to_json())).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def texts(module: Transformer) -> tuple[Sequence, Sequence | None]:
    torch.manual_seed(3)
    source = Sequence(torch.randint(VOCAB, (1, SOURCE)) % module.num_source_ids)
    if module.encoder is None or module.decoder is None:
        return source, None
    return source, Sequence(torch.randint(module.num_target_ids, (1, TARGET)))


def record(module: Transformer, source: Sequence, target: Sequence | None = None) -> Run:
    with torch.no_grad(), recording(module) as records:
        module(source, target, head=False)
    return Run(module, records, Streams.of(module, source, target))


@cache
def run(name: str) -> Run:
    """Return a case with its run, made once."""
    module = make(name)
    return record(module, *texts(module))
