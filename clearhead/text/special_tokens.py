"""What stands around one text, or around two, where a model reads or writes them: ids and segments as data.

Every tokenizer has a frame. That of a published one is what its files say; that of one trained here follows from its
start and end token. Whatever reads texts asks the frame: training, prediction, generation and scores alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.errors import InputError

# An id, or the place of the first or the second text; with its segment.
Part = tuple[int | Literal["A", "B"], int]


@dataclass(frozen=True)
class PrefixSuffix:
    """What stands in front of a text and behind it.

    Args:
        prefix, suffix: ids.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text with what stands around it."""
        return [*self.prefix, *ids, *self.suffix]

    @property
    def decoder_input(self) -> PrefixSuffix:
        """What stands around a text that a decoder reads while it says it: all but the last id."""
        return PrefixSuffix(self.prefix, self.suffix[:-1])

    @property
    def labels(self) -> PrefixSuffix:
        """What stands around a text as a decoder should say it: all but the first id, which is only read."""
        return PrefixSuffix(self.prefix[1:], self.suffix)


@dataclass(frozen=True)
class SpecialTokens:
    """The templates of one text and of two.

    Args:
        single: ids and the place "A", each with its segment.
        pair: ids and the places "A" and "B"; None where the tokenizer reads no pairs.
        source: what an encoder reads of a text that a decoder answers; None: the same as of a single text.
        written: what a decoder reads and says of a text: it reads all but the last id, and says all but the first.
            None: not known.
    """

    single: tuple[Part, ...] = (("A", 0),)
    pair: tuple[Part, ...] | None = None
    source: PrefixSuffix | None = None
    target: PrefixSuffix | None = None

    @classmethod
    def from_bos_eos(cls, bos: int, eos: int) -> SpecialTokens:
        """Return the frame of a tokenizer that was trained here: a start and an end token.

        Source: arXiv 1810.04805, section 3 (pairs); arXiv 1706.03762, section 3.4 (the source has no start token).
        """
        single: tuple[Part, ...] = ((bos, 0), ("A", 0), (eos, 0))
        pair: tuple[Part, ...] = (*single, ("B", 1), (eos, 1))
        return cls(single, pair, source=PrefixSuffix((), (eos,)), target=PrefixSuffix((bos,), (eos,)))

    def add_to(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Return the ids that a model reads, and the segment of each.

        Args:
            first: plain ids of the text.
            second: plain ids of the second text of a pair; None: the text stands alone.

        Raises:
            InputError: there are two texts and no template for them.
        """
        parts = self.template(paired=second is not None)
        texts = {"A": first, "B": second or ()}
        ids: list[int] = []
        segments: list[int] = []
        for part, segment in parts:
            piece = texts[part] if isinstance(part, str) else [part]
            ids += piece
            segments += [segment] * len(piece)
        return ids, segments

    def template(self, *, paired: bool) -> tuple[Part, ...]:
        """Return the template of a single text, or of a pair.

        Raises:
            InputError: pairs are asked for, and there is no template for them.
        """
        if paired and self.pair is None:
            raise InputError("this tokenizer has no template for pairs of texts; join the two texts into one")
        return self.pair if paired and self.pair is not None else self.single

    def num_added(self, *, paired: bool = False) -> int:
        """Return how many ids stand around one text, or around two."""
        return sum(not isinstance(part, str) for part, _ in self.template(paired=paired))

    @property
    def for_text(self) -> PrefixSuffix:
        """What stands around a single text."""
        place = next(place for place, (part, _) in enumerate(self.single) if part == "A")
        front, behind = self.single[:place], self.single[place + 1 :]
        return PrefixSuffix(*(tuple(part for part, _ in side if not isinstance(part, str)) for side in (front, behind)))

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids in front of a single text."""
        return self.for_text.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """The ids behind a single text."""
        return self.for_text.suffix

    @property
    def for_source(self) -> PrefixSuffix:
        """What stands around a text that an encoder reads for a decoder."""
        return self.for_text if self.source is None else self.source

    @property
    def for_target(self) -> PrefixSuffix:
        """What stands around a text that a decoder writes.

        Raises:
            InputError: the files of a checkpoint do not say where its decoder begins.
        """
        if self.target is None:
            raise InputError("the checkpoint names no decoder_start_token_id, so that its decoder has no beginning")
        return self.target

    def with_target(self, target: PrefixSuffix) -> SpecialTokens:
        """Return the same frame with what a decoder writes."""
        return replace(self, target=target)

    def to_json(self) -> dict[str, Any]:
        """Return the frame as JSON values."""
        rare = {"source": self.source, "target": self.target}
        around = {name: [one.prefix, one.suffix] for name, one in rare.items() if one is not None}
        return {"single": self.single, "pair": self.pair, **around}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SpecialTokens:
        """Read what `to_json` returned."""
        pair = content["pair"]
        around = {
            name: PrefixSuffix(*(tuple(ids) for ids in content[name]))
            for name in ("source", "target")
            if name in content
        }
        return cls(_parts(content["single"]), None if pair is None else _parts(pair), **around)


def _parts(content: Sequence[Sequence[Any]]) -> tuple[Part, ...]:
    return tuple((part, segment) for part, segment in content)


def read_special_tokens(document: Mapping[str, Any]) -> SpecialTokens:
    """Return the templates that a `tokenizer.json` holds as its post-processor.

    Args:
        document: the parsed content of the file.

    Raises:
        InputError: a kind of post-processor that is not known, or two of them.
    """
    found = list(_templates(document.get("post_processor")))
    if len(found) > 1:
        raise InputError(f"expected one template in the post-processor of tokenizer.json, found {len(found)}")
    return found[0] if found else SpecialTokens(pair=(("A", 0), ("B", 1)))


def _templates(node: Mapping[str, Any] | None) -> list[SpecialTokens]:
    if node is None:
        return []
    kind = node.get("type")
    if kind == "Sequence":
        return [frame for inner in node["processors"] for frame in _templates(inner)]
    if kind == "TemplateProcessing":
        tokens = {name: entry["ids"] for name, entry in node["special_tokens"].items()}
        return [SpecialTokens(_of_template(node["single"], tokens), _of_template(node["pair"], tokens))]
    if kind in ("BertProcessing", "RobertaProcessing"):
        start, end = node["cls"][1], node["sep"][1]
        # The two differ in what a pair looks like: the second kind ends the first text twice and knows no segments.
        joint: tuple[Part, ...] = ((end, 0),) if kind == "BertProcessing" else ((end, 0), (end, 0))
        second = 1 if kind == "BertProcessing" else 0
        single: tuple[Part, ...] = ((start, 0), ("A", 0), (end, 0))
        return [SpecialTokens(single, ((start, 0), ("A", 0), *joint, ("B", second), (end, second)))]
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
