"""The helper that counts host reads sees each of them, on a CPU and on `meta`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.laws.host_reads import HostRead, count_host_reads, refuse_host_reads, to_meta

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool((x > 0).any()),
    "range": lambda x: range(x.long()[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "put": lambda x: x.clone().index_put_((x > 0,), x[:1].expand(2)),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
}
FREE: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: x * 2 + torch.tensor(3.0),
    "fill": lambda x: x.clone().masked_fill(x > 0, 0.0),
    "set": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "index": lambda x: x[torch.arange(2, device=x.device)],
    "repeats": lambda x: x.repeat_interleave(2),
    "sized": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "like": lambda x: torch.zeros_like(x).scatter_(0, torch.zeros(1, dtype=torch.long, device=x.device), 1.0),
    "shape": lambda x: x.reshape(1, len(x)).sum(),
}


@pytest.mark.parametrize("name", READS)
def test_each_read_is_counted_and_refused(name: str) -> None:
    x = torch.tensor([2.0, 0.0, 1.0])
    with count_host_reads() as reads:
        READS[name](x)
    assert len(reads) >= 1 and all(" at tests/laws/test_host_reads.py:" in read for read in reads)
    for tensor in (x, to_meta(x)):
        with pytest.raises(HostRead), refuse_host_reads():
            READS[name](tensor)


@pytest.mark.parametrize("name", FREE)
def test_operations_of_the_device_are_free(name: str) -> None:
    x = torch.tensor([2.0, 0.0, 1.0])
    with count_host_reads() as reads:
        FREE[name](x)
    assert reads == []
    on_meta = to_meta(x)
    with refuse_host_reads():
        FREE[name](on_meta)


@pytest.mark.parametrize(
    "call", [lambda x: x + torch.ones(3), lambda x: x[torch.arange(2)], lambda x: torch.ones(3).to(x)]
)
def test_operands_of_another_device_are_refused(call: Callable[[Tensor], Any]) -> None:
    with pytest.raises(HostRead), refuse_host_reads():
        call(torch.empty(3, device="meta"))


def test_a_backward_pass_is_watched() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient * float(gradient.sum()))
    with count_host_reads() as reads:
        y.sum().backward()
    assert len(reads) == 1


def test_nothing_is_counted_afterwards() -> None:
    originals = [torch.tensor, Tensor.tolist]
    with count_host_reads() as reads:
        pass
    torch.ones(3).tolist()
    assert reads == [] and originals == [torch.tensor, Tensor.tolist]
