"""Baselines without a neural network, which a trained model should beat."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

Pairs = Sequence[tuple[str, str]]


def words(text: str) -> list[str]:
    """Return the words of a text; full stops and commas are separate words."""
    return text.replace(".", " . ").replace(",", " , ").split()


def word_table(pairs: Pairs) -> dict[str, str]:
    """Return the best target word for each source word, by Dice's coefficient of co-occurrence."""
    together: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sources: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    for source, target in pairs:
        ours, theirs = set(words(source)), set(words(target))
        sources.update(ours)
        targets.update(theirs)
        for word in ours:
            together[word].update(theirs)
    return {
        word: max(counts, key=lambda other: (counts[other] / (sources[word] + targets[other]), other))
        for word, counts in together.items()
    }


def join_tokens(tokens: Iterable[str]) -> str:
    """Return the text of words that `words` has split."""
    return " ".join(tokens).replace(" .", ".").replace(" ,", ",")


def word_by_word(pairs: Pairs, sources: Sequence[str]) -> list[str]:
    """Translate texts word by word; unknown words stay unchanged."""
    table = word_table(pairs)
    return [join_tokens(table.get(word, word) for word in words(source)) for source in sources]


class TfIdf:
    """Search index of texts: TF-IDF vectors of length 1.

    Args:
        texts: the texts to search; the inverse document frequency is counted in them.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(words(text.lower())) for text in texts]
        counts = Counter(word for bag in bags for word in bag)
        self._size = len(texts)
        self._rarity = {word: math.log(len(texts) / count) + 1 for word, count in counts.items()}
        rows: defaultdict[str, list[int]] = defaultdict(list)
        weights: defaultdict[str, list[float]] = defaultdict(list)
        for row, bag in enumerate(bags):
            vector = self._vector(bag)
            length = math.sqrt(sum(value * value for value in vector.values())) or 1.0
            for word, value in vector.items():
                rows[word].append(row)
                weights[word].append(value / length)
        self._rows = {word: np.array(numbers) for word, numbers in rows.items()}
        self._weights = {word: np.array(numbers) for word, numbers in weights.items()}

    def _vector(self, bag: Counter[str]) -> dict[str, float]:
        return {word: (1 + math.log(count)) * self._rarity.get(word, 0.0) for word, count in bag.items()}

    def nearest(self, text: str) -> int:
        """Return the index of the searched text whose vector has the largest cosine to that of `text`."""
        scores = np.zeros(self._size)
        for word, value in self._vector(Counter(words(text.lower()))).items():
            if word in self._rows:
                scores[self._rows[word]] += value * self._weights[word]
        return int(scores.argmax())


def nearest_sentence(pairs: Pairs, sources: Sequence[str]) -> list[str]:
    """Translate each source by the target of the training source that is nearest by TF-IDF."""
    known = TfIdf([source for source, _ in pairs])
    return [pairs[known.nearest(source)][1] for source in sources]


def translation_recall(pairs: Pairs, sources: Sequence[str], targets: Sequence[str]) -> float:
    """Return the mean recall@1 of both directions in percent, by TF-IDF of texts translated word by word."""
    shares = []
    for train, queries, choices in (
        (pairs, sources, targets),
        ([(target, source) for source, target in pairs], targets, sources),
    ):
        known = TfIdf(choices)
        hits = [known.nearest(query) == row for row, query in enumerate(word_by_word(train, queries))]
        shares.append(sum(hits) / len(hits))
    return 100 * sum(shares) / 2


def ngram_bits(train: str, test: str, *, order: int = 5) -> float:
    """Return the bits per character of n-grams of characters with Witten-Bell interpolation.

    Source: Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling", section 2.3.
    """
    counts: list[defaultdict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(order)]
    for index, letter in enumerate(train):
        for length in range(min(order - 1, index) + 1):
            counts[length][train[index - length : index]][letter] += 1
    alphabet = len(set(train)) + 1
    bits = 0.0
    for index, letter in enumerate(test):
        probability = 1 / alphabet
        for length in range(min(order - 1, index) + 1):
            seen = counts[length].get(test[index - length : index])
            if seen is None:
                break
            total, kinds = seen.total(), len(seen)
            probability = (seen[letter] + kinds * probability) / (total + kinds)
        bits -= math.log2(probability)
    return bits / len(test)


def naive_bayes(train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> float:
    """Return the accuracy in percent of naive Bayes over words and pairs of words, for (text, label)."""

    def features(text: str) -> list[str]:
        tokens = text.lower().split()
        return [*tokens, *map(" ".join, itertools.pairwise(tokens))]

    by_label: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sizes: Counter[str] = Counter()
    for text, label in train:
        by_label[label].update(features(text))
        sizes[label] += 1
    num_known = len({feature for counts in by_label.values() for feature in counts})
    totals = {label: counts.total() for label, counts in by_label.items()}

    def score(label: str, text: str) -> float:
        counts, below = by_label[label], totals[label] + num_known
        return math.log(sizes[label]) + sum(math.log((counts[feature] + 1) / below) for feature in features(text))

    right = sum(max(by_label, key=lambda label: score(label, text)) == answer for text, answer in test)
    return 100 * right / len(test)


def commonest_tags(train: Sequence[Sequence[tuple[str, str]]], test: Sequence[Sequence[tuple[str, str]]]) -> float:
    """Return the accuracy in percent of the most frequent tag of each word, or of all words if it is unknown."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    whole: Counter[str] = Counter()
    for sentence in train:
        for word, tag in sentence:
            counts[word][tag] += 1
            whole[tag] += 1
    usual = whole.most_common(1)[0][0]
    best = {word: tag_counts.most_common(1)[0][0] for word, tag_counts in counts.items()}
    answers = [best.get(word, usual) == tag for sentence in test for word, tag in sentence]
    return 100 * sum(answers) / len(answers)


def nearest_words(questions: Sequence[tuple[str, str]], length: int) -> list[str]:
    """Answer each question with the words of its context that are nearest to the words of the question.

    Args:
        questions: the pairs of context and question.
        length: the number of words of an answer.

    Source: Richardson et al. 2013, "MCTest", section 4.1.
    """
    return [_nearest_words(context, question, length) for context, question in questions]


def _nearest_words(context: str, question: str, length: int) -> str:
    matches = list(re.finditer(r"\w+", context))
    known = [match[0].lower() for match in matches]
    question_words = set(re.findall(r"\w+", question.lower()))
    places = {word: [index for index, other in enumerate(known) if other == word] for word in question_words}
    rarity = {word: math.log(1 + 1 / len(where)) for word, where in places.items() if where}

    def score(start: int) -> float:
        nearest = {word: min(abs(position - start) for position in places[word]) for word in rarity}
        return sum(rarity[word] / (1 + nearest[word]) for word in rarity)

    starts = range(max(1, len(matches) - length + 1))
    free = [start for start in starts if question_words.isdisjoint(known[start : start + length])] or starts
    best = max(free, key=score)
    return context[matches[best].start() : matches[min(best + length, len(matches)) - 1].end()]


def commonest_token(train: Sequence[Sequence[int]], test: Sequence[Sequence[int]]) -> float:
    """Return the share in percent of tokens that equal the most frequent training token."""
    usual = Counter(token for text in train for token in text).most_common(1)[0][0]
    tokens = [token for text in test for token in text]
    return 100 * sum(token == usual for token in tokens) / len(tokens)
