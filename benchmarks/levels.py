"""Speed of linear layers for each instruction level of this processor, compared with PyTorch, in turns.

    python benchmarks/levels.py [--rows 1 8 64 512] [--outputs 3072] [--inputs 768] [--copies 24] [--rounds 7]

Only the kernels of linear layers are compiled for each level. Calls use `copies` matrices in turn. Printed
are GFLOP/s with two threads, in fp32 and with 8-bit weights: the median of the rounds with its spread. In fp32 the
ratio to PyTorch in the same rounds follows, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pairing import Ratio, Spread

from clearhead.fast.native import build, options
from clearhead.fast.probe import processor


def compile_level(level: str, folder: Path) -> ctypes.CDLL:
    """Compile the kernels of linear layers for a level and load them."""
    file = folder / f"{level}.so"
    command = options.command("g++", options.INFERENCE, options.LEVELS[level][1])
    source = build.FOLDER / options.INFERENCE / "linear.cpp"
    subprocess.run([*command, "-w", "-shared", str(source), "-o", str(file)], check=True)
    return ctypes.CDLL(str(file))


def multiply(
    library: ctypes.CDLL,
    kind: str,
    x: torch.Tensor,
    vectors: tuple[torch.Tensor, ...],
    y: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """Write x weight^T + bias into y; the vectors are the bias, and before it the scale of 8-bit weights."""
    sizes = [ctypes.c_int64(size) for size in (len(x), *weight.shape, 2)]
    getattr(library, f"linear_{kind}")(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, weight, *vectors, y)), *sizes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    for name, default in {"outputs": 3072, "inputs": 768, "copies": 24, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    shape, bias = (arguments.outputs, arguments.inputs), torch.randn(arguments.outputs)
    scale = torch.rand(arguments.outputs)
    weights = {
        "float32": [torch.randn(shape) for _ in range(arguments.copies)],
        "int8": [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in range(arguments.copies)],
    }

    with tempfile.TemporaryDirectory() as name:
        levels = [level for level, (isa, _) in options.LEVELS.items() if processor().isa.issuperset(isa)]
        libraries = {level: compile_level(level, Path(name)) for level in levels}
        for kind, copies in weights.items():
            for rows in arguments.rows:
                rates: dict[str, list[float]] = {}
                x, y = torch.randn(rows, arguments.inputs), torch.empty(rows, arguments.outputs)
                vectors = (scale, bias) if kind == "int8" else (bias,)
                sides: dict[str, Callable[[torch.Tensor], object]] = {
                    level: partial(multiply, library, kind, x, vectors, y) for level, library in libraries.items()
                }
                if kind == "float32":
                    sides["PyTorch"] = partial(torch.nn.functional.linear, x, bias=bias)
                work = 2e-9 * rows * arguments.outputs * arguments.inputs * arguments.copies
                for _ in range(arguments.rounds):
                    for side, run in sides.items():
                        began = time.perf_counter()
                        for weight in copies:
                            run(weight)
                        rates.setdefault(side, []).append(work / (time.perf_counter() - began))
                for side, figures in rates.items():
                    peer = rates.get("PyTorch")
                    beside = f", {Ratio.of(figures, peer)} of PyTorch" if peer and side != "PyTorch" else ""
                    print(f"{kind}, {rows} rows, {side}: {Spread.of(figures)}{beside}", flush=True)


if __name__ == "__main__":
    main()
