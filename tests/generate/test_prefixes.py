"""Laws of shared beginnings of prompts: the same bits with and without, whatever is given up meanwhile."""

from __future__ import annotations

import pytest
import torch

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.generate import prefill
from clearhead.generate.continuation import GenerateRequest, PromptReader
from clearhead.generate.options import GenerateOptions
from clearhead.generate.prefill import BLOCK_TOKENS, Prefixes, can_share
from clearhead.generate.running import RunningBatch
from tests.fast.test_bits import ids_of, of_model, small

CASES = {
    "gpt2": lambda: small("gpt2"),
    "rotations": lambda: small("llama-tiny"),
    "a window": lambda: small("llama-tiny", mask=spec.Window(before=40, after=0)),
    "ALiBi": lambda: small("llama-tiny", position=None, score_bias=spec.Alibi()),
}
PLENTY = 2**30


def reading(tree: Transformer, prompt: list[int], prefixes: Prefixes | None) -> PromptReader:
    options = GenerateOptions(max_new_tokens=3)
    return PromptReader(tree, GenerateRequest([prompt], options, eos_id=3, pad_id=0), prefixes)


def read(tree: Transformer, prompt: list[int], prefixes: Prefixes | None) -> tuple[list[int], list[float], int]:
    """The tokens after a prompt, the logits of the first and the log-probabilities of all, and what was shared."""
    reader = reading(tree, prompt, prefixes)
    with torch.inference_mode():
        while not (starts := reader.step()):
            pass
        logits, batch, row = starts[0].logits.flatten().tolist(), RunningBatch(tree), starts[0].member.sequences[0]
        batch.join(starts)
        while batch.members:
            batch.step()
    return row.ids, [*logits, *row.log_probabilities], reader.num_shared


def alike(lengths: list[int], shared: int = 2 * BLOCK_TOKENS + 5) -> list[list[int]]:
    """Prompts that begin with the same tokens, and have so many more."""
    (start,) = ids_of(1, [shared])
    return [start + rest for rest in ids_of(len(lengths), lengths)]


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("case", CASES)
def test_a_shared_beginning_changes_no_bit(case: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 50)
    tree, prefixes = of_model(CASES[case](), precision), Prefixes(PLENTY)
    prompts = [
        *alike([1, 7, 59, 60, 61, 62, 125]),
        alike([1])[0][: BLOCK_TOKENS + 1],
        alike([1])[0][: BLOCK_TOKENS + 2],
    ]
    for number, prompt in enumerate(prompts):
        ids, numbers, shared = read(tree, prompt, prefixes)
        assert (ids, numbers) == read(tree, prompt, None)[:2], number
        assert shared == (0 if number == 0 or len(prompt) == BLOCK_TOKENS + 1 else min(2, len(prompt) // 64) * 64)
    assert read(tree, prompts[6], prefixes)[2] == (len(prompts[6]) - 2) // BLOCK_TOKENS * BLOCK_TOKENS


def test_prompts_read_together_are_kept() -> None:
    tree, prefixes = of_model(small("gpt2"), "int8"), Prefixes(PLENTY)
    first, *others = [reading(tree, prompt, prefixes) for prompt in ids_of(3, [90, 70, 130])]
    assert first.kind == others[0].kind is not None
    with torch.inference_mode():
        first.step(others)
    for prompt in ids_of(3, [90, 70, 130]):
        again = [*prompt[:-3], 7, 9]
        assert reading(tree, again, prefixes).kind is None
        actual = read(tree, again, prefixes)
        assert actual[2] == (len(again) - 2) // 64 * 64 > 0 and actual[:2] == read(tree, again, None)[:2]


def test_what_was_used_longest_ago_is_given_up() -> None:
    tree, prefixes = of_model(small("gpt2"), "int8"), Prefixes(PLENTY)
    prompts = ids_of(4, [BLOCK_TOKENS + 5])
    read(tree, prompts[0], prefixes)
    prefixes.most_bytes = 2 * prefixes.num_bytes
    read(tree, prompts[1], prefixes)
    assert read(tree, prompts[0], prefixes)[2] == BLOCK_TOKENS
    read(tree, prompts[2], prefixes)
    assert [prefixes.count(prompt) for prompt in prompts] == [64, 0, 64, 0]
    assert 0 < prefixes.num_bytes <= prefixes.most_bytes
    assert read(tree, prompts[1], prefixes)[:2] == read(tree, prompts[1], None)[:2]
    prefixes.most_bytes = 0
    read(tree, prompts[3], prefixes)
    assert prefixes.num_bytes == 0 and not any(map(prefixes.count, prompts))


def test_a_request_that_ends_early_or_whose_beginning_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request took over is its own: others neither see it leave, nor does it see them."""
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 50)
    tree, prefixes = of_model(small("llama-tiny"), "int8"), Prefixes(PLENTY)
    first, second = alike([90, 95])
    read(tree, first, prefixes)
    cancelled, finishing = reading(tree, second, prefixes), reading(tree, second, prefixes)
    with torch.inference_mode():
        assert cancelled.step() is finishing.step() is None and finishing.num_shared == 2 * BLOCK_TOKENS
        del cancelled
        prefixes.most_bytes = 0
        read(tree, first, prefixes)
        while not (starts := finishing.step()):
            pass
        logits = starts[0].logits.flatten().tolist()
    assert logits == read(tree, second, None)[1][: len(logits)]


def test_who_can_share() -> None:
    def of(name: str, **of_attention: object) -> bool:
        return can_share(build(small(name, **of_attention)))

    assert of("gpt2") and of("llama-tiny", mask=spec.Window(before=5, after=0))
    assert not of("t5-small")
    assert not of("llama-tiny", mask=spec.Window(before=5, after=1))
    scaling = spec.DynamicScaling(original_length=16, factor=2.0)
    assert not of("llama-tiny", position=spec.Rotary(scaling=scaling))
