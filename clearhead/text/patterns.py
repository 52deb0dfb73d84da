"""Regular expressions of a stranger, judged before they are run: whether their time can explode."""

from __future__ import annotations

import re

LONGEST_PATTERN, MOST_REPEATS, MOST_OPEN_REPEATS = 2000, 1000, 4

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
# Groups whose time is that of their content. Others call themselves, look things up or run code.
_GROUP = re.compile(r"\((?:\?(?:[imsx-]*:|=|!|<=|<!|>|<\w+>|[imsx-]+(?=\))))?")


def pattern_fault(pattern: str) -> str | None:
    """Return why a pattern may take forever on some text; None: it takes at most polynomial time.

    A part that repeats may hold no part that repeats and no alternatives, which could be tried in exponentially many
    ways. Patterns of honest tokenizers never do.

    Args:
        pattern: in the syntax of Oniguruma.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"has {len(pattern)} characters, more than {LONGEST_PATTERN}"
    return _Judge(pattern).fault()


class _Judge:
    """Walks through a pattern once, with one entry for each open group: whether its length varies, open repeats."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0
        self.varies = [False]
        self.repeats = [0]
        self.most = [0]

    def fault(self) -> str | None:
        """Return the first fault."""
        while self.place < len(self.pattern):
            found = self._part()
            if found is not None:
                return found
        if len(self.varies) > 1:
            return "opens a group that it does not close"
        if max(self.most[0], self.repeats[0]) > MOST_OPEN_REPEATS:
            return f"repeats more than {MOST_OPEN_REPEATS} parts without a bound in one alternative"
        return None

    def _part(self) -> str | None:
        """Go over one character, class or bracket, with its quantifier."""
        sign = self.pattern[self.place]
        if sign == "(":
            return self._open()
        if sign == "|":
            self.varies[-1] = True
            self.most[-1], self.repeats[-1] = max(self.most[-1], self.repeats[-1]), 0
            self.place += 1
            return None
        varies, inner = False, 0
        if sign == ")":
            if len(self.varies) == 1:
                return "closes a group that it does not open"
            varies, inner = self.varies.pop(), max(self.most.pop(), self.repeats.pop())
            self.varies[-1] |= varies
            self.repeats[-1] += inner
            self.place += 1
        elif sign == "[":
            self._class()
        elif sign == "\\":
            following = self.pattern[self.place + 1 : self.place + 2]
            if following.isdigit() or following in ("k", "g"):
                return "refers back to what it has matched"
            self.place += 2
        else:
            self.place += 1
        return self._quantifier(is_group=sign == ")", varies=varies)

    def _open(self) -> str | None:
        found = _GROUP.match(self.pattern, self.place)
        assert found is not None, "a bracket is a group"
        if self.pattern[found.end() : found.end() + 1] in ("?", "*"):
            return "has a group of an unusual kind"
        self.place = found.end()
        self.varies.append(False)
        self.repeats.append(0)
        self.most.append(0)
        return None

    def _class(self) -> None:
        depth = 0
        while self.place < len(self.pattern):
            sign = self.pattern[self.place]
            depth += {"[": 1, "]": -1}.get(sign, 0)
            self.place += 2 if sign == "\\" else 1
            if depth == 0:
                return

    def _quantifier(self, *, is_group: bool, varies: bool) -> str | None:
        found = _QUANTIFIER.match(self.pattern, self.place)
        if found is None or found[0] == "{}":
            return None
        self.place = found.end()
        if self.pattern[self.place : self.place + 1] in ("*", "+", "?") or _QUANTIFIER.match(self.pattern, self.place):
            return "repeats a repetition"
        least, comma, most = found[1], found[2], found[3]
        if found[0][0] == "{" and any(len(count) > 4 or int(count or 0) > MOST_REPEATS for count in (least, most)):
            return f"repeats a part more than {MOST_REPEATS} times"
        if is_group and varies and found[0][0] != "?":
            return "repeats a part that itself varies in length"
        is_open = found[0][0] in "*+" or (comma == "," and not most)
        self.repeats[-1] += is_open
        self.varies[-1] |= is_open or found[0][0] == "?" or comma == ","
        return None
