"""Make random strings and their copies or reversals: the data of copy.toml and reverse.toml.

Usage: python examples/make_strings.py copy|reverse [FOLDER]
"""

from __future__ import annotations

import random
import string
import sys
from pathlib import Path

TRAINED_LENGTHS = range(1, 21)
LONGER_LENGTHS = range(21, 31)
PARTS = {"train": (100_000, TRAINED_LENGTHS), "valid": (500, TRAINED_LENGTHS), "test": (1_000, TRAINED_LENGTHS)}


def make_strings(task: str, folder: Path, seed: int = 0) -> None:
    """Write the sets `train`, `valid`, `test` and `longer`, each as a .source and a .target file.

    Args:
        task: the task, "copy" or "reverse".
        folder: the output folder; it is created.
        seed: the seed of the random letters; no string occurs in two sets.
    """
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    for split, (count, lengths) in {**PARTS, "longer": (500, LONGER_LENGTHS)}.items():
        strings = []
        while len(strings) < count:
            # Strings with few distinct letters repeat them, so that neighbouring letters do not determine a position.
            letters = generator.sample(string.ascii_lowercase, generator.randint(2, len(string.ascii_lowercase)))
            text = "".join(generator.choices(letters, k=generator.choice(lengths)))
            # Strings of one or two letters may repeat within the training set, since there are too few of them.
            if text not in seen or (split == "train" and len(text) <= 2):
                strings.append(text)
                seen.add(text)
        targets = strings if task == "copy" else [text[::-1] for text in strings]
        for side, lines in (("source", strings), ("target", targets)):
            (folder / f"{split}.{side}").write_text("".join(" ".join(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in ("copy", "reverse"):
        sys.exit(__doc__)
    make_strings(sys.argv[1], Path(sys.argv[2] if len(sys.argv) == 3 else f"examples/data/{sys.argv[1]}"))
