"""Record results of the library, and compare another version of the code with the record.

    python -m tests.golden record [FILE] [--device cpu|cuda|mps]
    python -m tests.golden compare [FILE] [--device cpu|cuda|mps]

A change that should change nothing (a move, a renaming, a merge) leaves every entry equal. `tests/golden` has a record
for each device and version of PyTorch that one was made with; the first line of a record names them. `compare` without
FILE compares every device of this machine with its record, and says which device has none.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Set before torch is imported: sums depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.golden.comparison import compare, compare_device, default_name
from tests.golden.records import Golden

FOLDER = Path(__file__).parent


def main() -> int:
    """Run one of the two commands and return the exit code: 1 if an entry differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, metavar="FILE", nargs="?", help="the record, as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help="computes the entries; default: the CPU")
    chosen = parser.parse_args()
    device = chosen.device or "cpu"
    if chosen.command == "record":
        golden = compute(device)
        file = chosen.file or FOLDER / default_name(device)
        golden.write(file)
        print(f"{len(golden.entries):,} entries written to {file}")
        return 0
    if chosen.file is None:
        return max(
            [compare_device(each, FOLDER, compute) for each in ([chosen.device] if chosen.device else devices())]
        )
    if not chosen.file.is_file():
        parser.error(f"{chosen.file}: no such record; make it with `python -m tests.golden record {chosen.file}`")
    return compare(Golden.read(chosen.file), compute(device))


def compute(device: str) -> Golden:
    """Compute every entry on a device."""
    from tests.golden.entries import record_all

    return Golden.of_here(record_all(lambda line: print(line, file=sys.stderr, flush=True), device), device)


def devices() -> list[str]:
    """Return the kinds of devices that this machine has."""
    import torch

    has = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [device for device, is_here in has.items() if is_here]


if __name__ == "__main__":
    sys.exit(main())
