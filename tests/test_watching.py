"""Progress: every batch is reported once it is done, and only inside the with block."""

from __future__ import annotations

import pytest

from clearhead.generate.batching import batches_by_cost
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions
from clearhead.watching import watched, watching_batches, watching_tokens
from tests.laws.tiny import tiny


def test_a_batch_is_reported_when_the_next_one_is_asked_for() -> None:
    reports: list[tuple[int, int]] = []
    batches = watched([[1, 2], [3], [4, 5, 6]], total=6)
    assert next(batches) == [1, 2]
    with watching_batches(lambda done, total: reports.append((done, total))):
        assert next(batches) == [3] and reports == [(2, 6)]
        assert list(batches) == [[4, 5, 6]] and reports == [(2, 6), (3, 6), (6, 6)]
    assert list(watched([[1]], total=1)) == [[1]] and len(reports) == 3


def test_batches_of_predictions_are_watched() -> None:
    reports: list[tuple[int, int]] = []
    with watching_batches(lambda done, total: reports.append((done, total))):
        batches = list(batches_by_cost([3, 1, 4, 1, 5], budget=8, most_rows=None))
    assert (
        reports[-1] == (5, 5)
        and len(reports) == len(batches)
        and sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    )


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beam_size": 2}])
def test_tokens_of_a_text_are_watched(options: dict[str, float]) -> None:
    module, reports = tiny("decoder/post/learned"), list[tuple[int, int]]()
    request = GenerateRequest([[3, 5]], GenerateOptions(max_new_tokens=4, **options), eos_id=1, pad_id=0)  # type: ignore[arg-type]
    with watching_tokens(lambda done, total: reports.append((done, total))):
        generate_ids(module, request)
    assert reports[:3] == [(1, 4), (2, 4), (3, 4)]
