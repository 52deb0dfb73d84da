"""A replica that computes in another dtype has the results of a converted copy, and no second copy of a matrix."""

from __future__ import annotations

import copy

import pytest
import torch

from clearhead.fast.computing import replica_in_dtype
from clearhead.fast.stored import BF16, INT8, Stored, store
from tests.laws.tiny import tiny

IDS = torch.tensor([[2, 3, 5, 7, 11], [13, 17, 19, 22, 1]])


@pytest.mark.parametrize("name", ["encoder/post/learned", "decoder/pre-grouped/rotary", "encoder-decoder/post/buckets"])
@pytest.mark.parametrize("kind", [None, BF16, INT8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_are_those_of_a_converted_copy(name: str, kind: object, dtype: torch.dtype) -> None:
    plain = tiny(name)
    module = copy.deepcopy(plain) if kind is None else store(copy.deepcopy(plain), kind)  # type: ignore[arg-type]
    copied = copy.deepcopy(plain).to(dtype)
    for address, submodule in copied.named_modules():
        original = module.get_submodule(address)
        if isinstance(original, Stored):
            submodule.weight.data = original.weight.to(dtype)
    twin, target = replica_in_dtype(module, dtype), IDS if module.encoder is not None and module.decoder else None
    with torch.no_grad():
        actual, expected = twin(IDS, target).logits, copied(IDS, target).logits
    assert actual.dtype == dtype and torch.equal(actual, expected)
    weight_ids = {id(weight) for weight in (*module.parameters(), *module.buffers())}
    matrices = [weight for weight in (*twin.parameters(), *twin.buffers()) if weight.dim() > 1]
    tables = {weight.shape[0] for weight in matrices if id(weight) not in weight_ids}
    assert tables <= {17, 32}, "only tables of positions are copied"
