"""Access to the CLDR tables of Babel."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError

if TYPE_CHECKING:
    from babel import Locale

_MARKS = dict.fromkeys((0x200C, 0x200D, 0x200E, 0x200F, 0x061C))


def read_locale(name: str) -> Locale:
    """Return the CLDR data of a locale.

    Raises:
        InputError: Babel is not installed, or it does not know the locale.
    """
    try:
        from babel import Locale, UnknownLocaleError
    except ImportError:
        raise InputError(
            "dates and names are written with Babel, which is not installed: install it with "
            f"{make_install_command(extra='demo')}"
        ) from None
    try:
        return Locale.parse(name)
    except (UnknownLocaleError, ValueError):
        raise InputError(f"Babel does not know the locale '{name}'; expected a name such as 'de' or 'ar_EG'") from None


def language_name(locale: str) -> str:
    """Return the English name of a locale's language, such as "German"."""
    cldr = read_locale(locale)
    return str(cldr.english_name if cldr.territory is None else cldr.get_language_name("en"))


def fold_text(text: str) -> str:
    """Return a text without differences of case, width and invisible marks."""
    return unicodedata.normalize("NFKC", text).casefold().translate(_MARKS)
