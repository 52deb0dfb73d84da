"""Kernels get addresses only of tensors with the dtype, shape and layout that they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clearhead.fast.linear import float_linear, int8_linear, mixed_linear
from clearhead.fast.logits import top_and_log_total
from clearhead.fast.native.abi import UnfitTensor, address, fits
from clearhead.fast.runner import Runner
from clearhead.fast.stack import stack_runner
from clearhead.fast.stored import INT8, store
from clearhead.training.optim.optimizers import Muon, load_optimizer
from tests.laws.tiny import tiny

OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": Tensor.half,
    "more": lambda x: torch.cat([x, x]),
    "fewer": lambda x: x[:-1],
    "axes": lambda x: x[None],
    "turned": lambda x: x.T.contiguous().T,
    "elsewhere": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_only_what_a_kernel_reads_has_an_address(what: str) -> None:
    x = torch.randn(5, 7)
    other = OTHERS[what](x)
    assert address(x, torch.float32, 5, 7) == x.data_ptr()
    assert not fits(other, torch.float32, 5, 7)
    with pytest.raises(UnfitTensor, match=r"a kernel reads torch.float32 \[5, 7\]"):
        address(other, torch.float32, 5, 7)


def test_rows_may_lie_apart_where_a_kernel_knows_how_far() -> None:
    x = torch.randn(5, 14)[:, :7]
    assert fits(x, torch.float32, 5, 7, by_row=True) and not fits(x, torch.float32, 5, 7)
    assert not fits(x.T, torch.float32, 7, 5, by_row=True)


def test_layers_in_8_bits_with_other_scales_are_computed_the_plain_way() -> None:
    weight, scale, x = torch.randint(-127, 127, (64, 32), dtype=torch.int8), torch.rand(64).half(), torch.randn(3, 32)
    assert torch.equal(int8_linear(weight, scale, None)(x), nn.functional.linear(x, weight * scale[:, None].float()))


@pytest.mark.parametrize("kind", ["float", "mixed", "int8"])
def test_rows_of_another_dtype_or_width_reach_no_kernel(kind: str) -> None:
    weight, x = torch.randn(64, 32), torch.randn(3, 32)
    run = {
        "float": lambda: float_linear(weight, None),
        "mixed": lambda: mixed_linear(weight.bfloat16(), None),
        "int8": lambda: int8_linear(weight.to(torch.int8), torch.rand(64), None),
    }[kind]()
    if run is None:
        pytest.skip("there are no compiled kernels")
    with torch.inference_mode():
        assert run(x).shape == (3, 64)
        for other in (x[:, :-1], torch.randn(2, 33), torch.randn(3, 16, 4)):
            with pytest.raises(RuntimeError, match="shape"):
                run(other)
        assert run(x.to("meta")).is_meta if kind == "float" else True
        for count in (1, 33):
            with pytest.raises(RuntimeError) if count > 32 else torch.inference_mode():
                top_and_log_total(x, count)


def test_a_model_in_8_bits_that_was_halved_still_computes() -> None:
    torch.manual_seed(3)
    module, ids = store(tiny("decoder/pre-grouped/rotary"), INT8).half(), torch.randint(1, 20, (2, 7))
    with torch.inference_mode():
        plain = module(ids).logits
        actual = Runner(module).tree()(ids).logits
        torch.testing.assert_close(actual, plain, rtol=0.05, atol=0.05)


def test_a_stack_refuses_rows_of_another_width_or_dtype() -> None:
    run = stack_runner("float32", [], 7)
    if run is None:
        pytest.skip("there are no compiled kernels")
    run(torch.zeros(3, 7), [])
    for rows in (torch.zeros(3, 8), torch.zeros(3, 7).double(), torch.zeros(7, 3).T):
        with pytest.raises(UnfitTensor):
            run(rows, [])


def test_a_momentum_of_another_size_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(32, 64))
    parameter.grad = torch.ones(32, 64)
    group = {"params": [parameter], "matrices": True, "lr": 0.1, "weight_decay": 0.0}
    muon = Muon([group], betas=(0.9, 0.9), eps=1e-8)
    muon.step()
    state = muon.state_dict()
    state["state"][0]["momentum"] = torch.zeros(1)
    with pytest.raises(ValueError, match="another shape"):
        load_optimizer(muon, state)
