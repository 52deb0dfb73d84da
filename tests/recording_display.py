"""A display that records its messages and counts."""

from __future__ import annotations

from clearhead.base.progress import Counted, Display


class RecordingDisplay(Display):
    def __init__(self, what: Counted = "examples") -> None:
        self.messages: list[str] = []
        self.counts: list[tuple[int, int]] = []
        self.what = what

    def message(self, text: str) -> None:
        self.messages.append(text)

    def update(self, done: int, total: int, what: Counted) -> None:
        if what == self.what:
            self.counts.append((done, total))
