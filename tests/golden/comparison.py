"""Comparison of the results of a device with the record for its kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.golden.records import Golden, describe_machine

MOST_SHOWN = 20


def default_name(device: str) -> str:
    """Return the name of the file for a device and this version of PyTorch."""
    facts = describe_machine(device)
    return "record-" + re.sub("[^a-z0-9.]+", "-", f"{facts['device']} {facts['torch']}".lower()) + ".json"


def compare_device(device: str, folder: Path, computed: Callable[[str], Golden]) -> int:
    """Compare a device with its record and return the exit code; a device without a record is named and passes."""
    expected = Golden.find(folder, device)
    if expected is None:
        facts = describe_machine(device)
        print(
            f"no record of {facts['device']} with torch {facts['torch']}: nothing is compared; "
            f"make one with `python -m tests.golden record --device {device}`"
        )
        return 0
    return compare(expected, computed(device))


def compare(expected: Golden, golden: Golden) -> int:
    """Print the differences of two records and return the exit code."""
    differences = expected.differences(golden)
    for line in differences[:MOST_SHOWN]:
        print(line)
    if len(differences) > MOST_SHOWN:
        print(f"... and {len(differences) - MOST_SHOWN:,} more")
    rule = "bitwise" if expected.is_bitwise(golden) else "within the bounds for another machine or a GPU"
    print(f"{len(expected.entries):,} entries compared {rule}: {len(differences):,} differ")
    return 1 if differences else 0
