"""Draw the rows of a table to hold out for validation: at random, by label, and without texts of training rows."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

HELD_OUT_SEED = 1
"""Fixed seed: runs with different `train.seed` are validated on the same rows, so their scores are comparable."""
_ROUNDING = 1e-6

Keys = Sequence[Sequence[Hashable]]
Labels = Sequence[Hashable] | None


def draw_rows(keys: Keys, share: float, labels: Labels = None) -> list[int]:
    """Draw validation rows: at most `share` of all rows, and at most `share` of each label's rows, rounded up.

    Args:
        keys: the texts of each row. Rows with a common text stay together, and rows without a text are not drawn.
        share: the share of the rows to hold out, above 0 and below 1.
        labels: the label of each row, or a tuple of several labels. Every label also remains on a row that is not
            drawn. None means that rows have no labels.

    Returns:
        The row numbers in ascending order; empty if every row shares a text or a label with too many others.
    """
    groups = [group for group in group_rows(keys) if keys[group[0]]]
    random.Random(HELD_OUT_SEED).shuffle(groups)
    names = _names(groups, labels)
    remaining = Counter(itertools.chain.from_iterable(names))
    strata: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, of_group in enumerate(names):
        strata[min(of_group, key=remaining.__getitem__, default=None)].append(number)
    sizes = {label: sum(len(groups[number]) for number in strata[label]) for label in strata}
    held: list[int] = []
    most, quota = max(1, round(share * sum(sizes.values()))), 0.0
    # The rarest label first: its quota is rounded up, and the other labels share the rest.
    for label in sorted(sizes, key=sizes.__getitem__):
        size = share * sizes[label] - _ROUNDING
        # A label with a single group cannot be on both sides.
        quota += size * (len(strata[label]) > 1)
        room = min(math.ceil(quota - len(held)), math.ceil(size), most - len(held))
        for number in strata[label]:
            if len(groups[number]) <= room and all(remaining[name] > 1 for name in names[number]):
                held += groups[number]
                room -= len(groups[number])
                remaining.subtract(names[number])
    return sorted(held)


def _names(groups: Sequence[Sequence[int]], labels: Labels) -> list[list[Hashable]]:
    """Return the labels of each group of rows; without labels, all groups get the same placeholder."""
    if labels is None:
        return [[None]] * len(groups)
    rows = [label if isinstance(label, tuple) else (label,) for label in labels]
    return [list(dict.fromkeys(name for row in group for name in rows[row])) for group in groups]


def group_rows(keys: Keys) -> list[list[int]]:
    """Group rows that are linked by common keys; the groups are ordered by their first row."""
    parents = list(range(len(keys)))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    first: dict[Hashable, int] = {}
    for row, row_keys in enumerate(keys):
        for key in row_keys:
            earlier, later = sorted((root(row), root(first.setdefault(key, row))))
            parents[later] = earlier
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row in range(len(keys)):
        groups[root(row)].append(row)
    return list(groups.values())
