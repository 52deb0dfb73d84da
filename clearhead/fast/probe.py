"""Detect the features of the processor, some of which tests and benchmarks can hide."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from clearhead.base.errors import InputError

HIDE: Final = "CLEARHEAD_HIDE_ISA"
"""Environment variable with instruction sets to hide, separated by commas."""
NEEDS: Final = {
    "avx2": (),
    "avx_vnni": ("avx2",),
    "avx512": ("avx2",),
    "avx512_vnni": ("avx512",),
    "avx512_bf16": ("avx512",),
    "amx": ("avx512_vnni", "avx512_bf16"),
}
"""Every instruction set that kernels use, and the sets that it requires."""
_FLAGS: Final = {
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
    "amx": ("amx_tile", "amx_int8", "amx_bf16"),
}
_MOST: Final = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
"""Environment variables that hide instruction sets from oneDNN."""
_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """Features of a processor.

    Attributes:
        vendor: name from Linux ("GenuineIntel", "AuthenticAMD"); empty on other systems.
        isa: instruction sets that are used.
        hidden: instruction sets that exist but are not used: hidden by the environment, or denied by the system.
        torch_kernels: instruction set of PyTorch's kernels, as PyTorch reports it ("AVX2", "AVX512").
        description: lines from Linux that distinguish this processor from others.
    """

    vendor: str
    isa: frozenset[str]
    hidden: frozenset[str]
    torch_kernels: str
    description: tuple[str, ...]


@cache
def processor() -> Processor:
    """Return the features of this machine's processor.

    Raises:
        InputError: the environment variable names an unknown instruction set.
    """
    lines = _lines()
    flags = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    if not lines and torch.cpu._is_avx512_bf16_supported():
        flags |= {"avx512_bf16", *_FLAGS["avx2"], *_FLAGS["avx512"]}
    has = {name for name in NEEDS if flags.issuperset(_FLAGS.get(name, (name,)))}
    isa = has - _read_hidden_names()
    # A process may use tiles only after it has asked the system for them.
    if "amx" in isa and not torch.cpu._init_amx():
        isa.remove("amx")
    for name, needs in NEEDS.items():
        if not isa.issuperset(needs):
            isa.discard(name)
    vendors = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    kernels = torch.backends.cpu.get_cpu_capability()
    description = tuple(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
    return Processor(next(iter(vendors), ""), frozenset(isa), frozenset(has - isa), kernels, description)


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies matrices faster in bfloat16 than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and "avx512_bf16" in processor().isa


@cache
def has_exact_int_mm() -> bool:
    """Return whether PyTorch multiplies 8-bit matrices fast and exactly, which needs AVX-512 VNNI in oneDNN.

    If the environment hides it from oneDNN, sums of pairs overflow 16 bits and results are wrong. Without it, PyTorch
    multiplies one number at a time.
    """
    shown = (os.environ.get(name, "DEFAULT").upper() for name in _MOST)
    is_hidden = any(limit != "DEFAULT" and not limit.startswith(("AVX512_CORE_", "AVX10_")) for limit in shown)
    return "avx512_vnni" in processor().isa and torch.backends.mkldnn.is_available() and not is_hidden


def _lines() -> list[str]:
    with contextlib.suppress(OSError):
        return _CPUINFO.read_text("utf-8", errors="replace").splitlines()
    return []


def _read_hidden_names() -> set[str]:
    names = {name.strip() for name in os.environ.get(HIDE, "").split(",")} - {""}
    if wrong := sorted(names - set(NEEDS)):
        raise InputError(f"{HIDE} must name instruction sets among {', '.join(NEEDS)}, got '{wrong[0]}'")
    return names
