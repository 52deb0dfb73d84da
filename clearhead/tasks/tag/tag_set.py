"""Tag sets: entities in one of three tagging schemes, or plain classes.

IOB2: B- begins an entity, I- continues it. IOB1: I- begins and continues an entity; B- separates it from an entity of
the same type right before it. BIOES: as in IOB2, and E- ends an entity, S- marks an entity of one word. In all three,
B, I, E and S without a type mark entities without a type. Plain: one class per word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from clearhead.base.errors import InputError, did_you_mean, json_text
from clearhead.data.sources.tables import DataTable

OUTSIDE = "O"
Scheme = Literal["IOB1", "IOB2", "BIOES", "plain"]
_PREFIXED = re.compile(r"([BIES])-(.+)")
_BARE = frozenset("BIES")
# Matches prefixes in lower case, after the type, or with another separator than "-".
_MISSPELLED = re.compile(r"(?i:(?P<prefix>[BIES])(?:[-_:./|](?P<type>.+))?|(?P<first>.+)[-_:./|](?P<last>[BIES]))")
# With at least 20 tags and fewer than 10 words per tag, the last column probably holds text, not tags.
_SUSPICIOUS, _LEAST_WORDS = 20, 10
_ENDS = frozenset("ESO")


def find_scheme(data: DataTable) -> Scheme:
    """Return the tagging scheme of the tags in a table.

    Raises:
        InputError: the tags follow no scheme; the message names the first word that breaks it.
    """
    names = {tag for tags in data["tags"] for tag in tags}
    is_bare = has_no_types(names)
    prefixes = {tag[0] for tag in names if (is_bare and tag in _BARE) or _PREFIXED.fullmatch(tag)}
    if not prefixes:
        _refuse_misspelled(data, names)
        return "plain"
    for sentence, word, tag in _words(data):
        if tag != OUTSIDE and not is_bare and not _PREFIXED.fullmatch(tag):
            raise InputError(
                f"{data.location(sentence, word)}: the tag is {json_text(tag)}, but other tags here begin with B- or "
                f"I-; expected '{OUTSIDE}' or a tag with B-, I-, E- or S- in front"
            )
    if prefixes & {"E", "S"}:
        _check(data, _breaks_bioes, "in the scheme BIOES, which E- and S- tags indicate")
        return "BIOES"
    if next(_breaks(data, _breaks_iob2), None) is None:
        return "IOB2"
    if next(_breaks(data, _breaks_iob1), None) is None:
        return "IOB1"
    _check(data, _breaks_iob2, "in the scheme IOB2, in which other entities begin with B-")
    raise AssertionError("tags that do not follow IOB2 have a first fault")


def has_no_types(tags: Iterable[str]) -> bool:
    """Return whether the tags are prefixes alone, such as B, I and O, so that entities have no type."""
    names = set(tags) - {OUTSIDE}
    return names <= _BARE and not names.isdisjoint("BI")


def entity_type(tag: str) -> str:
    """Return the entity type of a tag with a prefix; any other tag is returned unchanged."""
    return tag[2:] if _PREFIXED.fullmatch(tag) else tag


def _refuse_misspelled(data: DataTable, tags: Collection[str]) -> None:
    """Raise an error if all tags are prefixes and types in another spelling, such as "b_PER".

    Raises:
        InputError: the tags are misspelled; the message shows the right spelling of the first one.
    """
    matches = {tag: _MISSPELLED.fullmatch(tag) for tag in tags if tag.upper() != OUTSIDE}
    rights = {
        tag: ((match["prefix"] or match["last"]).upper(), match["type"] or match["first"])
        for tag, match in matches.items()
        if match is not None
    }
    prefixes = {prefix for prefix, _ in rights.values()} & {"B", "I"}
    # Plain classes may end in "-I" too, but hardly all of them; so both B and I, or one of them and O, must occur.
    if len(rights) < len(matches) or len(prefixes) + (len(tags) > len(matches)) < 2:
        return
    sentence, word, tag = next(item for item in _words(data) if item[2] in rights)
    right = "-".join(filter(None, rights[tag]))
    raise InputError(
        f"{data.location(sentence, word)}: the tag is {json_text(tag)}, expected {json_text(right)}: B-, I-, E- or S- "
        f"in front of the type of an entity, and '{OUTSIDE}' outside of entities"
    )


def learn_tags(data: DataTable, scheme: Scheme) -> TagSet:
    """Return the tag set of the training data.

    Raises:
        InputError: there is only one tag, or too many different tags for a column of tags.
    """
    tags, num_words = TagSet.of(data["tags"], scheme), sum(map(len, data["tags"]))
    if len(tags.names) < 2:
        raise InputError(
            f"{data.location(0, 0)}: all {num_words} words from here on have the tag '{tags.names[0]}'; a tagger needs "
            "at least two tags"
        )
    if len(tags.names) >= _SUSPICIOUS and scheme == "plain" and num_words < _LEAST_WORDS * len(tags.names):
        raise InputError(
            f"{data.location(0, 0)}: the {num_words} words from here on have {len(tags.names)} different tags, such as "
            f"{', '.join(map(json_text, tags.names[:3]))}; this looks like plain text; expected in each line a word in "
            "the first column and its tag in the last"
        )
    return tags


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert IOB1 tags to IOB2: an I- that begins an entity becomes B-."""
    converted = []
    before = OUTSIDE
    for tag in tags:
        begins = tag[0] == "I" and _follows_another(before, tag)
        converted.append(f"B{tag[1:]}" if begins else tag)
        before = tag
    return converted


@dataclass(frozen=True)
class TagSet:
    """The tags that a model predicts.

    Args:
        names: the names of the tags, in the order of the model's outputs.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, tags: Sequence[Sequence[str]], scheme: Scheme) -> TagSet:
        """Return the tag set of training data, with all prefixes of the scheme for each entity type."""
        names = {tag for sentence in tags for tag in sentence}
        if scheme == "plain":
            return cls(tuple(sorted(names, key=lambda tag: (tag != OUTSIDE, tag))))
        kinds = sorted({tag[2:] for tag in names if tag != OUTSIDE})
        prefixes = "BIES" if scheme == "BIOES" else "BI"
        return cls((OUTSIDE, *("-".join(filter(None, (prefix, kind))) for kind in kinds for prefix in prefixes)))

    @property
    def fallback(self) -> int:
        """The index of the tag for a word without a token: O, or else the first tag."""
        return self.names.index(OUTSIDE) if OUTSIDE in self.names else 0

    def encode(self, data: DataTable) -> list[list[int]]:
        """Return the index of each tag, sentence by sentence.

        Raises:
            InputError: a tag is not in the training data.
        """
        index_of = {name: index for index, name in enumerate(self.names)}
        for sentence, word, tag in _words(data):
            if tag not in index_of:
                raise InputError(
                    f"{data.location(sentence, word)}: the tag {json_text(tag)} is not among the {len(self.names)} "
                    f"tags of the training data{did_you_mean(tag, self.names)}"
                )
        return [[index_of[tag] for tag in tags] for tags in data["tags"]]


def _words(data: DataTable) -> Iterator[tuple[int, int, str]]:
    """Yield the sentence index, the word index and the tag of each word in a table."""
    for sentence, tags in enumerate(data["tags"]):
        for word, tag in enumerate(tags):
            yield sentence, word, tag


def _breaks(data: DataTable, breaks: Callable[[str, str], bool]) -> Iterator[tuple[int, int, str, str]]:
    """Yield position and tags of each two neighbouring tags that break a scheme; outside a sentence, tags are O."""
    for sentence, tags in enumerate(data["tags"]):
        for word, (before, tag) in enumerate(zip([OUTSIDE, *tags], [*tags, OUTSIDE], strict=True)):
            if breaks(before, tag):
                yield sentence, min(word, len(tags) - 1), before, tag


def _check(data: DataTable, breaks: Callable[[str, str], bool], expected: str) -> None:
    for sentence, word, before, tag in _breaks(data, breaks):
        raise InputError(
            f"{data.location(sentence, word)}: tag '{tag}' cannot follow '{before}' {expected}; correct the tags, or "
            "remove the prefixes for plain classes"
        )


def _breaks_iob2(before: str, tag: str) -> bool:
    return tag[0] == "I" and _follows_another(before, tag)


def _breaks_iob1(before: str, tag: str) -> bool:
    return tag[0] == "B" and _follows_another(before, tag)


def _follows_another(before: str, tag: str) -> bool:
    """Return whether the tag before a tag is O or belongs to an entity of another type."""
    return before == OUTSIDE or before[2:] != tag[2:]


def _breaks_bioes(before: str, tag: str) -> bool:
    is_open = before[0] not in _ENDS
    continues = tag[0] in "IE"
    return is_open != continues or (continues and before[2:] != tag[2:])
