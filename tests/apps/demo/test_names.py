"""Names are those of CLDR, each of one language; sets are disjoint and balanced, and equal seeds give equal sets."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

pytest.importorskip("babel")

from babel import Locale

from clearhead.apps.demo.classify import (
    LANGUAGES,
    Name,
    NameSets,
    drop_shared_names,
    is_latin,
    make_name_sets,
    read_names,
    split,
)
from clearhead.apps.demo.cldr import fold_text
from clearhead.base.errors import InputError

FEW = ("de", "el", "es", "hr", "ja", "ru", "uk")


@pytest.fixture(scope="module")
def everything() -> NameSets:
    return make_name_sets(seed=3, valid_per_language=12, test_per_language=24)


@pytest.fixture(scope="module")
def few() -> NameSets:
    return make_name_sets(seed=5, valid_per_language=11, test_per_language=23, locales=FEW)


def all_of(sets: NameSets) -> list[Name]:
    return sets.train + sets.valid + sets.test


def test_there_are_at_least_40_languages(everything: NameSets) -> None:
    assert len(set(LANGUAGES)) == len(LANGUAGES) >= 40
    assert len(everything.languages) == len(LANGUAGES)
    assert everything.languages[:3] == ("Icelandic", "Danish", "Swedish")
    assert {name.language for name in everything.train} == set(everything.languages)
    assert len(everything.train) > 25_000
    assert min(Counter(name.language for name in everything.train).values()) > 200


def test_all_four_kinds_are_there(everything: NameSets) -> None:
    for names in (everything.train, everything.test):
        assert {name.concept.split()[0] for name in names} == {"language", "territory", "month", "unit"}


@pytest.mark.parametrize(
    ("locale", "name", "concept"),
    [
        ("de", "Deutschland", "territory DE"),
        ("fr", "allemand", "language de"),
        ("pl", "października", "month 10"),
        ("pl", "październik", "month 10"),
        ("fi", "kilometrit", "unit length-kilometer"),
        ("ja", "ドイツ", "territory DE"),
    ],
)
def test_names_are_those_of_cldr(locale: str, name: str, concept: str) -> None:
    assert (name, concept) in set(read_names(locale))


def test_every_name_is_in_the_tables_of_its_language(few: NameSets) -> None:
    for locale in FEW:
        cldr = Locale.parse(locale)
        known = {*cldr.languages.values(), *cldr.territories.values()}
        known |= {name for context in cldr.months.values() for name in context["wide"].values()}
        known |= {names.get("long", "") for names in cldr.unit_display_names.values()}
        unique = {fold_text(name.text) for name in all_of(few) if name.language == cldr.english_name}
        assert unique and unique <= {fold_text(name.strip()) for name in known}


def test_no_name_belongs_to_two_languages(everything: NameSets) -> None:
    keys = [fold_text(name.text) for name in all_of(everything)]
    assert len(set(keys)) == len(keys)
    # Whatever the languages call it, not only what was kept: "Angola" is in most tables and must be in no part.
    assert everything.num_shared > 1_000 and not {"angola", "portugal", "kenya"} & set(keys)
    german = {fold_text(name) for name, _ in read_names("de")}
    assert not [name for name in all_of(everything) if name.language != "German" and fold_text(name.text) in german]


def test_no_part_shares_a_name_or_a_thing_with_another(everything: NameSets) -> None:
    parts = (everything.train, everything.valid, everything.test)
    for number, names in enumerate(parts):
        for other in parts[:number]:
            assert not {fold_text(name.text) for name in names} & {fold_text(name.text) for name in other}
            assert not {name.concept for name in names} & {name.concept for name in other}


def test_validation_and_test_are_balanced(everything: NameSets, few: NameSets) -> None:
    for sets, names, expected in [
        (everything, everything.valid, 12),
        (everything, everything.test, 24),
        (few, few.valid, 11),
        (few, few.test, 23),
    ]:
        assert set(Counter(name.language for name in names).items()) == {
            (language, expected) for language in sets.languages
        }


def test_a_language_with_few_names_sets_the_number_for_all() -> None:
    sets = make_name_sets(seed=3, valid_per_language=10_007, test_per_language=10_009, locales=FEW)
    for names in (sets.valid, sets.test):
        counts = Counter(name.language for name in names)
        assert len(counts) == len(FEW) and len(set(counts.values())) == 1
        assert 10 < counts["German"] < 10_007


def test_latin_languages_are_those_written_in_latin_letters(everything: NameSets, few: NameSets) -> None:
    assert few.latin == ("German", "Spanish", "Croatian")
    assert {"Vietnamese", "Turkish", "Welsh"} < set(everything.latin) < set(everything.languages)
    for name in all_of(everything):
        assert sum(letter.isalpha() for letter in name.text) >= 2
        assert is_latin(name.text) <= (name.language in everything.latin), name


@pytest.mark.parametrize("text", ["Österreich", "ə", "tiếng Việt", "Þýskaland", "Ɛʋe", "kilometer² (км)"])
def test_latin_letters_are_recognised(text: str) -> None:
    assert is_latin(text)


@pytest.mark.parametrize("text", ["Ελλάδα", "Ђурђевак", "ドイツ", "Հայաստան", "км²", "123", "ⴰⵎⴰⵣⵉⵖ"])
def test_other_letters_are_not_latin(text: str) -> None:
    assert not is_latin(text)


def test_names_fit_into_a_table(everything: NameSets) -> None:
    for name in all_of(everything):
        assert name.text == name.text.strip() and name.text.splitlines() == [name.text]
        assert "\t" not in name.text


def test_a_shared_name_is_left_out_of_all_whatever_it_names() -> None:
    tables = {
        "A": [Name("Togo", "A", "territory TG"), Name("Mai", "A", "month 5"), Name("eins", "A", "unit one")],
        "B": [Name("TOGO", "B", "territory TG"), Name("mai", "B", "language xx"), Name("uno", "B", "unit one")],
        "C": [Name("dos", "C", "unit two"), Name("Dos", "C", "unit three"), Name("\u200edos", "C", "unit four")],
    }
    own_names, num_shared = drop_shared_names(tables)
    assert {language: [name.text for name in names] for language, names in own_names.items()} == {
        "A": ["eins"],
        "B": ["uno"],
        "C": ["dos"],
    }
    assert num_shared == 2


def test_the_split_keeps_a_thing_together_and_has_the_shares_it_says() -> None:
    names = [Name(f"{language}{n}", language, f"unit {n}") for language in "abc" for n in range(1009)]
    train, valid, test = split(names, 7)
    assert (len(train), len(valid), len(test)) == (3 * (1009 - 81 - 121), 3 * 81, 3 * 121)
    assert sorted(train + valid + test) == sorted(names)


def test_the_seed_decides_everything(few: NameSets) -> None:
    again = make_name_sets(seed=5, valid_per_language=11, test_per_language=23, locales=FEW)
    assert again == few
    other = make_name_sets(seed=6, valid_per_language=11, test_per_language=23, locales=FEW)
    assert {name.concept for name in other.test} != {name.concept for name in few.test}


def test_wrong_locales_and_missing_babel_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*locales: str) -> NameSets:
        return make_name_sets(seed=1, valid_per_language=3, test_per_language=5, locales=locales)

    with pytest.raises(InputError, match="does not know the locale 'xx_nowhere'"):
        make("de", "xx_nowhere")
    with pytest.raises(InputError, match="got two of German: leave 'de_AT' out"):
        make("de", "de_AT")
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(InputError, match="which is not installed: install it with "):
        make("de", "fr")
