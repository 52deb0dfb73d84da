"""Reasons why a machine or a model cannot compile its training, with a test of compiled dropout."""

from __future__ import annotations

import os
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from clearhead.base.commands import make_install_command
from clearhead.fast.device_check import device_name
from clearhead.fast.native.build import PASSED, recall_verdict
from clearhead.fast.native.load import KERNELS, uses_kernels

TESTED: Final = (2, 13)
"""Oldest tested version of PyTorch: before it, compiled training is off."""
_SHAPE: Final = (8, 256, 64)
_DRIFT: Final = 0.02
"""Largest difference from 1/2 of the share of dropped elements; its standard deviation is 0.0014."""


def find_obstacle(module: nn.Module, device: torch.device) -> str:
    """Return the reason why a training cannot be compiled, with the fix, or an empty text.

    Args:
        module: the module to train.
        device: the device of the training.
    """
    if not uses_kernels():
        return f"the environment variable {KERNELS} is 'plain': unset it"
    if tuple(map(int, torch.__version__.split(".")[:2])) < TESTED:
        return f"it needs PyTorch {'.'.join(map(str, TESTED))} or newer, this is {torch.__version__}: install that"
    if device.type not in ("cpu", "cuda"):
        return f"PyTorch compiles for cpu and cuda, the device is {device.type}: choose another train.device"
    if device.type == "cuda" and find_spec("triton") is None:
        return f"the package triton is missing: install it with {make_install_command('triton')}"
    names = [os.environ.get("CXX") or "g++"] if device.type == "cpu" else [os.environ.get("CC") or "cc", "gcc", "clang"]
    if not any(map(shutil.which, names)):
        return f"there is no compiler ({' or '.join(names)}): install g++, or name one in the variable CXX or CC"
    if _has_dropout(module) and not has_right_dropout(device):
        return (
            f"PyTorch {torch.__version__} compiles dropout wrong on {device_name(device)} (pytorch issue 198333): "
            "set model.dropout and all other rates of dropout to 0, or install another version of PyTorch"
        )
    return ""


def _has_dropout(module: nn.Module) -> bool:
    return any(isinstance(submodule, nn.Dropout) and submodule.p > 0.0 for submodule in module.modules())


def has_right_dropout(device: torch.device) -> bool:
    """Return whether compiled dropout is right on a device; the cache folder keeps the answer for this PyTorch."""
    facts = repr((torch.__version__, device.type, device_name(device))).encode()
    judge = partial(_judge_dropout, device)
    try:
        return recall_verdict([facts, Path(__file__).read_bytes()], judge).text == PASSED
    except OSError:
        return judge() == PASSED


def _judge_dropout(device: torch.device) -> str:
    """Return `PASSED` if compiled dropout draws independent elements and differentiates the mask that it applied."""
    devices = [device] if device.type == "cuda" else []
    run = torch.compile(_drop_twice, fullgraph=True, dynamic=False, options={"deterministic": True})
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)
        inputs = [torch.ones(_SHAPE, device=device, requires_grad=True) for _ in range(2)]
        outputs = run(*inputs)
        torch.autograd.backward([output.sum() for output in outputs])
    are_right = [_is_half_dropped(x, y.detach() == 0.0) for x, y in zip(inputs, outputs, strict=True)]
    return PASSED if all(are_right) else "wrong"


def _is_half_dropped(x: Tensor, is_zero: Tensor) -> bool:
    """Return whether independent halves of the elements were dropped, and the gradient of `x` has the same zeros."""
    assert x.grad is not None
    pairs = [is_zero[..., :-distance] == is_zero[..., distance:] for distance in (1, 2, 3)]
    shares = [float(each.float().mean()) for each in (is_zero, *pairs)]
    has_same_zeros = torch.equal(is_zero, x.grad.transpose(1, 2) == 0.0)
    return has_same_zeros and max(abs(share - 0.5) for share in shares) <= _DRIFT


def _drop_twice(x: Tensor, recomputed: Tensor) -> tuple[Tensor, Tensor]:
    """Drop half of the elements of two tensors, whose masks the backward pass keeps and draws again."""
    again: Tensor = checkpoint(_drop, recomputed, use_reentrant=False)
    return _drop(x), again


def _drop(x: Tensor) -> Tensor:
    # Dropout of a plain contiguous tensor is right even where this one is wrong.
    return F.dropout(x.transpose(1, 2).contiguous(), 0.5, training=True)
