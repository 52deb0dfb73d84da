"""Record what the library computes, and compare another version of the code with that record.

    python -m tests.golden record FILE
    python -m tests.golden compare FILE

A change that should change nothing (a move, a renaming, a merge) leaves every entry equal. `tests/golden/record.json`
is the record of the code before its files moved; its first line names the machine.
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

MOST_SHOWN = 20


def main() -> int:
    """Run one of the two commands and return the exit code: 1 if an entry differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, metavar="FILE", help="the record, as JSON")
    chosen = parser.parse_args()
    from tests.golden.entries import record_all
    from tests.golden.records import Golden

    if chosen.command == "compare" and not chosen.file.is_file():
        parser.error(f"{chosen.file}: no such record; make it with `python -m tests.golden record {chosen.file}`")
    golden = Golden.of_here(record_all(report=lambda line: print(line, file=sys.stderr, flush=True)))
    if chosen.command == "record":
        golden.write(chosen.file)
        print(f"{len(golden.entries):,} entries written to {chosen.file}")
        return 0
    expected = Golden.read(chosen.file)
    differences = expected.differences(golden)
    for line in differences[:MOST_SHOWN]:
        print(line)
    if len(differences) > MOST_SHOWN:
        print(f"... and {len(differences) - MOST_SHOWN:,} more")
    rule = "bitwise" if expected.machine == golden.machine else "within the bounds for another machine"
    print(f"{len(expected.entries):,} entries compared {rule}: {len(differences):,} differ")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
