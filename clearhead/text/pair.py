"""Tokenizers of source and target texts: one tokenizer for both sides, or one for each side."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_files import has_tokenizer

_JOINT = "tokenizer.json"
_SOURCE = "source.tokenizer.json"
_TARGET = "target.tokenizer.json"


@dataclass(frozen=True, repr=False)
class TokenizerPair(Printed):
    """Tokenizers of source and target texts, which may be the same tokenizer.

    Args:
        source: tokenizer of the encoder's texts.
        target: tokenizer of the decoder's texts.
        joint: True if both sides have one vocabulary, so that their tables can be tied.

    Raises:
        InputError: joint is True, but the two tokenizers differ.
    """

    source: Tokenizer
    target: Tokenizer
    joint: bool

    def __post_init__(self) -> None:
        if self.joint and self.source is not self.target and self.source.fingerprint != self.target.fingerprint:
            raise InputError("a joint pair needs the same tokenizer for both sides, got two different ones")

    def lines(self) -> list[str]:
        """Return one line of text about each tokenizer, for the printed summary of a model."""
        sides = {"tokenizer": self.source} if self.joint else {"source": self.source, "target": self.target}
        return [f"  {side}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens" for side, tokenizer in sides.items()]

    @property
    def fingerprint(self) -> str:
        """Hash of both tokenizers, which checkpoints store; equal fingerprints mean equal ids on both sides."""
        content = f"{self.joint} {self.source.fingerprint} {self.target.fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()

    def check_rows(self, source_rows: int, target_rows: int, name: str) -> None:
        """Refuse a model whose embedding tables have fewer rows than the vocabulary has entries; more rows are fine.

        Args:
            source_rows, target_rows: number of rows of the model's embedding tables on each side.
            name: name of the model in messages.

        Raises:
            InputError: a side has more entries than rows.
        """
        for side, tokenizer, rows in (("source", self.source, source_rows), ("target", self.target, target_rows)):
            size, largest = tokenizer.vocab_size, tokenizer.special_tokens.largest_id
            if largest >= rows:
                raise InputError(
                    f"{name}: the {side} tokenizer has a special token with the id {largest}, but the model has {rows} "
                    "rows; restore the tokenizer that the model was trained with"
                )
            if size > rows:
                raise InputError(
                    f"{name}: the {side} tokenizer has {size} entries, but the model has {rows} rows for them; "
                    "restore the tokenizer that the model was trained with"
                )

    def save(self, folder: Path) -> None:
        """Write one `tokenizer.json` if joint, otherwise one file per side; a missing folder is created."""
        if self.joint:
            self.source.save(folder / _JOINT)
        else:
            self.source.save(folder / _SOURCE)
            self.target.save(folder / _TARGET)

    @classmethod
    def load(cls, folder: Path) -> TokenizerPair:
        """Load the tokenizers that `save` wrote, or any folder with one tokenizer as a joint pair.

        Raises:
            InputError: the folder has no tokenizer, only one of two sides, or an unusable tokenizer.
        """
        missing = [name for name in (_SOURCE, _TARGET) if not (folder / name).is_file()]
        if (folder / _JOINT).is_file() or (len(missing) == 2 and has_tokenizer(folder)):
            tokenizer = Tokenizer.load(folder)
            return cls(source=tokenizer, target=tokenizer, joint=True)
        if len(missing) == 2:
            raise InputError(f"{folder} must have {_JOINT}, or {_SOURCE} and {_TARGET}, but has none of them")
        if missing:
            raise InputError(f"{folder}: {missing[0]} is missing: restore it, since each side has its tokenizer")
        return cls(source=Tokenizer.load(folder / _SOURCE), target=Tokenizer.load(folder / _TARGET), joint=False)
