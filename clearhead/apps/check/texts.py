"""Comparison of two tokenizers: whether they give the same ids, and the likely cause if not."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.apps.check.trace import ModelInputs, first_line, import_transformers
from clearhead.base.printing import Printed
from clearhead.checkpoints.hf.tokenizers import CheckpointTokenizers

# Hard cases for tokenizers; none contains a special token, which is plain text here and not in transformers.
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
# Normalizations that one side may apply and the other not.
_CHANGES: dict[str, Callable[[str], str]] = {
    "lower case": str.lower,
    "a space in front": lambda text: f" {text}",
    "spaces at the ends stripped": str.strip,
    "white space collapsed": lambda text: " ".join(text.split()),
    "Unicode composed (NFC)": lambda text: unicodedata.normalize("NFC", text),
    "Unicode composed for compatibility (NFKC)": lambda text: unicodedata.normalize("NFKC", text),
    "accents stripped": lambda text: "".join(
        letter for letter in unicodedata.normalize("NFD", text) if unicodedata.category(letter) != "Mn"
    ),
}


@dataclass(frozen=True, repr=False)
class TokenizerParity(Printed):
    """The result of comparing two tokenizers.

    Args:
        fingerprint: of the tokenizer here.
        count: how many texts were compared; 0: transformers could not load a tokenizer.
        differing: the texts with other ids.
        cause: the likely reason.
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
        # Said, for without an answer the library asks on the terminal whether to run the folder's code.
        theirs: Any = import_transformers().AutoTokenizer.from_pretrained(
            reference, local_files_only=True, trust_remote_code=False
        )
        expected = {hard: list(theirs(hard)["input_ids"]) for hard in HARD}
        plain = {hard: list(theirs(hard, add_special_tokens=False)["input_ids"]) for hard in HARD}
    except Exception as error:  # noqa: BLE001 - another library may raise anything
        return TokenizerParity(source.fingerprint, 0, cause=f"transformers cannot load it: {first_line(error)}")

    def encode(text: str) -> list[int]:
        return list(source.encode(text))

    differing = tuple(hard for hard in HARD if source.special_tokens.add_to(encode(hard))[0] != expected[hard])
    cause = _cause(encode, plain, differing) if differing else None
    return TokenizerParity(source.fingerprint, len(HARD), differing, cause)


def _cause(ours: Callable[[str], list[int]], plain: dict[str, list[int]], differing: tuple[str, ...]) -> str:
    """Return the likely cause of a difference."""
    if all(ours(text) == plain[text] for text in differing):
        return "the tokens are equal, but not the special tokens around a text"
    for name, change in _CHANGES.items():
        if all(ours(change(text)) == plain[text] for text in plain):
            return f"there a text is read with {name}, here without"
        if all(ours(text) == plain[text] for text in plain if change(text) == text):
            return f"here a text is read with {name}, there without"
    return f"tokens differ, first those of {next(text for text in differing if ours(text) != plain[text])!r}"


def text_inputs(text: CheckpointTokenizers, limit: int, rows: int) -> Iterator[ModelInputs]:
    """Yield texts with their special tokens, as far as they fit."""
    source = text.pair.source
    for hard in HARD:
        ids, segments = source.special_tokens.add_to(source.encode(hard))
        if 0 < len(ids) <= limit and max(ids) < rows:
            yield ModelInputs(torch.tensor([ids]), segments=torch.tensor([segments]) if any(segments) else None)
