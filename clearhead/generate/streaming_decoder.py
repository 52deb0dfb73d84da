"""Decoding of a token stream: whole characters only, and nothing that may become a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

UNFINISHED = "\ufffd"
"""What decoders return for bytes that are not, or not yet, a whole character."""
_LONGEST_WINDOW = 24
_KEPT_OF_WINDOW = 8


class StreamingDecoder:
    """Decodes ids one at a time, at constant cost per step.

    The parts that `add` and `finish` return are together the text of the ids after that of their context, up to the
    first stop text: the one whose last character comes first.

    Args:
        decode: ids to text; the text of more ids starts with that of fewer, except for an unfinished last character.
        stops: stop texts, none empty.
        context: ids before the first one; their text is not returned, but a space after it is.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.is_stopped: bool = False
        self._decode = decode
        self._stops = tuple(stops)
        self._window, self._known = _context_window(decode, list(context))
        self._held = ""

    def add(self, token: int) -> str:
        """Add the next id and return the text that is now final."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(UNFINISHED):
            return ""  # the next bytes may change it
        fresh, self._known = text[self._known :], max(self._known, len(text))
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten_window(text)
        return self._release(fresh)

    def finish(self) -> str:
        """Return the text held back, after the last id."""
        if self.is_stopped:
            return ""
        fresh = self._decode(self._window)[self._known :] if self._window else ""
        shown = self._release(fresh)
        held, self._held = self._held, ""
        return shown + held

    def _shorten_window(self, text: str) -> None:
        """Drop the older ids if the newer ones alone decode to the same characters."""
        newer = self._window[-_KEPT_OF_WINDOW:]
        alone = self._decode(newer)
        if alone and UNFINISHED not in alone and text.endswith(alone):
            self._window, self._known = newer, len(alone)

    def _release(self, fresh: str) -> str:
        """Return the new text up to a possible start of a stop text; note when one is complete."""
        text = self._held + fresh
        stops = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if stops:
            self.is_stopped, self._held = True, ""
            return text[: min(stops)[1]]
        held = _longest_start(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _longest_start(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of a text are the start of a stop text."""
    longest = min(max((len(stop) for stop in stops), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(s.startswith(text[-size:]) for s in stops)), 0)


def _context_window(decode: Decode, context: list[int]) -> tuple[list[int], int]:
    """Return the last ids of the context that decode to whole characters, and the length of their text."""
    for window in (context[-_KEPT_OF_WINDOW:], context):
        text = decode(window) if window else ""
        if text and UNFINISHED not in text:
            break
    return list(window), len(text)


def continuation_text(decode: Decode, ids: Sequence[int], context: Sequence[int]) -> str:
    """Return the text of ids after that of their context."""
    window, known = _context_window(decode, list(context))
    return decode([*window, *ids])[known:]
