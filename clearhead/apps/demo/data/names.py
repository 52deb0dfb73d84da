"""Names of languages, territories, months and units in many languages: which language is this?

The names come from the CLDR tables that Babel ships. What makes the question honest:

- A name that two of the languages share ("Angola") has no right answer, so it is left out of both, and a name that
  means several things in its language is taken once.
- The parts are split by the thing named: a thing whose names are in the test is named nowhere in the training pairs, in
  no language. Words can still return, as "Korea" does in the names of two countries.
- In validation and test every language has equally many names, so guessing is right once in as many times as there are
  languages. A language that is alone in its script can be recognised by any letter, so `NameSets.latin` names those
  that cannot.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clearhead.apps.demo.data.cldr import folded, language_name, read_locale
from clearhead.base.errors import InputError

# Related languages side by side, so that in a picture frequent confusions are near the diagonal.
LANGUAGES = (
    *("is", "da", "sv", "de", "nl", "en", "cy", "ga", "fr", "ca", "es", "pt", "it", "ro", "sq", "lt", "lv", "pl"),
    *("cs", "sk", "sl", "hr", "sr", "mk", "bg", "ru", "be", "uk", "kk", "az", "tr", "hu", "fi", "et", "eu", "id"),
    *("sw", "vi", "el", "hy", "ka", "he", "ar", "fa", "ur", "hi", "mr", "ne", "bn", "ta", "th", "ko", "zh", "ja"),
)
VALID_SHARE, TEST_SHARE = 0.08, 0.12
_LETTER = re.compile(r"[^\W\d_]")
_LATIN = re.compile(r"[A-Za-zªºÀ-ÖØ-öø-ʯḀ-ỿ]")
# What would end a cell or a line of a table.
_BREAKS = frozenset("\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029")


class Name(NamedTuple):
    """A name, the English name of the language it belongs to, and what it names, such as "territory DE"."""

    text: str
    language: str
    concept: str


@dataclass(frozen=True)
class NameSets:
    """Names split by what they name: a thing named in one part is named in no other, in no language.

    Args:
        train: names to learn from.
        valid: names for every choice, equally many of each language.
        test: names to be scored once, equally many of each language.
        languages: every language, in the order of the locales.
        latin: those of them that are written in Latin letters, in the same order.
        num_shared: how many names were left out because several of the languages have them.
    """

    train: list[Name]
    valid: list[Name]
    test: list[Name]
    languages: tuple[str, ...]
    latin: tuple[str, ...]
    num_shared: int


def make_name_sets(
    *, seed: int, valid_per_language: int, test_per_language: int, locales: Sequence[str] = LANGUAGES
) -> NameSets:
    """Read the names of many languages and split them; the same arguments give the same names.

    Args:
        seed: chooses the split and every draw.
        valid_per_language: most validation names of each language; all have as many as the one with the fewest.
        test_per_language: most test names of each language; likewise.
        locales: CLDR names of the languages, such as "de".

    Raises:
        InputError: Babel is not installed, it does not know a locale, two locales are one language, or a language
            has too few names that are its own.
    """
    tables = _own_tables(locales)
    kept, num_shared = unshared(tables)
    latin = tuple(language for language, names in kept.items() if is_latin(" ".join(n.text for n in names)))
    for language in set(kept) - set(latin):
        # Such as a name left in English, which does not have the letters of the language.
        kept[language] = [name for name in kept[language] if not is_latin(name.text)]
    parts = split([name for names in kept.values() for name in names], seed)
    source = random.Random(seed)
    wanted = (None, valid_per_language, test_per_language)
    train, valid, test = (_draw(source, part, kept, count) for part, count in zip(parts, wanted, strict=True))
    return NameSets(train, valid, test, tuple(kept), latin, num_shared)


def read_names(locale: str) -> Iterator[tuple[str, str]]:
    """Yield (name, what it names) for everything that CLDR has a name for in one language.

    Variants of one language ("de", "de_AT") count as one thing.

    Raises:
        InputError: Babel is not installed, or it does not know the locale.
    """
    cldr = read_locale(locale)
    for code, name in cldr.languages.items():
        yield name, f"language {code.split('_')[0]}"
    for code, name in cldr.territories.items():
        yield name, f"territory {code}"
    for context in ("format", "stand-alone"):
        for number, name in cldr.months[context]["wide"].items():
            yield name, f"month {number}"
    for unit, names in cldr.unit_display_names.items():
        if "long" in names:
            yield names["long"], f"unit {unit}"


def unshared(tables: Mapping[str, Sequence[Name]]) -> tuple[dict[str, list[Name]], int]:
    """Leave out the names that several languages have, whatever they name there, and every repetition.

    Args:
        tables: the names of each language.

    Returns:
        The names that belong to one language alone, and how many were left out because they do not, each counted once.
    """
    owners: dict[str, set[str]] = {}
    for language, names in tables.items():
        for name in names:
            owners.setdefault(folded(name.text), set()).add(language)
    kept: dict[str, list[Name]] = {}
    for language, names in tables.items():
        own: dict[str, Name] = {}
        for name in names:
            key = folded(name.text)
            if len(owners[key]) == 1:
                own.setdefault(key, name)
        kept[language] = list(own.values())
    return kept, sum(len(languages) > 1 for languages in owners.values())


def split(names: Sequence[Name], seed: int) -> tuple[list[Name], list[Name], list[Name]]:
    """Split names by what they name into those to learn from, for validation and for the test."""
    concepts = sorted({name.concept for name in names})
    random.Random(seed).shuffle(concepts)
    num_valid, num_test = round(VALID_SHARE * len(concepts)), round(TEST_SHARE * len(concepts))
    valid, test = set(concepts[:num_valid]), set(concepts[num_valid : num_valid + num_test])
    held_out = valid | test
    return (
        [name for name in names if name.concept not in held_out],
        [name for name in names if name.concept in valid],
        [name for name in names if name.concept in test],
    )


def is_latin(text: str) -> bool:
    """Return whether most letters of a text are Latin."""
    return 2 * len(_LATIN.findall(text)) > len(_LETTER.findall(text))


def _own_tables(locales: Sequence[str]) -> dict[str, list[Name]]:
    tables: dict[str, list[Name]] = {}
    for locale in locales:
        language = language_name(locale)
        if language in tables:
            raise InputError(f"expected one locale of each language, got two of {language}; leave '{locale}' out")
        tables[language] = [Name(text, language, concept) for text, concept in _clean(read_names(locale))]
    return tables


def _clean(names: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Leave out symbols, and names that do not fit in one cell of a table."""
    for text, concept in names:
        text = unicodedata.normalize("NFC", text.strip())
        fewest = 3 if is_latin(text) else 2
        if len(_LETTER.findall(text)) >= fewest and not set(text) & _BREAKS:
            yield text, concept


def _draw(source: random.Random, part: Sequence[Name], languages: Iterable[str], most: int | None) -> list[Name]:
    """Shuffle a part; with a limit, take equally many names of each language."""
    shuffled = source.sample(part, len(part))
    counts = Counter(name.language for name in part)
    if missing := [language for language in languages if not counts[language]]:
        raise InputError(f"too few names of {missing[0]} are its own to be split into three parts; leave it out")
    if most is None:
        return shuffled
    equal = min(most, *counts.values())
    taken: Counter[str] = Counter()
    drawn: list[Name] = []
    for name in shuffled:
        if taken[name.language] < equal:
            taken[name.language] += 1
            drawn.append(name)
    return drawn
