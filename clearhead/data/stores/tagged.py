"""Tagged words as ids, tokenised once and memory-mapped from then on."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Integer
from numpy import ndarray

from clearhead.data.sources.tagged import TaggedSource, TaggedTexts, read_tagged
from clearhead.data.sources.texts import WHOLE, Share
from clearhead.data.stores.arrays import Ragged, Rows, discard_folder, pack, read_arrays, write_arrays
from clearhead.data.stores.cache import Progress, cache_folder
from clearhead.data.stores.tag_set import TagSet, find_scheme, to_iob2
from clearhead.data.stores.word_chunks import NO_WORD, chunk_words
from clearhead.data.stores.word_splitter import WordSplitter
from clearhead.errors import InputError
from clearhead.text.tokenizer import Tokenizer

# Raised whenever what is written, or how it is made, changes: older entries are then no longer found.
_FORMAT = 1


_CHUNK_SENTENCES = 1_000


_MOST_SHOWN = 12


_ARRAYS = ("ids", "offsets", "words", "tags", "sentences")


@dataclass(frozen=True)
class TagReport:
    """What became of the sentences of a source.

    Args:
        sentences: all of them.
        words: all of them.
        cut: sentences in several stretches, because they are too long for one.
        shortened: words of which only the front is read, because they alone are too long.
        unread: words that the tokenizer has no piece for.
        max_length: the longest stretch that was allowed, special ids included.
        tags: how often each type of entity stands there.
    """

    sentences: int
    words: int
    cut: int
    shortened: int
    unread: int
    max_length: int
    tags: str

    def __str__(self) -> str:
        parts = [f"{self.sentences:,} sentences of {self.words:,} words read, all kept"]
        if self.cut:
            parts.append(f"{self.cut:,} cut into stretches of at most {self.max_length:,} tokens")
        if self.shortened:
            parts.append(f"{self.shortened:,} words longer than a stretch")
        if self.unread:
            parts.append(f"{self.unread:,} words that the tokenizer has no piece for")
        return f"{', '.join(parts)}; {self.tags}"


class TagStore:
    """Tagged sentences as ids in a folder, mapped into memory.

    Args:
        folder: what `prepare_tagged` wrote.

    Attributes:
        report: what became of the sentences.
        tags: the tags that a model can give.
        splitter: cuts raw text into words like those of the data.
        side: the ids of each stretch.
        words: for each of these ids the word whose first piece it is, numbered through all sentences, or NO_WORD.
        word_tags: the tag of each word.
        identity: a hash of all ids and tags; a checkpoint remembers it.

    Raises:
        InputError: the folder does not hold a whole store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            arrays, record = read_arrays(folder, _ARRAYS)
            self.report = TagReport(**record["report"])
            self.tags = TagSet(tuple(record["names"]))
            self._extra = int(record.get("extra", 2))
            self.splitter = WordSplitter(record["splitter"]["inner"], tuple(record["splitter"]["runs"]))
            self.identity = str(record["identity"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder}: not a whole store of tagged words ({error}); prepare the data again") from None
        self.side = Ragged(arrays["ids"], np.array(arrays["offsets"]))
        self.words, self.word_tags = arrays["words"], arrays["tags"]
        self._borders = np.array(arrays["sentences"])
        if len(self.words) != len(self.side.ids) or self._borders[-1] != len(self.word_tags):
            raise InputError(f"{folder}: the parts of the store do not fit each other; prepare the data again")

    def __len__(self) -> int:
        return len(self.side.offsets) - 1

    @property
    def lengths(self) -> Rows:
        """The length of each stretch with its special ids."""
        return self.side.lengths + self._extra

    def names_of(self, word_tags: Integer[ndarray, " words"]) -> list[list[str]]:
        """Return tags of all words as names, sentence by sentence.

        Args:
            word_tags: a tag of each word, such as the attribute of this name.
        """
        names = self.tags.names
        return [
            [names[tag] for tag in word_tags[start:end].tolist()] for start, end in itertools.pairwise(self._borders)
        ]


def prepare_tagged(
    source: TaggedSource,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    tags: TagSet | None = None,
    share: Share = WHOLE,
    progress: Progress | None = None,
) -> TagStore:
    """Tokenise tagged sentences, or open what an earlier run made of the same content.

    Args:
        source: where they come from.
        tokenizer: turns them into ids.
        max_length: the longest stretch in tokens, special ids included; longer sentences are cut between words.
        tags: the tags of the training data; None: this is the training data.
        share: which part of the source, from one share of its sentences to another.
        progress: called with sentences done and sentences in all, as the work goes on.

    Raises:
        InputError: the source or a tag is unusable, or no word has a piece.
        RunFailure: the cache cannot be written.
    """
    shortest = tokenizer.special_tokens.num_added() + 1
    if max_length < shortest:
        raise InputError(f"max_length is {max_length}; expected at least {shortest}, the special ids and one token")
    known = None if tags is None else tags.names
    inputs = [_FORMAT, source.identity(), tokenizer.fingerprint, max_length, known, share]
    folder = cache_folder("tagged", *inputs)
    if not folder.is_dir() or not _is_whole(folder):
        _prepare(folder, source, tokenizer, max_length=max_length, tags=tags, share=share, progress=progress)
    return TagStore(folder)


def _is_whole(folder: Path) -> bool:
    """Return whether a store can be opened; what is left of a damaged one is removed."""
    try:
        TagStore(folder)
    except InputError:
        discard_folder(folder)
        return False
    return True


def _prepare(
    folder: Path,
    source: TaggedSource,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    tags: TagSet | None,
    share: Share,
    progress: Progress | None,
) -> None:
    data, found_tags = _read(source, share)
    tags = tags or _learn_tags(data, found_tags)
    word_tags = np.array(list(itertools.chain.from_iterable(tags.encode(data))), dtype=np.int32)
    found, words, cut, shortened = _encode(data, tokenizer, max_length - tokenizer.special_tokens.num_added(), progress)
    num_read = sum(word != NO_WORD for word in words)
    if not num_read:
        raise InputError(f"{data.where(0, 0)}: the tokenizer has no piece for any of the words from here on")
    report = TagReport(
        sentences=len(data),
        words=len(word_tags),
        cut=cut,
        shortened=shortened,
        unread=len(word_tags) - num_read,
        max_length=max_length,
        tags=_describe(data),
    )
    arrays = {
        "ids": found.ids,
        "offsets": found.offsets,
        "words": np.array(words, dtype=np.int64),
        "tags": word_tags,
        "sentences": np.cumsum([0, *map(len, data.words)]),
    }
    splitter = WordSplitter.learn(itertools.chain.from_iterable(data.words))
    record = {"report": asdict(report), "names": tags.names, "splitter": asdict(splitter)}
    write_arrays(folder, arrays, {**record, "extra": tokenizer.special_tokens.num_added()})


def _read(source: TaggedSource, share: Share) -> tuple[TaggedTexts, TagSet]:
    """Return the sentences, with borders of entities as in IOB2 or BIOES, and the tags that such data can have."""
    data = read_tagged(source, share)
    scheme = find_scheme(data)
    if scheme == "IOB1":
        data = TaggedTexts(data.words, [to_iob2(sentence) for sentence in data.tags], data.where)
    return data, TagSet.of(data.tags, scheme)


def _learn_tags(data: TaggedTexts, tags: TagSet) -> TagSet:
    if len(tags.names) < 2:
        raise InputError(
            f"{data.where(0, 0)}: all words from here on have the tag '{tags.names[0]}'; a tagger needs at least two"
        )
    return tags


def _describe(data: TaggedTexts) -> str:
    counts = Counter(tag for tags in data.tags for tag in tags)
    shown_tags = [f"{tag} {count:,}" for tag, count in counts.most_common(_MOST_SHOWN)]
    more = f" and {len(counts) - _MOST_SHOWN} more" if len(counts) > _MOST_SHOWN else ""
    return f"{len(counts)} tags: {', '.join(shown_tags)}{more}"


def _encode(
    data: TaggedTexts, tokenizer: Tokenizer, room: int, progress: Progress | None
) -> tuple[Ragged, list[int], int, int]:
    """Return the ids of all stretches, the word of each id, sentences in several stretches, and words shortened."""
    ids: list[list[int]] = []
    words: list[int] = []
    cut = shortened = first_word = 0
    for row, sentence in enumerate(data.words, start=1):
        found, too_long = chunk_words(sentence, tokenizer, room=room)
        for stretch in found:
            ids.append(stretch.ids)
            words += [word if word == NO_WORD else word + first_word for word in stretch.words]
        cut += len(found) > 1
        shortened += too_long
        first_word += len(sentence)
        if progress is not None and (row % _CHUNK_SENTENCES == 0 or row == len(data)):
            progress(row, len(data))
    return pack(ids, vocab_size=tokenizer.vocab_size), words, cut, shortened
