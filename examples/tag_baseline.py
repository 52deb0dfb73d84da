"""Score a baseline without a model: each word's most frequent tag in training, and the most frequent tag for new words.

Usage: python examples/tag_baseline.py TRAIN.conll TEST.conll
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

from clearhead.data.sources.tables import DataTable
from clearhead.tasks.tag.data import DATA, read_tagged
from clearhead.tasks.tag.use import EntityScores, entity_f1


def most_frequent_tags(train: DataTable, test: DataTable) -> EntityScores:
    """Return the scores of the most frequent tags.

    Args:
        train: the sentences in which tags are counted.
        test: the sentences to score.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for words, tags in zip(train["tokens"], train["tags"], strict=True):
        total.update(tags)
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    best = {word: _commonest(tag_counts) for word, tag_counts in counts.items()}
    guesses = [[best.get(word, _commonest(total)) for word in words] for words in test["tokens"]]
    return entity_f1(guesses, test["tags"])


def _commonest(counts: Counter[str]) -> str:
    return min(counts, key=lambda tag: (-counts[tag], tag))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    scores = most_frequent_tags(*(read_tagged(DATA.source({"text": path})) for path in sys.argv[1:]))
    print(f"entity F1 {100 * scores.all.f1:.1f} %, words with the right tag {100 * scores.tag_accuracy:.1f} %")
