"""The tokenizers of the two sides of a translation: one for both, or one each."""

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
    """The tokenizers of source and target.

    Args:
        source: encodes what the encoder reads.
        target: encodes what the decoder reads and writes.
        joint: one vocabulary serves both sides, so that their tables can be tied.

    Raises:
        InputError: joint is asked for with two different tokenizers.
    """

    source: Tokenizer
    target: Tokenizer
    joint: bool

    def __post_init__(self) -> None:
        if self.joint and self.source is not self.target and self.source.fingerprint != self.target.fingerprint:
            raise InputError("a joint pair needs one tokenizer for both sides, received two different ones")

    def lines(self) -> list[str]:
        """Return a line about each tokenizer."""
        sides = {"tokenizer": self.source} if self.joint else {"source": self.source, "target": self.target}
        return [f"  {side}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens" for side, tokenizer in sides.items()]

    @property
    def fingerprint(self) -> str:
        """The hash that a checkpoint remembers: equal fingerprints give equal ids on both sides."""
        content = f"{self.joint} {self.source.fingerprint} {self.target.fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()

    def check_rows(self, source_rows: int, target_rows: int, name: str) -> None:
        """Refuse a model with fewer rows than entries; it may well have more.

        Args:
            source_rows, target_rows: rows of the model's tables on each side.
            name: what a message calls the model.

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
        """Write one `tokenizer.json` where joint, else one file for each side; the folder is made where needed."""
        if self.joint:
            self.source.save(folder / _JOINT)
        else:
            self.source.save(folder / _SOURCE)
            self.target.save(folder / _TARGET)

    @classmethod
    def load(cls, folder: Path) -> TokenizerPair:
        """Load what `save` wrote, or a folder with any one tokenizer as a joint pair.

        Raises:
            InputError: the folder holds no tokenizer, only one side of two, or an unusable one.
        """
        missing = [name for name in (_SOURCE, _TARGET) if not (folder / name).is_file()]
        if (folder / _JOINT).is_file() or (len(missing) == 2 and has_tokenizer(folder)):
            tokenizer = Tokenizer.load(folder)
            return cls(source=tokenizer, target=tokenizer, joint=True)
        if len(missing) == 2:
            raise InputError(f"{folder}: expected {_JOINT}, or {_SOURCE} and {_TARGET}, but found none of them")
        if missing:
            raise InputError(f"{folder}: {missing[0]} is missing; each side has its own tokenizer here")
        return cls(source=Tokenizer.load(folder / _SOURCE), target=Tokenizer.load(folder / _TARGET), joint=False)
