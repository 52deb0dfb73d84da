"""Date pairs: texts equal Babel's, each has one meaning, sets share no date, and equal seeds give equal pairs."""

from __future__ import annotations

import datetime
import sys
import unicodedata
from types import SimpleNamespace

import pytest

pytest.importorskip("babel")

from babel import Locale
from babel.dates import format_date

from clearhead.apps.demo.translate import (
    LOCALES,
    ZEROS,
    DatePair,
    DateSets,
    DateStyle,
    check_meanings,
    date_styles,
    make_date_sets,
)
from clearhead.base.errors import InputError

SOME = [datetime.date(1900, 1, 1), datetime.date(1999, 12, 31), datetime.date(2099, 10, 30)]
SOME += [datetime.date(1968, 2, 29) + datetime.timedelta(1009 * n) for n in range(41)]
FEW = ("ar_EG", "de", "en", "hr", "ja", "my", "pl")


@pytest.fixture(scope="module")
def everything() -> tuple[list[DateStyle], dict[tuple[str, str], str]]:
    return date_styles()


def small(seed: int, locales: tuple[str, ...] = FEW) -> DateSets:
    return make_date_sets(seed=seed, train_size=307, valid_per_locale=5, test_per_locale=11, locales=locales)


def latin(text: str) -> str:
    return "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)


def test_every_style_writes_what_babel_writes(everything: tuple[list[DateStyle], dict[tuple[str, str], str]]) -> None:
    styles, _ = everything
    for style in styles:
        for date in SOME:
            assert latin(style.write(date)) == latin(format_date(date, style.style, locale=style.locale)), style.locale


def test_all_three_styles_of_at_least_45_locales_are_used(
    everything: tuple[list[DateStyle], dict[tuple[str, str], str]],
) -> None:
    styles, dropped = everything
    assert len(set(LOCALES)) == len(LOCALES) >= 45
    assert not dropped
    assert len(styles) == 3 * len(LOCALES)


@pytest.mark.parametrize(
    ("locale", "text"),
    [("ar_EG", "٥ يناير ١٩٩٨"), ("fa", "۵ ژانویهٔ ۱۹۹۸"), ("bn", "৫ জানুয়ারী, ১৯৯৮"), ("mr", "५ जानेवारी, १९९८")],
)
def test_a_locale_writes_its_own_digits(locale: str, text: str) -> None:
    styles, _ = date_styles([locale])
    written = [style.write(datetime.date(1998, 1, 5)) for style in styles if style.style == "long"]
    assert [unicodedata.normalize("NFC", text)] == [
        unicodedata.normalize("NFC", text_written) for text_written in written
    ]


def test_digit_zeros_are_zeros() -> None:
    assert all(
        [unicodedata.decimal(chr(ord(zero) + n)) for n in range(10)] == list(range(10)) for zero in ZEROS.values()
    )


def test_a_year_of_two_digits_is_written_with_four(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = {style: SimpleNamespace(pattern="d/MM yy") for style in ("full", "long", "medium")}
    monkeypatch.setattr(Locale, "date_formats", property(lambda self: patterns))
    styles, _ = date_styles(["de", "fa"])
    assert {style.write(datetime.date(1905, 3, 2)) for style in styles} == {"2/03 1905", "۲/۰۳ ۱۹۰۵"}


def test_a_text_with_two_meanings_drops_the_later_style() -> None:
    _, dropped = date_styles(["es", "teo"])  # "mar" is March in Spanish and May in Teso
    assert set(dropped) == {("teo", "medium")}
    assert "es medium" in dropped["teo", "medium"]
    _, dropped = date_styles(["teo", "es"])
    assert set(dropped) == {("es", "medium")}


def test_a_style_with_placeholders_is_dropped() -> None:
    _, dropped = date_styles(["wa"])
    assert set(dropped) == {("wa", "full"), ("wa", "long"), ("wa", "medium")}
    with pytest.raises(InputError, match="no date style can be used for the locales"):
        small(1, ("wa",))


def test_the_final_check_refuses_two_meanings() -> None:
    british = DatePair("03/04/2021", "2021-04-03", "en_GB")
    check_meanings([british, british._replace(locale="fr")])
    with pytest.raises(InputError, match=r"'03/04/2021' means 2021-04-03 in en_GB and 2021-03-04 in en"):
        check_meanings([british, DatePair("03/04/2021", "2021-03-04", "en")])


def test_no_date_of_one_part_is_in_another() -> None:
    sets = make_date_sets(seed=3, train_size=20011, valid_per_locale=211, test_per_locale=307, locales=FEW)
    train, valid, test = ({pair.target for pair in pairs} for pairs in (sets.train, sets.valid, sets.test))
    assert not train & valid and not train & test and not valid & test
    assert {pair.target[:4] for pair in sets.test} == {str(year) for year in range(1900, 2100)}
    assert set("".join(pair.source for pair in sets.test)) <= set("".join(pair.source for pair in sets.train))


def test_sizes_and_targets() -> None:
    sets = small(3)
    assert [len(sets.train), len(sets.valid), len(sets.test)] == [307, 5 * len(FEW), 11 * len(FEW)]
    for pair in sets.train:
        date = datetime.date.fromisoformat(pair.target)
        assert 1900 <= date.year <= 2099
        written = {format_date(date, style, locale=pair.locale) for style in ("full", "long", "medium")}
        assert latin(pair.source) in {latin(text) for text in written}
    assert {pair.locale for pair in sets.test} == set(FEW)


def test_the_seed_decides_everything() -> None:
    assert small(3) == small(3)
    assert small(3).train != small(5).train


def test_unknown_locale_and_missing_babel_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not know the locale 'xx_nowhere'"):
        date_styles(["xx_nowhere"])
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(InputError, match="which is not installed: install it with "):
        date_styles(["de"])
