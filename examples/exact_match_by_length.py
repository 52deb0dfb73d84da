"""Translate a test file and print the exact-match rate for each source length.

Usage: python examples/exact_match_by_length.py RUN SOURCE TARGET
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import clearhead as ch


def exact_match_by_length(run: str, source: Path, target: Path) -> dict[int, tuple[int, int]]:
    """Return the numbers of exact matches and of lines for each source length in words."""
    sources = source.read_text(encoding="utf-8").splitlines()
    targets = target.read_text(encoding="utf-8").splitlines()
    outputs = ch.load(run).translate(sources, beam_size=1)
    lines, right = Counter[int](), Counter[int]()
    for text, wanted, output in zip(sources, targets, outputs, strict=True):
        length = len(text.split())
        lines[length] += 1
        right[length] += output == wanted
    return {length: (right[length], lines[length]) for length in sorted(lines)}


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    matches = exact_match_by_length(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    for length, (right, lines) in matches.items():
        print(f"length {length:3}  {right:4} of {lines:4} right  {100 * right / lines:5.1f} %")
    total_right, total = (sum(column) for column in zip(*matches.values(), strict=True))
    print(f"all         {total_right:4} of {total:4} right  {100 * total_right / total:5.1f} %")
