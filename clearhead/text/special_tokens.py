"""Special tokens around one text or a pair of texts, as ids and segments.

A Hugging Face tokenizer has the templates in its files; one that clearhead trained uses its start and end token.
Training, prediction, generation and scoring all use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.base.errors import InputError

# An item of a template and its segment: a token id, or "A" or "B" for the first or the second text.
TemplateItem = tuple[int | Literal["A", "B"], int]


@dataclass(frozen=True)
class PrefixSuffix:
    """Special token ids before and after a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """Add prefix and suffix to the ids of a text."""
        return [*self.prefix, *ids, *self.suffix]

    @property
    def decoder_input(self) -> PrefixSuffix:
        """Prefix and suffix of the decoder's input; the suffix's last id is left out, since it is only predicted."""
        return PrefixSuffix(self.prefix, self.suffix[:-1])

    @property
    def labels(self) -> PrefixSuffix:
        """Prefix and suffix of the decoder's labels; the prefix's first id is left out, since it is only read."""
        return PrefixSuffix(self.prefix[1:], self.suffix)


@dataclass(frozen=True)
class SpecialTokens:
    """Templates of special tokens around one text and around a pair of texts.

    Args:
        single: template of one text: special ids and "A" (the text), each with its segment.
        pair: template of a pair: special ids, "A" and "B" (the texts). None means that the tokenizer reads no pairs.
        source: ids around a text that the encoder of an encoder-decoder reads. None means those of a single text.
        target: ids around a text that a decoder reads (without the last id) and predicts (without the first id). None
            means unknown.
    """

    single: tuple[TemplateItem, ...] = (("A", 0),)
    pair: tuple[TemplateItem, ...] | None = None
    source: PrefixSuffix | None = None
    target: PrefixSuffix | None = None

    def __post_init__(self) -> None:
        """Check the templates, since they come from files."""
        for name, template, wanted in (("a text", self.single, ["A"]), ("a pair of texts", self.pair, ["A", "B"])):
            texts = sorted(item for item, _ in template or () if isinstance(item, str))
            if template is not None and texts != wanted:
                raise InputError(f"the tokenizer's template of {name} contains the texts {texts}, expected {wanted}")

    @classmethod
    def from_ids(cls, prefix: Sequence[int], suffix: Sequence[int]) -> SpecialTokens:
        """Return templates with `prefix` before a text and `suffix` after it; a second text gets only the suffix."""
        single: tuple[TemplateItem, ...] = (
            *((index, 0) for index in prefix),
            ("A", 0),
            *((index, 0) for index in suffix),
        )
        return cls(single, (*single, ("B", 1), *((index, 1) for index in suffix)))

    @classmethod
    def from_bos_eos(cls, bos: int, eos: int) -> SpecialTokens:
        """Return the templates of a tokenizer that clearhead trained, from its start and end token.

        Source: arXiv 1810.04805, section 3 (pairs); arXiv 1706.03762, section 3.4 (the source has no start token).
        """
        both = cls.from_ids((bos,), (eos,))
        return replace(both, source=PrefixSuffix((), (eos,)), target=PrefixSuffix((bos,), (eos,)))

    def add_to(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Add special tokens to the ids of a text or a pair; return the ids and their segments.

        Args:
            first: ids of the text, without special tokens.
            second: ids of the second text of a pair. None means a single text.

        Raises:
            InputError: the tokenizer has no template for pairs.
        """
        texts = {"A": first, "B": second or ()}
        ids: list[int] = []
        segments: list[int] = []
        for item, segment in self.template(paired=second is not None):
            item_ids = texts[item] if isinstance(item, str) else [item]
            ids += item_ids
            segments += [segment] * len(item_ids)
        return ids, segments

    def template(self, *, paired: bool) -> tuple[TemplateItem, ...]:
        """Return the special-token template of a single text, or of a pair of texts.

        Raises:
            InputError: the tokenizer has no template for pairs.
        """
        if paired and self.pair is None:
            raise InputError("this tokenizer has no template for pairs of texts: join the two texts into one")
        return self.pair if paired and self.pair is not None else self.single

    def num_added(self, *, paired: bool = False) -> int:
        """Return the number of special tokens around a single text or a pair."""
        return len(_ids_in(self.template(paired=paired)))

    @property
    def for_text(self) -> PrefixSuffix:
        """Special token ids around a single text."""
        position = [item for item, _ in self.single].index("A")
        return PrefixSuffix(_ids_in(self.single[:position]), _ids_in(self.single[position:]))

    @property
    def prefix(self) -> tuple[int, ...]:
        """Special token ids before a single text."""
        return self.for_text.prefix

    @property
    def suffix(self) -> tuple[int, ...]:
        """Special token ids after a single text."""
        return self.for_text.suffix

    @property
    def for_source(self) -> PrefixSuffix:
        """Special token ids around a text that the encoder of an encoder-decoder reads."""
        return self.for_text if self.source is None else self.source

    @property
    def for_target(self) -> PrefixSuffix:
        """Special token ids around a text that a decoder writes.

        Raises:
            InputError: the files of the checkpoint do not define the start token of its decoder.
        """
        if self.target is None:
            raise InputError("the checkpoint has no decoder_start_token_id: add it to its config.json")
        return self.target

    def with_target(self, target: PrefixSuffix | None) -> SpecialTokens:
        """Return a copy with other ids around a text that a decoder writes."""
        return replace(self, target=target)

    @property
    def largest_id(self) -> int:
        """Largest id of all special tokens; -1 if there are none."""
        sides = [ids for side in (self.source, self.target) if side is not None for ids in (side.prefix, side.suffix)]
        return max(
            [*_ids_in((*self.single, *(self.pair or ()))), *(index for ids in sides for index in ids)], default=-1
        )

    def to_json(self) -> dict[str, Any]:
        """Return the special tokens as JSON values."""
        sides = {"source": self.source, "target": self.target}
        known = {name: [side.prefix, side.suffix] for name, side in sides.items() if side is not None}
        return {"single": self.single, "pair": self.pair, **known}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SpecialTokens:
        """Return the special tokens from JSON values that `to_json` returned."""
        pair, names = content["pair"], [name for name in ("source", "target") if name in content]
        sides = {name: PrefixSuffix(*map(tuple, content[name])) for name in names}
        return cls(_template(content["single"]), None if pair is None else _template(pair), **sides)


def _template(content: Sequence[Sequence[Any]]) -> tuple[TemplateItem, ...]:
    return tuple((item, segment) for item, segment in content)


def _ids_in(template: Sequence[TemplateItem]) -> tuple[int, ...]:
    return tuple(item for item, _ in template if not isinstance(item, str))


def read_special_tokens(document: Mapping[str, Any]) -> SpecialTokens:
    """Read the templates from the post-processor of a `tokenizer.json`.

    Args:
        document: parsed content of the file, after `check_document`.

    Raises:
        InputError: the post-processor has more than one template.
    """
    templates = _templates(document.get("post_processor"))
    if len(templates) > 1:
        raise InputError(f"the post-processor of tokenizer.json must have one template, got {len(templates)}")
    return templates[0] if templates else SpecialTokens(pair=(("A", 0), ("B", 1)))


def _templates(node: Mapping[str, Any] | None) -> list[SpecialTokens]:
    if node is None:
        return []
    kind = node.get("type")
    if kind == "Sequence":
        return [template for inner in node["processors"] for template in _templates(inner)]
    if kind == "TemplateProcessing":
        tokens = {name: entry["ids"] for name, entry in node["special_tokens"].items()}
        return [SpecialTokens(_of_template(node["single"], tokens), _of_template(node["pair"], tokens))]
    if kind in ("BertProcessing", "RobertaProcessing"):
        start, end = node["cls"][1], node["sep"][1]
        # In a pair, RobertaProcessing has two end tokens after the first text, and no segments.
        joint: tuple[TemplateItem, ...] = ((end, 0),) if kind == "BertProcessing" else ((end, 0), (end, 0))
        second = 1 if kind == "BertProcessing" else 0
        single: tuple[TemplateItem, ...] = ((start, 0), ("A", 0), (end, 0))
        return [SpecialTokens(single, ((start, 0), ("A", 0), *joint, ("B", second), (end, second)))]
    return []


def _of_template(items: Sequence[Mapping[str, Any]], tokens: Mapping[str, Sequence[int]]) -> tuple[TemplateItem, ...]:
    template: list[TemplateItem] = []
    for item in items:
        if "Sequence" in item:
            template.append((item["Sequence"]["id"], item["Sequence"]["type_id"]))
        else:
            token = item["SpecialToken"]
            template += [(index, token["type_id"]) for index in tokens[token["id"]]]
    return tuple(template)
