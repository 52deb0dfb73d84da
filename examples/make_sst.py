"""Make tables for a classifier from the Stanford Sentiment Treebank: sentences, and phrases of training trees.

Usage: python examples/make_sst.py SST2_FOLDER TREES_FOLDER [FOLDER]

SST2_FOLDER holds train.txt, dev.txt and test.txt; each line is a label 0 or 1, a space and a sentence. TREES_FOLDER
holds files of the same names with the trees of these sentences and of neutral sentences, one per line.

The outputs are:

- train.tsv, valid.tsv and test.tsv: the sentences with their labels.
- train-5.tsv: every twentieth training sentence.
- phrases.tsv: the training sentences, and all phrases of their trees that are not neutral.
- sentences.txt: the training sentences without labels, including neutral ones.

No validation or test sentence occurs in the training data.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

NAMES = {"0": "negative", "1": "positive"}
PARTS = {"train": "train", "dev": "valid", "test": "test"}
FEW = 20
_PIECE = re.compile(r"\(|\)|[^\s()]+")

Example = tuple[str, str]


def phrases(tree: str) -> Iterator[tuple[str, int]]:
    """Yield the text and the sentiment, 0 to 4, of every node of a tree such as "(3 (2 a) (4 joy))", the root last.

    Args:
        tree: the line of the tree; brackets in the sentence are written -LRB- and -RRB-.
    """
    open_nodes: list[tuple[int, list[str]]] = []
    pieces = _PIECE.findall(tree)
    for before, piece in zip(["", *pieces], pieces, strict=False):
        if piece == ")":
            sentiment, words = open_nodes.pop()
            yield " ".join(words), sentiment
            if open_nodes:
                open_nodes[-1][1].extend(words)
        elif before == "(":
            open_nodes.append((int(piece), []))
        elif piece != "(":
            open_nodes[-1][1].append(piece)


def labelled_phrases(trees: Iterable[str], *, held_out: set[str]) -> tuple[list[Example], int]:
    """Return the distinct phrases that are not neutral, and the number of phrases dropped for having both labels.

    Args:
        trees: the lines of the trees.
        held_out: the sentences to exclude.
    """
    labels: dict[str, str] = {}
    ambiguous: set[str] = set()
    for tree in trees:
        for text, sentiment in phrases(tree):
            # Only the trees distinguish case: "Good film" may have sentiment 4, and "good film" 3 or 1.
            text = text.lower()
            if sentiment == 2 or text in held_out:
                continue
            label = NAMES["1" if sentiment > 2 else "0"]
            if labels.setdefault(text, label) != label:
                ambiguous.add(text)
    return [(text, label) for text, label in labels.items() if text not in ambiguous], len(ambiguous)


def read_sentences(path: Path) -> list[Example]:
    """Return the sentences of an SST-2 file with the names of their labels."""
    rows = [line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(text, NAMES[label]) for label, text in rows]


def write_table(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as a table with a header line."""
    rows = [("text", "label"), *examples]
    path.write_text("".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")


def make_sst(sentences: Path, trees: Path, folder: Path) -> None:
    """Write all output files.

    Args:
        sentences: the folder of SST-2.
        trees: the folder of the trees.
        folder: the output folder; it is created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: read_sentences(sentences / f"{source_name}.txt") for source_name, name in PARTS.items()}
    held_out = {text for name in ("valid", "test") for text, _ in parts[name]}
    # A few training sentences also occur in the validation or test set; they are removed from training.
    train = list(dict.fromkeys((text, label) for text, label in parts["train"] if text not in held_out))
    lines = (trees / "train.txt").read_text(encoding="utf-8").splitlines()
    phrases_found, num_ambiguous = labelled_phrases(lines, held_out=held_out)
    whole = {text for text, _ in phrases_found}
    missing = [example for example in train if example[0] not in whole]
    plain = dict.fromkeys(list(phrases(line))[-1][0].lower() for line in lines)
    for name, examples in (("train", train), ("valid", parts["valid"]), ("test", parts["test"])):
        write_table(folder / f"{name}.tsv", examples)
    write_table(folder / "train-5.tsv", train[::FEW])
    write_table(folder / "phrases.tsv", [*phrases_found, *missing])
    unlabelled = [text for text in plain if text not in held_out]
    (folder / "sentences.txt").write_text("".join(f"{text}\n" for text in unlabelled), encoding="utf-8")
    print(
        f"train.tsv: {len(train):,} sentences; {len(parts['train']) - len(train):,} repeated or held out were dropped"
    )
    print(f"valid.tsv: {len(parts['valid']):,} sentences; test.tsv: {len(parts['test']):,} sentences")
    print(
        f"phrases.tsv: {len(phrases_found) + len(missing):,} phrases; {num_ambiguous:,} with both labels were dropped"
    )
    print(f"of the training sentences {len(train) - len(missing):,} of {len(train):,} are among the phrases")
    print(f"sentences.txt: {len(unlabelled):,} sentences without labels")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    make_sst(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3] if len(sys.argv) == 4 else "examples/data/sst"))
