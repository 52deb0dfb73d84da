"""Patterns of addresses: `*` stands for anything within one part of an address, `**` for any parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from clearhead.base.errors import did_you_mean


def select_addresses(pattern: str, addresses: Collection[str]) -> list[str]:
    """Return the addresses that a pattern matches, in their order.

    Args:
        pattern: an address. In a part of it, `*`, `?` and `[0-9]` stand for characters, as in names of files; the part
            `**` stands for any number of parts, also none, and at the end for everything inside.
        addresses: those that there are.
    """
    if not set(pattern) & set("*?["):
        return [pattern] if pattern in addresses else []
    parts = pattern.split(".")
    return [address for address in addresses if _matches(address.split("."), parts)]


def _matches(address: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not address
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_matches(address[skipped:], rest) for skipped in range(not rest, len(address) + 1))
    return bool(address) and fnmatchcase(address[0], first) and _matches(address[1:], rest)


def nearest_address(pattern: str, addresses: Collection[str]) -> str:
    """Return a hint for a pattern without a match: the same with `**` for `*` if that has one, else what is near."""
    wider = ".".join("**" if section == "*" else section for section in pattern.split("."))
    if select_addresses(wider, addresses):
        return f" (did you mean '{wider}'? * stays within one part of an address)"
    return did_you_mean(pattern, addresses)
