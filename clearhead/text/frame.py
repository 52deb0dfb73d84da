"""What a published tokenizer puts around one text, or around two: ids and segments as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.errors import InputError

# An id, or the place of the first or the second text; with its segment.
Part = tuple[int | Literal["A", "B"], int]


@dataclass(frozen=True)
class Frame:
    """The templates of one text and of two.

    Args:
        single: ids and the place "A", each with its segment.
        pair: ids and the places "A" and "B"; None where the tokenizer reads no pairs.
    """

    single: tuple[Part, ...] = (("A", 0),)
    pair: tuple[Part, ...] | None = None

    def around(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Return the ids that a model reads, and the segment of each.

        Args:
            first: plain ids of the text.
            second: plain ids of the second text of a pair; None: the text stands alone.

        Raises:
            InputError: there are two texts and no template for them.
        """
        if second is not None and self.pair is None:
            raise InputError("this tokenizer has no template for pairs of texts; join the two texts into one")
        parts = self.single if second is None or self.pair is None else self.pair
        texts = {"A": first, "B": second or ()}
        ids: list[int] = []
        segments: list[int] = []
        for part, segment in parts:
            piece = texts[part] if isinstance(part, str) else [part]
            ids += piece
            segments += [segment] * len(piece)
        return ids, segments

    @property
    def start(self) -> tuple[int, ...]:
        """The ids in front of a single text."""
        return tuple(part for part, _ in self.single[: self._place] if not isinstance(part, str))

    @property
    def end(self) -> tuple[int, ...]:
        """The ids behind a single text."""
        return tuple(part for part, _ in self.single[self._place :] if not isinstance(part, str))

    @property
    def _place(self) -> int:
        return next(place for place, (part, _) in enumerate(self.single) if part == "A")

    def to_json(self) -> dict[str, Any]:
        """Return the frame as JSON values."""
        return {"single": self.single, "pair": self.pair}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Frame:
        """Read what `to_json` returned."""
        pair = content["pair"]
        return cls(_parts(content["single"]), None if pair is None else _parts(pair))


def _parts(content: Sequence[Sequence[Any]]) -> tuple[Part, ...]:
    return tuple((part, segment) for part, segment in content)


def frame_of_document(document: Mapping[str, Any]) -> Frame:
    """Return the templates that a `tokenizer.json` holds as its post-processor.

    Args:
        document: the parsed content of the file.

    Raises:
        InputError: a kind of post-processor that is not known, or two of them.
    """
    found = list(_templates(document.get("post_processor")))
    if len(found) > 1:
        raise InputError(f"expected one template in the post-processor of tokenizer.json, found {len(found)}")
    return found[0] if found else Frame(pair=(("A", 0), ("B", 1)))


def _templates(node: Mapping[str, Any] | None) -> list[Frame]:
    if node is None:
        return []
    kind = node.get("type")
    if kind == "Sequence":
        return [frame for inner in node["processors"] for frame in _templates(inner)]
    if kind == "TemplateProcessing":
        tokens = {name: entry["ids"] for name, entry in node["special_tokens"].items()}
        return [Frame(_of_template(node["single"], tokens), _of_template(node["pair"], tokens))]
    if kind in ("BertProcessing", "RobertaProcessing"):
        start, end = node["cls"][1], node["sep"][1]
        # The two differ in what a pair looks like: the second kind ends the first text twice and knows no segments.
        joint: tuple[Part, ...] = ((end, 0),) if kind == "BertProcessing" else ((end, 0), (end, 0))
        second = 1 if kind == "BertProcessing" else 0
        single: tuple[Part, ...] = ((start, 0), ("A", 0), (end, 0))
        return [Frame(single, ((start, 0), ("A", 0), *joint, ("B", second), (end, second)))]
    if kind == "ByteLevel":
        return []
    raise InputError(f"the post-processor '{kind}' of tokenizer.json is not known; expected a template")


def _of_template(parts: Sequence[Mapping[str, Any]], tokens: Mapping[str, Sequence[int]]) -> tuple[Part, ...]:
    found: list[Part] = []
    for part in parts:
        if "Sequence" in part:
            found.append((part["Sequence"]["id"], part["Sequence"]["type_id"]))
        else:
            token = part["SpecialToken"]
            found += [(index, token["type_id"]) for index in tokens[token["id"]]]
    return tuple(found)
