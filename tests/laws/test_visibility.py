"""Information flow: changing token j changes output i if and only if the masks let i attend to j.

Legend: T tokens; reach[i, j] = output i depends on token j.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead import spec
from clearhead.core import build
from tests.laws.tiny import MODELS, TARGET_VOCAB, VOCAB, Reader, hparams, resolve_spec, tiny, with_mask

T = 11


def reach(hidden_of: Callable[[Tensor], Tensor], vocab: int, length: int = T) -> Tensor:
    """Return reach[i, j]: True if changing token j changes the last hidden state i."""
    ids = torch.randint(vocab, (1, length))
    before = hidden_of(ids)[0]
    columns = []
    for j in range(length):
        other = ids.clone()
        other[0, j] = (other[0, j] + 1) % vocab
        moved = (hidden_of(other)[0] - before).abs().amax(dim=-1)
        # Either the last bits of a sum over the same numbers, or a change that the token caused.
        assert not ((moved > 1e-6) & (moved < 1e-5)).any(), "the test cannot tell rounding from influence"
        columns.append(moved > 1e-6)
    return torch.stack(columns, dim=1)


def distance() -> Tensor:
    return torch.arange(T)[:, None] - torch.arange(T)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_information_flows_as_the_family_allows(name: str) -> None:
    module = tiny(name)
    reader = Reader.of(module, 1)
    expected = distance() >= 0 if module.decoder is not None else torch.ones(T, T, dtype=torch.bool)
    assert torch.equal(reach(lambda ids: reader(ids).hidden, reader.vocab), expected)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 0), (0, 2), (2, 1), (5, 3)])
def test_windows_reach_their_size_in_each_layer(before: int, after: int, layers: int, kernel: str) -> None:
    model = resolve_spec(hparams("encoder/post/rotary"))
    tree = model.model_dump(mode="json")
    tree["encoder"]["layers"] = tree["encoder"]["layers"][:layers]
    model = with_mask(spec.Model.from_json(json.dumps(tree)), spec.Window(before=before, after=after), "encoder")
    module = build(model).eval()
    expected = (distance() <= layers * before) & (-distance() <= layers * after)
    assert torch.equal(reach(lambda ids: module(ids).hidden, VOCAB), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder/post/sinusoidal", "decoder/pre-grouped/rotary"])
def test_padding_influences_only_itself(name: str, kernel: str) -> None:
    module = tiny(name)
    real = torch.tensor([[False, True, True, False, True, True, True, True, True, False, False]])
    actual = reach(lambda ids: module(ids, mask=real).hidden, VOCAB if "encoder" in name else TARGET_VOCAB)
    allowed = (distance() >= 0) if module.decoder is not None else torch.ones(T, T, dtype=torch.bool)
    expected = (allowed & real) | torch.eye(T, dtype=torch.bool)  # the residual carries every token to its own output
    assert torch.equal(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder/post/learned", "decoder/post/alibi"])
def test_documents_do_not_influence_each_other(name: str, kernel: str) -> None:
    module = tiny(name)
    documents = torch.tensor([[4, 4, 4, 1, 1, 7, 7, 7, 7, 7, 2]])
    actual = reach(lambda ids: module(ids, documents=documents).hidden, module.num_target_ids)
    allowed = (distance() >= 0) if module.decoder is not None else torch.ones(T, T, dtype=torch.bool)
    assert torch.equal(actual, allowed & (documents[0][:, None] == documents[0]))


@torch.no_grad()
@pytest.mark.parametrize("style", ["post/sinusoidal", "pre-grouped/buckets"])
def test_every_target_token_depends_on_every_real_source_token(style: str, kernel: str) -> None:
    module = tiny(f"encoder-decoder/{style}")
    target = torch.randint(TARGET_VOCAB, (1, T))
    mask = torch.arange(T)[None] < 8
    actual = reach(lambda ids: module(ids, target, mask=mask).hidden, VOCAB)
    assert torch.equal(actual, (torch.arange(T) < 8).expand(T, T))


@torch.no_grad()
def test_rows_of_a_batch_do_not_influence_each_other(kernel: str) -> None:
    module = tiny("encoder-decoder/post/sinusoidal")
    source, target = torch.randint(VOCAB, (3, 7)), torch.randint(TARGET_VOCAB, (3, 5))
    before = module(source, target).logits
    source[1] = (source[1] + 1) % VOCAB
    moved = (module(source, target).logits - before).abs().amax(dim=(1, 2))
    assert (moved > 1e-6).tolist() == [False, True, False]
