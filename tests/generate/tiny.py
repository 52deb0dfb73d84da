"""Encoder-decoder models small enough to search exhaustively and random enough to have an opinion."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import torch

from clearhead import core as ch
from clearhead import spec
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import SearchOptions
from clearhead.generate.results import Continuation
from clearhead.generate.running import PrefilledMember, RunningBatch
from clearhead.generate.search.recorder import BeamRecorder

PAD, BOS, EOS = 0, 1, 2
SOURCE_VOCAB, TARGET_VOCAB = 11, 7


def tiny_spec(kind: str, target_vocab: int = TARGET_VOCAB, positions: int = 64) -> spec.Model:
    """Two layers a side: "original" is post-norm, "modern" is pre-norm and rotary with shared key/value heads."""
    modern = kind == "modern"
    norm = spec.RMSNorm() if modern else spec.LayerNorm()
    norm_args = {"pre": norm} if modern else {}

    def step(function: spec.Attention | spec.FeedForward) -> spec.Step:
        branch = spec.Branch(function=function, dropout=0.3, **norm_args)
        return spec.Step(branches=(branch,), out=None if modern else norm)

    def attention(source: str, mask: spec.Full | spec.Causal) -> spec.Step:
        rotary = spec.Rotary() if modern and source == "self" else None
        kv_heads = 1 if modern else 2
        return step(
            spec.Attention(
                source=source, num_heads=2, num_kv_heads=kv_heads, head_size=6, mask=mask, position=rotary, dropout=0.1
            )
        )

    def stack(vocab: int, steps: tuple[spec.Step, ...]) -> spec.Stack:
        position_table = None if modern else spec.Learned(rows=positions)
        embedding = spec.Embedding(table=spec.Table(rows=vocab), position=position_table, dropout=0.3)
        return spec.Stack(
            width=10, embedding=embedding, layers=(spec.Layer(steps=steps),) * 2, final_norm=norm if modern else None
        )

    forward = step(spec.FeedForward(size=13))
    return spec.Model(
        encoder=stack(SOURCE_VOCAB, (attention("self", spec.Full()), forward)),
        decoder=stack(target_vocab, (attention("self", spec.Causal()), attention("memory", spec.Full()), forward)),
        head=spec.Head(layers=(spec.Linear(size=target_vocab),)),
        initialization=spec.Normal(std=0.5, scale_branches=False),
    )


def tiny_model(kind: str, seed: int, target_vocab: int = TARGET_VOCAB, end_bonus: float = 0.0) -> ch.Transformer:
    """A model with weights so large that its choices differ; the bonus makes it end before it loops for ever."""
    torch.manual_seed(seed)
    module = ch.build(tiny_spec(kind, target_vocab)).eval()
    bias = module.head.layers[-1].bias
    with torch.no_grad():
        bias[EOS] += end_bonus
    return module


def some_sources(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random sources of very different lengths, each closed by the end token."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, longest) for _ in range(count)]
    return [[*(draw.randrange(3, SOURCE_VOCAB) for _ in range(length)), EOS] for length in lengths]


def tiny_decoder(
    kind: str, seed: int, vocab: int = 13, *, positions: int = 64, end_bonus: float = 0.0
) -> ch.Transformer:
    """A decoder alone: "original" has a table of positions, "modern" is rotary with shared key/value heads."""
    torch.manual_seed(seed)
    two = tiny_spec(kind, vocab, positions)
    assert two.decoder is not None
    tree = two.model_dump(mode="json")
    tree["encoder"] = None
    for layer in tree["decoder"]["layers"]:
        layer["steps"] = [s for s in layer["steps"] if s["branches"][0]["function"].get("source") != "memory"]
    module = ch.build(spec.Model.from_json(json.dumps(tree))).eval()
    bias = module.head.layers[-1].bias
    with torch.no_grad():
        bias[EOS] += end_bonus
    return module


def some_prompts(count: int, longest: int, vocab: int = 13, seed: int = 0) -> list[list[int]]:
    """Random prompts of very different lengths, each opened by the start token."""
    draw = random.Random(seed)
    lengths = [draw.randint(0, longest) for _ in range(count)]
    return [[BOS, *(draw.randrange(3, vocab) for _ in range(length))] for length in lengths]


def next_logits(module: ch.Transformer, ids: list[int], source: list[int] | None = None) -> torch.Tensor:
    """The logits behind one unpadded sequence, from one pass without a cache."""
    with torch.no_grad():
        if source is not None:
            return module(torch.tensor([source]), torch.tensor([ids])).logits[0, -1]
        return module(torch.tensor([ids])).logits[0, -1]


def run_search(module: ch.Transformer, start: Callable[[], PrefilledMember]) -> list[list[Continuation]]:
    """Run a search alone, and return the candidates of each of its sentences."""
    batch = RunningBatch(module)
    with torch.inference_mode():
        started = start()
        sentences = list(started.member.sequences)
        batch.join([started])
        while batch.members:
            batch.step()
    return [sentence.candidates for sentence in sentences]


def translate_ids(
    module: ch.Transformer,
    sources: Sequence[Sequence[int]],
    options: SearchOptions,
    *,
    start: int = BOS,
    recorder: BeamRecorder | None = None,
) -> list[list[Continuation]]:
    """Search for the translations of sources, without the tokens for start and padding."""
    prompts = [[start] for _ in sources]
    return generate_ids(module, GenerateRequest(prompts, options, EOS, PAD, (start, PAD), sources, recorder=recorder))
