"""Patterns of honest tokenizers are run; those that could be tried in exponentially many ways are not."""

from __future__ import annotations

import pytest

from clearhead.text.tokenizer_checks import pattern_fault

HONEST = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re)?|[\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?<=\S)\s(?=\S)",
    r" {2,}",
]
EXPLOSIVE = [
    (r"(a+)+$", "varies in length"),
    (r"(a|a)*b", "varies in length"),
    (r"(?:a*)*", "varies in length"),
    (r"((a{1,3})){5}", "varies in length"),
    (r"(a)\1", "refers back"),
    (r"\g<0>", "refers back"),
    (r"(?R)", "unusual kind"),
    (r"(*FAIL)", "unusual kind"),
    (r"a{1000000}", "more than 1000 times"),
    (r"a{100}{100}", "repeats a repetition"),
    (r"a*b*a*b*a*c", "without a bound"),
    ("x" * 3000, "characters"),
    ("(a", "does not close"),
    ("a)", "does not open"),
]


@pytest.mark.parametrize("pattern", HONEST)
def test_honest_patterns_pass(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize(("pattern", "words"), EXPLOSIVE)
def test_a_pattern_that_may_take_forever_is_named(pattern: str, words: str) -> None:
    assert words in str(pattern_fault(pattern))
