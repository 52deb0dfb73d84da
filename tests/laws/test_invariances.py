"""The invariances of `clearhead check REF` hold for every tiny model, and fail for a model with a planted fault.

Batched = single, padded = unpadded, packed = separate, cache = no cache, fused = eager, one beam = greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.apps.check.handwritten.report import Finding
from clearhead.apps.check.model.invariances import check_invariances
from clearhead.core import Transformer, attention, build, context
from clearhead.generate.search import beam
from tests.laws.tiny import MODELS, tiny

ALWAYS = "batched = single", "left padding = none", "right padding = none"
CACHES = (
    "cache = none, prompts padded left", "cache = none, prompts padded right", "cache = none, token by token",
    "cache = none, in pieces",
)  # fmt: skip
PACKED, FUSED, SEARCH = "packed = separate", "fused = eager", "beam 1 = greedy = no cache"


def laws_of(name: str) -> set[str]:
    """Return the laws that the check must prove on a model."""
    # Learned positions end before the fused kernel begins.
    fused = [] if name.endswith("/learned") else [FUSED]
    if name.startswith("encoder/"):
        return {*ALWAYS, PACKED, *fused}
    if name.startswith("decoder/"):
        return {*ALWAYS, PACKED, *fused, *CACHES, SEARCH}
    sides = {"encoder": [*ALWAYS, PACKED, *fused], "decoder": [*ALWAYS, *fused, *CACHES]}
    return {f"{side}: {law}" for side, laws in sides.items() for law in laws} | {SEARCH}


def broken_laws(module: Transformer) -> Iterator[tuple[str, bool]]:
    """Yield each law that the check tries on a module, and whether it is broken."""
    exact = build(module.spec).double().eval()
    exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})

    def draw(count: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (count,))

    for outcome in check_invariances(module, exact, draw):
        if isinstance(outcome, Finding):
            yield outcome.says.partition(": ")[0], True
        elif outcome.verdict != "not tried":
            yield outcome.name, outcome.verdict != "right"


def check_laws(name: str, module: Transformer) -> None:
    """Assert that the check tries every law of a model, and that none is broken."""
    outcomes = list(broken_laws(module))
    assert not [law for law, is_broken in outcomes if is_broken]
    assert {law for law, _ in outcomes} == laws_of(name)


@pytest.mark.parametrize("name", MODELS)
def test_every_invariance_holds(name: str) -> None:
    check_laws(name, tiny(name))


@pytest.mark.parametrize("name", ["encoder/post/rotary", "decoder/post/rotary", "encoder-decoder/pre-grouped/buckets"])
def test_every_invariance_holds_with_each_kernel(name: str, kernel: str) -> None:
    module = tiny(name)
    assert not [law for law, is_broken in broken_laws(module) if is_broken]


# Planted faults


def read_batch_mates(patch: pytest.MonkeyPatch) -> None:
    attend = attention.Attention.attend

    def mix_rows(self: attention.Attention, query: Tensor, key: Tensor, value: Tensor, seen: context.Context) -> Tensor:
        return attend(self, query, key, value + 0.1 * value.roll(1, 0), seen)

    patch.setattr(attention.Attention, "attend", mix_rows)


def replace_masking(patch: pytest.MonkeyPatch, **fields: None) -> None:
    right = context.Masking.build
    patch.setattr(
        context.Masking, "build", lambda masking, mask, device: right(replace(masking, **fields), mask, device)
    )


def read_padding(patch: pytest.MonkeyPatch) -> None:
    replace_masking(patch, key_mask=None)


def read_other_documents(patch: pytest.MonkeyPatch) -> None:
    replace_masking(patch, documents=None)


def lose_a_cached_value(patch: pytest.MonkeyPatch) -> None:
    append = context.KeyValues.append

    def late(self: context.KeyValues, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = append(self, key, value)
        return keys, torch.cat([values[:, :, 1:], values[:, :, -1:]], 2) if keys.shape[2] > key.shape[2] else values

    patch.setattr(context.KeyValues, "append", late)


def scale_the_fused_kernel(patch: pytest.MonkeyPatch) -> None:
    fused = attention.fused_attention

    def scale_more(*tensors: Any, scale: float, **options: Any) -> Tensor:
        return fused(*tensors, scale=scale * 1.5, **options)

    patch.setattr(attention, "fused_attention", scale_more)


def search_for_the_second(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(beam, "only_banned", lambda *where: None)
    patch.setattr(beam, "apply", lambda chain, scores, ids: scores.scatter(1, scores.argmax(1, keepdim=True), -30.0))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    read_batch_mates: "batched = single",
    read_padding: "left padding = none",
    read_other_documents: PACKED,
    lose_a_cached_value: CACHES[-1],
    scale_the_fused_kernel: FUSED,
    search_for_the_second: SEARCH,
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_breaks_its_law(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Else the laws would only repeat the opinion of the check."""
    name = "decoder/post/rotary"
    module = tiny(name)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert (FAULTS[plant], True) in set(broken_laws(module))
        with pytest.raises(AssertionError):
            check_laws(name, module)
    check_laws(name, module)
