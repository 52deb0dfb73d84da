"""Glossary: one sentence per term, with its lesson and its source file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from sphinx.errors import SphinxError

ROOT = Path(__file__).parents[3]
WORDS = ROOT / "docs" / "reference" / "glossary.toml"


def words() -> dict[str, dict[str, str]]:
    """Return every term with its sentence, file and lesson."""
    terms = tomllib.loads(WORDS.read_text("utf-8"))
    return {word: terms[word] for word in sorted(terms, key=str.casefold)}


def lessons() -> dict[str, str]:
    """Return the page of each lesson by its number."""
    pages = {}
    for path in sorted((ROOT / "docs" / "lessons").iterdir()):
        number = re.match(r"(?:lesson[-_])?0*(\d+)", path.stem)
        if number and path.suffix in (".py", ".md"):
            pages[number.group(1)] = path.name
    return pages


def lines(_argument: str) -> Iterator[str]:
    """Yield every term as a definition."""
    pages = lessons()
    for word, entry in words().items():
        if not (ROOT / entry["file"]).exists():
            raise SphinxError(f"the glossary names {entry['file']} for '{word}', which does not exist")
        where = [f"`{entry['file']}`"]
        if (page := pages.get(str(entry.get("lesson", "")))) is not None:
            where.insert(0, f"[lesson {entry['lesson']}](/lessons/{page})")
        yield from (word, f": {' · '.join(where)}", "", f"  {entry['is']}", "")
