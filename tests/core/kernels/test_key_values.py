"""The buffer of cached keys and values equals their concatenation, however it grows and whichever rows are kept."""

from __future__ import annotations

import torch

from clearhead.core.kernels.key_values import KeyValues


def test_what_was_appended_and_selected_is_returned() -> None:
    cache, keys, values = KeyValues(), torch.empty(3, 2, 0, 5), torch.empty(3, 2, 0, 5)
    cache.select(torch.tensor([0]))
    for new, rows in ((7, [0, 1, 2]), (11, [2, 0]), (1, [1, 1, 0]), (23, [2, 1, 0, 0])):
        key, value = torch.randn(len(keys), 2, new, 5), torch.randn(len(keys), 2, new, 5)
        keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        views = cache.append(key, value)
        assert torch.equal(views[0], keys) and torch.equal(views[1], values)
        cache.select(torch.tensor(rows))
        keys, values = keys[rows], values[rows]
    assert cache.length == 42
