"""Progress: every batch is reported to the display when it is done, and only inside the with block."""

from __future__ import annotations

import pytest

from clearhead.base.progress import counter, message, report_batches, use_display
from clearhead.generate.batching import batches_by_cost
from clearhead.generate.continuation import GenerateRequest, generate_ids
from clearhead.generate.options import GenerateOptions
from tests.laws.tiny import tiny
from tests.recording_display import RecordingDisplay


def test_a_batch_is_reported_when_the_next_one_is_asked_for() -> None:
    display = RecordingDisplay()
    batches = report_batches([[1, 2], [3], [4, 5, 6]], total=6)
    assert next(batches) == [1, 2]
    with use_display(display):
        assert next(batches) == [3] and display.counts == [(2, 6)]
        assert list(batches) == [[4, 5, 6]] and display.counts == [(2, 6), (3, 6), (6, 6)]
    assert list(report_batches([[1]], total=1)) == [[1]] and len(display.counts) == 3


def test_the_innermost_display_shows_and_then_the_one_around_it() -> None:
    message("nobody shows this")
    with use_display(outer := RecordingDisplay()):
        with use_display(inner := RecordingDisplay()):
            message("inside")
        message("outside")
    assert inner.messages == ["inside"] and outer.messages == ["outside"]


def test_a_caller_is_notified_in_place_of_the_display() -> None:
    notified: list[tuple[int, int]] = []
    with use_display(display := RecordingDisplay("heads")):
        counter("heads")(1, 2)
        counter("heads", lambda done, total: notified.append((done, total)))(2, 2)
    assert display.counts == [(1, 2)] and notified == [(2, 2)]


def test_batches_of_predictions_are_counted() -> None:
    with use_display(display := RecordingDisplay()):
        batches = list(batches_by_cost([3, 1, 4, 1, 5], budget=8, most_rows=None))
    assert (
        display.counts[-1] == (5, 5)
        and len(display.counts) == len(batches)
        and sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    )


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beam_size": 2}])
def test_tokens_of_a_text_are_counted(options: dict[str, float]) -> None:
    module = tiny("decoder/post/learned")
    # Random weights: without a minimum, the end token could come before the limit.
    chosen = GenerateOptions(max_new_tokens=4, min_new_tokens=4, **options)  # type: ignore[arg-type]
    request = GenerateRequest([[3, 5]], chosen, eos_id=1, pad_id=0)
    with use_display(display := RecordingDisplay("tokens")):
        generate_ids(module, request)
    assert display.counts[:3] == [(1, 4), (2, 4), (3, 4)]
