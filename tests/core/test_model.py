"""The contract of the whole model: outputs, parameter counts, refused inputs.

Calls that break a declared type are made in a process without the import hook, as a user makes them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.core import Cache, Sequence, Transformer, build
from tests.conftest import ROOT
from tests.laws.tiny import MAX_POSITIONS, SMALL, TARGET_VOCAB, VOCAB, difference, resolve_spec, tiny

IDS, TARGET = torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
LONG = torch.zeros(1, MAX_POSITIONS + 1, dtype=torch.long)
PAIR, ENCODER, DECODER = "encoder-decoder/post/sinusoidal", "encoder/post/learned", "decoder/post/learned"
REFUSED: list[tuple[str, str, Callable[[Transformer], object]]] = [
    (PAIR, "needs target_ids: the decoder's input", lambda m: m(IDS)),
    (ENCODER, "this one has one stack: pass ids alone", lambda m: m(IDS, TARGET)),
    (DECODER, "target_mask needs target_ids", lambda m: m(IDS, target_mask=TARGET > 0)),
    (ENCODER, "a cache needs a decoder", lambda m: m(IDS, cache=Cache())),
    (ENCODER, r"decode\(\) needs a model with a decoder", lambda m: m.decode(IDS)),
    (DECODER, r"encode\(\) needs a model with an encoder", lambda m: m.encode(IDS)),
    (PAIR, "needs the memory that encode", lambda m: m.decode(TARGET)),
    (PAIR, "needs the memory that encode", lambda m: m.decode(TARGET, cache=Cache())),
    (ENCODER, "18 tokens is longer than the model's 17 positions; shorten or split it", lambda m: m(LONG)),
    (PAIR, "segments need a segment table", lambda m: m(IDS, TARGET, segments=IDS)),
    (DECODER, "a cache counts positions itself", lambda m: m(IDS, cache=Cache(), positions=IDS)),
    (DECODER, "a cache counts positions itself", lambda m: m(IDS, cache=Cache(), documents=IDS)),
]


@torch.no_grad()
@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_unsupported_calls_are_refused(index: int) -> None:
    name, words, call = REFUSED[index]
    with pytest.raises(InputError, match=words):
        call(tiny(name))


UNTYPED = """
import torch
from clearhead import spec
from clearhead.core import MultiHeadAttention, build
from clearhead.core.kernels import attention
from clearhead.base.errors import InputError
from tests.laws.tiny import tiny

ids, number, x = torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 7), torch.randn(2, 7, 15)
pair, attend = tiny("encoder-decoder/post/sinusoidal"), MultiHeadAttention(15, 3)
memory = pair.encode(ids).memory
calls = [
    lambda: pair(ids, ids, mask=number),
    lambda: pair(ids, ids, target_mask=number),
    lambda: pair.decode(ids, memory, memory_mask=number),
    lambda: attend(x, mask=number),
    lambda: attend(x, key_mask=number),
]
for short in (0, 1000):
    attention.SHORT_ON_CPU = short
    for call in calls:
        try:
            call()
        except InputError as error:
            assert "must be boolean, True =" in str(error) and "got torch.float32" in str(error), error
        else:
            raise SystemExit("a mask of numbers was taken")

pairs, padding = torch.ones(7, 7, dtype=torch.bool), torch.ones(2, 7, dtype=torch.bool)
hint = "; pass masks [batch, keys] as key_mask, the source of keys as memory, Causal() to the constructor"
shapes = "[queries=7, keys=7] or [batch=2, queries=7, keys=7] or [batch=2, heads=3, queries=7, keys=7]"
refused = [
    (lambda: attend(x, x, x), "mask must be boolean, True = may attend; got torch.float32 [2, 7, 15]" + hint),
    (lambda: attend(x, mask=spec.Causal()), "mask must be boolean, True = may attend; got Causal" + hint),
    (lambda: attend(x, mask=padding), f"mask must be {shapes}; got [2, 7]" + hint),
    (lambda: attend(x, mask=pairs[None, :5]), f"mask must be {shapes}; got [1, 5, 7]" + hint),
    (lambda: attend(x, key_mask=pairs), "key_mask must be [batch=2, keys=7]; got [7, 7]; mask takes [queries, keys]"),
    (lambda: attend(x[..., :14]), "query must be [batch, queries, width=15]; got [2, 7, 14]"),
    (lambda: attend(x[0]), "query must be [batch, queries, width=15]; got [7, 15]"),
    (lambda: attend(ids), "query must be a tensor of floating-point numbers; got torch.int64 [2, 7]"),
    (lambda: attend(x, x[:, :3, 1:]), "memory must be [batch=2, keys, width=15]; got [2, 3, 14]"),
    (lambda: attend(x, x[:1]), "memory must be [batch=2, keys, width=15]; got [1, 7, 15]"),
    (lambda: attend(x, [1.0]), "memory must be a tensor of floating-point numbers; got [1.0]"),
]
for call, message in refused:
    try:
        call()
    except InputError as error:
        assert str(error) == message, error
    else:
        raise SystemExit(f"not refused: {message}")
print("all refused")
"""


def test_a_model_is_built_on_a_device() -> None:
    spec = tiny(DECODER).spec
    assert next(build(spec, device=torch.device("meta")).parameters()).is_meta


def test_masks_of_another_type_or_shape_are_refused() -> None:
    """The polarity of a numeric mask is ambiguous, and a kernel would add it to the scores."""
    done = subprocess.run([sys.executable, "-c", UNTYPED], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    assert done.stdout == "all refused\n"


@torch.no_grad()
def test_encode_and_decode_equal_the_whole_model() -> None:
    module = tiny(PAIR)
    source, mask = torch.randint(VOCAB, (3, 7)), torch.arange(7) < torch.tensor([7, 5, 2])[:, None]
    target = torch.randint(TARGET_VOCAB, (3, 5))
    whole = module(source, target, mask=mask)
    encoded = module.encode(source, mask=mask)
    assert torch.equal(encoded.memory, encoded.hidden) and torch.equal(encoded.memory, whole.memory)
    assert torch.equal(module.decode(target, encoded.memory, memory_mask=mask).logits, whole.logits)
    states = module(Sequence(source, mask), Sequence(target), head=False)
    assert states.logits is None and torch.equal(states.hidden, whole.hidden)
    projection = module.head.projection()
    prepared = module.head.prepare(whole.hidden) * projection.scale
    assert difference(prepared @ projection.weight_VD.T + projection.bias_V, whole.logits) <= 1e-5
    assert whole.logits.shape == (3, 5, TARGET_VOCAB) and whole.hidden.shape == (3, 5, 14)


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder/post/sinusoidal", "decoder/post/sinusoidal"])
def test_a_single_stack_returns_no_memory(name: str) -> None:
    output = tiny(name)(IDS)
    assert output.memory is None
    assert output.logits.shape[:2] == output.hidden.shape[:2] == (2, 7)


@torch.no_grad()
def test_a_head_of_several_layers_prepares_all_but_the_last() -> None:
    hparams = replace(SMALL, family="encoder", output_transform=True, output_scale=0.3, activation="gelu")
    module = build(resolve_spec(hparams)).eval()
    hidden = torch.randn(3, 5, 14)
    inner, activation, norm, last = module.head.layers
    prepared = norm(activation(inner(hidden)))
    torch.testing.assert_close(module.head.prepare(hidden), prepared)
    expected = 0.3 * prepared @ module.encoder.embedding.table.weight.T + last.bias
    torch.testing.assert_close(module.head(hidden), expected, atol=1e-5, rtol=1e-5)


def test_counts_come_from_the_spec() -> None:
    pair = tiny("encoder-decoder/post/learned")
    assert (pair.num_source_ids, pair.num_target_ids, pair.max_positions) == (VOCAB, TARGET_VOCAB, MAX_POSITIONS)
    tied = build(resolve_spec(replace(SMALL, tie="all")))
    assert (tied.num_source_ids, tied.num_target_ids, tied.max_positions) == (VOCAB, VOCAB, None)


@torch.no_grad()
def test_segments_embeddings_and_positions_reach_the_first_stack() -> None:
    """dropout(norm(table[ids] * scale + segments + positions)); each term can be passed in."""
    hparams = replace(
        SMALL, family="encoder", segments=3, embedding_norm=True, embedding_scale=1.7, positions="learned"
    )
    module = build(resolve_spec(hparams)).eval()
    ids, segments = torch.randint(VOCAB, (2, 7)), torch.randint(3, (2, 7))
    places = torch.randint(MAX_POSITIONS, (2, 7))
    embedding, seen = module.encoder.embedding, []
    embedding.register_forward_hook(lambda *call: seen.append(call[2]))
    out = module(ids, segments=segments, positions=places)
    summed = embedding.table.weight[ids] * 1.7 + embedding.segments.weight[segments] + embedding.position.weight[places]
    torch.testing.assert_close(seen[0], embedding.norm(summed), atol=1e-5, rtol=1e-5)
    output = module(ids, embeddings=embedding.table.weight[ids], segments=segments, positions=places)
    assert torch.equal(output.logits, out.logits)
    assert torch.equal(module(ids).logits, module(ids, segments=torch.zeros_like(ids)).logits)
    counted = torch.arange(7).expand(2, 7)
    assert torch.equal(module(ids, positions=counted).logits, module(ids).logits)
