"""What is read from CLDR: locales by name, languages in English, texts as one sees them who minds no case."""

from __future__ import annotations

import re
import sys

import pytest

pytest.importorskip("babel")

from clearhead.apps.demo.cldr import fold_text, language_name, read_locale
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError


@pytest.mark.parametrize(
    ("locale", "name"),
    [("de", "German"), ("de_AT", "German"), ("ar_EG", "Arabic"), ("sr", "Serbian"), ("zh", "Chinese")],
)
def test_a_language_is_called_by_its_own_name_alone(locale: str, name: str) -> None:
    assert language_name(locale) == name


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("STRASSE", "straße"),
        ("Ｔｏｇｏ", "togo"),
        ("e\u0301te\u0301", "ÉTÉ"),
        ("می\u200cخواهم", "میخواهم"),
        ("\u200edos", "dos"),
    ],
)
def test_folded_texts_look_alike(text: str, other: str) -> None:
    assert fold_text(text) == fold_text(other)
    assert fold_text(fold_text(text)) == fold_text(text)


def test_different_texts_stay_different() -> None:
    assert len({fold_text(text) for text in ("Iran", "Irán", "Irak", "İran")}) == 4


@pytest.mark.parametrize("name", ["xx_nowhere", "", "de-AT-x", "German"])
def test_unknown_locales_are_said(name: str) -> None:
    with pytest.raises(InputError, match=f"does not know the locale '{name}'; expected a name such as 'de'"):
        read_locale(name)


def test_missing_babel_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(InputError, match=re.escape(make_install_command(extra="demo"))):
        read_locale("de")
