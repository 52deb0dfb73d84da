"""Patterns of addresses: `*` matches within one name between dots, `**` matches any number of names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from clearhead.base.errors import did_you_mean


def select_addresses(pattern: str, addresses: Collection[str]) -> list[str]:
    """Return the addresses that a pattern matches, in the given order.

    Args:
        pattern: an address with wildcards. `*`, `?` and `[0-9]` match characters within one name between dots, as in
            file names. `**` matches any number of names between dots, also none; at the end it matches at least one.
        addresses: the addresses of the model, such as "encoder.layers.0".
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
    """Return a hint for a pattern without a match: the pattern with `**` for `*` if it matches, else near addresses."""
    wider = ".".join("**" if section == "*" else section for section in pattern.split("."))
    if select_addresses(wider, addresses):
        return f" (did you mean '{wider}'? * matches no dot)"
    return did_you_mean(pattern, addresses)
