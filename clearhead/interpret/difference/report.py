"""`Difference`: the result of `clearhead.diff`, which can be written as JSON or as a page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clearhead.base.arguments import check_types
from clearhead.base.files import refuse_unwritable
from clearhead.base.printing import Printed
from clearhead.interpret.difference.outputs import TextChanges
from clearhead.interpret.difference.page import difference_page
from clearhead.interpret.difference.weights import Change, WeightChanges
from clearhead.interpret.explain.page import write_pieces
from clearhead.interpret.maps.token_texts import label_tokens
from clearhead.text.pair import TokenizerPair


@check_types
@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """Changes from a model A to a model B.

    Args:
        a, b: names of the models.
        weights: changes of the weights.
        texts: changes on texts. None means that no text was read.
    """

    a: str
    b: str
    weights: WeightChanges
    texts: TextChanges | None = None

    def with_texts(self, texts: TextChanges, tokenizers: TokenizerPair) -> Difference:
        """Return a copy with `texts`, the divergence of each head on these texts, and each embedding row's token."""

        def complete(change: Change) -> Change:
            if change.index is None:
                return change
            token = None
            if change.kind == "row" and change.address.endswith("embedding.table.weight"):
                tokenizer = tokenizers.source if change.address.startswith("encoder") else tokenizers.target
                token = label_tokens(tokenizer, [change.index])[0] if change.index < tokenizer.vocab_size else None
            return replace(change, token=token, divergence=texts.heads.get((change.address, change.index)))

        weights = replace(self.weights, changes=tuple(map(complete, self.weights.changes)))
        return replace(self, weights=weights, texts=texts)

    @property
    def largest(self) -> float:
        """Largest `Change.score` of all weight changes."""
        return max(change.score for change in self.weights.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        texts = self.texts
        return {
            "a": self.a,
            "b": self.b,
            "largest": self.largest,
            **{name: list(getattr(self.weights, name)) for name in ("only_in_a", "only_in_b")},
            "other_shape": [asdict(weight) for weight in self.weights.other_shape],
            "changes": [asdict(change) for change in self.weights.changes],
            "texts": None
            if texts is None
            else {
                "num_texts": texts.num_texts,
                "num_positions": len(texts.tokens),
                "num_different": texts.num_different,
                "divergence": texts.divergence,
                "reason": texts.reason,
                "tokens": [asdict(token) for token in texts.tokens],
            },
        }

    def save_html(self, path: str | Path, *, force: bool = False) -> None:
        """Write a page with all heads coloured by change, as one HTML file that needs no network.

        Args:
            path: HTML file to write.
            force: True to replace an existing file.

        Raises:
            InputError: the file exists or cannot be written.
        """
        refuse_unwritable(Path(path), force=force)
        write_pieces(difference_page(f"What changed from {self.a} to {self.b}", self.weights, self.texts), Path(path))
