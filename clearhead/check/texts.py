"""Whether two tokenizers give the same ids, and which difference explains those that differ."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.check.trace import ModelInputs, first_line, import_transformers
from clearhead.hf.tokenizers import CheckpointTokenizers

# What trips tokenizers up; none spells a special token out, which here is plain text and there is not.
HARD = (
    "The quick brown fox jumps over the lazy dog.",
    "Ein kleiner Hund läuft über die grüne Straße, nicht wahr?",
    "",
    " ",
    "   \t\n ",
    "a",
    " leading and trailing ",
    "many    spaces     inside",
    "x" * 150,
    "UPPER lower MiXeD",
    "e\u0301 é \u0041\u030a Å ﬁ ½ ①",
    "😀 👩\u200d👩\u200d👧 🇩🇪 ❤️",
    "\x01\x1f\x7f control",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी ไทย",
    "▁underline ▁ and ##hash",
    "line\r\nline\rline\u2028line",
    "don't I'LL we'Ve; 3.14 (50%) in 1998!",
    "\u00a0non\u2003breaking\u200bspaces\ufeff",
)
# What one side may do to a text that the other does not.
_CHANGES: dict[str, Callable[[str], str]] = {
    "lower case": str.lower,
    "a space in front": lambda text: f" {text}",
    "spaces at the ends cut off": str.strip,
    "white space as single spaces": lambda text: " ".join(text.split()),
    "Unicode composed (NFC)": lambda text: unicodedata.normalize("NFC", text),
    "Unicode composed for compatibility (NFKC)": lambda text: unicodedata.normalize("NFKC", text),
    "accents taken off": lambda text: "".join(
        one for one in unicodedata.normalize("NFD", text) if unicodedata.category(one) != "Mn"
    ),
}


@dataclass(frozen=True)
class TokenizerParity:
    """What a comparison of two tokenizers found.

    Args:
        fingerprint: of the tokenizer here.
        count: how many texts were compared; 0: transformers could not load a tokenizer.
        differing: those with other ids.
        cause: what probably is the reason.
    """

    fingerprint: str
    count: int
    differing: tuple[str, ...] = ()
    cause: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether all ids are the same."""
        return not self.differing

    def lines(self) -> Iterator[str]:
        """Yield the lines of a card."""
        if not self.count:
            yield f"tokenizer         not compared: {self.cause}"
            return
        same = self.count - len(self.differing)
        yield f"tokenizer         {same} of {self.count} texts give the same ids; fingerprint {self.fingerprint[:12]}"
        if self.differing:
            yield f"  first that differs       {self.differing[0]!r}"
        if self.cause is not None:
            yield f"likely cause      the tokenizer: {self.cause}"


def compare_tokenizers(text: CheckpointTokenizers, reference: Path) -> TokenizerParity:
    """Compare a checkpoint's tokenizer with that of a folder in transformers, on hard strings."""
    source = text.pair.source
    try:
        theirs: Any = import_transformers().AutoTokenizer.from_pretrained(reference, local_files_only=True)
        expected = {one: list(theirs(one)["input_ids"]) for one in HARD}
        plain = {one: list(theirs(one, add_special_tokens=False)["input_ids"]) for one in HARD}
    except Exception as error:  # noqa: BLE001 - whatever another library makes of a folder
        return TokenizerParity(source.fingerprint, 0, cause=f"transformers cannot load it: {first_line(error)}")

    def ids(one: str) -> list[int]:
        return source.special_tokens.add_to(source.encode(one))[0]

    differing = tuple(one for one in HARD if ids(one) != expected[one])
    cause = None
    if differing:
        cause = _cause(lambda one: list(source.encode(one)), plain, differing)
    return TokenizerParity(source.fingerprint, len(HARD), differing, cause)


def _cause(ours: Callable[[str], list[int]], plain: dict[str, list[int]], differing: tuple[str, ...]) -> str:
    """Try what could explain the difference."""
    if all(ours(one) == plain[one] for one in differing):
        return "the pieces are the same, but not what stands around a text"
    for name, change in _CHANGES.items():
        if all(ours(change(one)) == plain[one] for one in plain):
            return f"there a text is read with {name}, here without"
        if all(ours(one) == plain[one] for one in plain if change(one) == one):
            return f"here a text is read with {name}, there without"
    return f"pieces differ, first those of {next(one for one in differing if ours(one) != plain[one])!r}"


def text_inputs(text: CheckpointTokenizers, limit: int, rows: int) -> Iterator[ModelInputs]:
    """Yield texts as a checkpoint reads them, as far as they fit."""
    source = text.pair.source
    for one in HARD:
        ids, segments = source.special_tokens.add_to(source.encode(one))
        if 0 < len(ids) <= limit and max(ids) < rows:
            kinds = torch.tensor([segments]) if any(segments) else None
            yield ModelInputs(torch.tensor([ids]), segments=kinds)
