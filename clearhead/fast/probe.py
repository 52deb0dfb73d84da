"""What the processor can do: the one place that asks it, so that tests and benchmarks can hide what it has."""

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
"""The environment variable that names instruction sets to be hidden, with commas between them."""
NEEDS: Final = {
    "avx2": (),
    "avx_vnni": ("avx2",),
    "avx512": ("avx2",),
    "avx512_vnni": ("avx512",),
    "avx512_bf16": ("avx512",),
    "amx": ("avx512_vnni", "avx512_bf16"),
}
"""Every instruction set that kernels ask for, and those without which it is not used."""
_FLAGS: Final = {
    "avx2": ("avx2", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
    "amx": ("amx_tile", "amx_int8", "amx_bf16"),
}
_MOST: Final = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
"""The environment variables that hide instruction sets from oneDNN."""
_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A processor.

    Attributes:
        vendor: as Linux says it ("GenuineIntel", "AuthenticAMD"); elsewhere "".
        isa: the instruction sets that are used.
        hidden: those that it has, and that are not used: hidden by the environment, or denied by the system.
        torch_kernels: what the kernels of PyTorch use, as it says ("AVX2", "AVX512").
        description: the lines of Linux that tell it from others.
    """

    vendor: str
    isa: frozenset[str]
    hidden: frozenset[str]
    torch_kernels: str
    description: tuple[str, ...]


@cache
def processor() -> Processor:
    """Return what the processor of this machine can do.

    Raises:
        InputError: the environment variable names what is no instruction set.
    """
    lines = _lines()
    flags = {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
    if not lines and torch.cpu._is_avx512_bf16_supported():
        flags |= {"avx512_bf16", *_FLAGS["avx2"], *_FLAGS["avx512"]}
    has = {name for name in NEEDS if flags.issuperset(_FLAGS.get(name, (name,)))}
    isa = has - _read_hidden_names()
    # Tiles are part of a process only once the system was asked for them.
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
    """Return whether matrix products in bfloat16 are faster than in float32 on a device."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and "avx512_bf16" in processor().isa


@cache
def has_exact_int_mm() -> bool:
    """Return whether PyTorch multiplies matrices in 8 bits fast, which takes AVX-512 VNNI that oneDNN may use.

    Where the environment hides it, sums of pairs no longer fit into their 16 bits, and results are wrong; without it
    PyTorch multiplies number by number.
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
        raise InputError(f"{HIDE} must name instruction sets among {', '.join(NEEDS)}; got '{wrong[0]}'")
    return names
