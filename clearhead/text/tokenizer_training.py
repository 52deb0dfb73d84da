"""Train a tokenizer on text, reproducibly: the same text gives the same ids on every run.

The library iterates over hash maps with a random seed per process. This module removes the effects of that order.
Word-level vocabularies are numbered by count and text. WordPiece gets its alphabet in a fixed order before the first
merge, and ties between merges are broken by id. Unigram scores are rounded and sorted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.progress import message
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.token_roles import TokenRoles, sentinel
from clearhead.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
MASK_TOKEN = "<mask>"
ROLES = TokenRoles(pad=0, unk=1, bos=2, eos=3)
KINDS = ("bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split")

_MARKER = "▁"
_CONTINUING = "##"
# Merges of pairs that occur only once are not learned.
_MIN_FREQUENCY = 2
# Unigram scores are rounded to this many decimals: they differ between runs by up to 4e-11 (sums in hash order).
_SCORE_DECIMALS = 3
_NUM_BYTES = 256
_LONGEST_WORD, _MOST_OF_WORD = 500, 10_000
# Finds texts that may have a word of this length.
_LONG_RUN = re.compile(rf"\S{{{_LONGEST_WORD}}}|\s{{{_LONGEST_WORD}}}")


@dataclass(frozen=True)
class _VocabularySize:
    """Size of a vocabulary, and the special tokens that have its first ids."""

    vocab_size: int
    special: tuple[str, ...]


def train_tokenizer(
    kind: str, texts: Iterable[str], *, vocab_size: int, mask: bool = False, sentinels: int = 0
) -> Tokenizer:
    """Train a tokenizer of one kind.

    Args:
        kind: one of KINDS. Kinds "bpe", "unigram", "wordpiece" and "word" mark the starts of words; decoding restores a
            text except for its white space. Kinds "byte-bpe", "byte" and "character" restore it exactly. Kind "split"
            takes tokens that are separated by white space, and joins "@@ " when decoding.
        texts: training texts. An iterator is read into memory; another iterable is read several times and may be larger
            than memory.
        vocab_size: number of vocabulary entries, special tokens included. Subword kinds reach it exactly. For "word",
            "character" and "split" it is an upper limit. "byte" always has 256 entries plus the special tokens.
        mask: True to add the mask token "<mask>".
        sentinels: number of sentinel tokens "<extra_id_0>", "<extra_id_1>", ... for masked spans.

    Returns:
        A tokenizer with the special tokens first: "<pad>", "<unk>", "<s>", "</s>" have the ids 0 to 3.

    Raises:
        InputError: the kind is unknown, there is no text, or the text does not support this vocabulary size.
    """
    if kind not in KINDS:
        raise InputError(
            f"'{kind}' is not a kind of tokenizer, expected one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}"
        )
    if sentinels < 0:
        raise InputError(f"sentinels is {sentinels}, expected 0 or more")
    special, roles = _special_tokens(mask, sentinels)
    if vocab_size <= len(special):
        raise InputError(f"vocab_size is {vocab_size}, expected more than the {len(special)} special tokens")
    size = _VocabularySize(vocab_size, special)
    if isinstance(texts, Iterator):
        texts = list(texts)  # some kinds read the texts several times
    if kind == "byte":
        model: models.Model = _byte_model(size)
    elif not any(text and not text.isspace() for text in texts):
        raise InputError(f"there is no text to train a {kind} tokenizer on: give at least one line that is not empty")
    else:
        pieces = _CutTexts(_pipeline(kind), texts)
        model = _train_model(kind, pieces, size)
        if pieces.num_cut:
            message(
                f"{pieces.num_cut:,} words of over {_LONGEST_WORD:,} characters were split to train the "
                f"{kind} tokenizer, which reads only their first {_MOST_OF_WORD:,} characters"
            )
    backend = _pipeline(kind)
    backend.model = model
    backend.add_special_tokens(list(special))
    return Tokenizer(json.loads(backend.to_str()), kind=kind, roles=roles)


def _special_tokens(mask: bool, sentinels: int) -> tuple[tuple[str, ...], TokenRoles]:
    """Return the special tokens in the order of their ids, and their roles."""
    masks = (MASK_TOKEN,) if mask else ()
    first = len(SPECIAL_TOKENS) + len(masks)
    roles = TokenRoles(
        pad=ROLES.pad,
        unk=ROLES.unk,
        bos=ROLES.bos,
        eos=ROLES.eos,
        mask=len(SPECIAL_TOKENS) if mask else None,
        sentinels=tuple(range(first, first + sentinels)),
    )
    return (*SPECIAL_TOKENS, *masks, *map(sentinel, range(sentinels))), roles


def tokenizer_of_characters(ids: Mapping[str, int], *, first: int) -> Tokenizer:
    """Return a tokenizer of characters with known ids; it adds no special tokens to a text.

    Args:
        ids: the id of each character.
        first: the id of "<unk>", for characters without an id. The next id belongs to "</s>".
    """
    unknown, end = SPECIAL_TOKENS[ROLES.unk or 0], SPECIAL_TOKENS[ROLES.eos]
    backend = _pipeline("character")
    backend.model = models.WordLevel({**ids, unknown: first, end: first + 1}, unk_token=unknown)
    backend.add_special_tokens([unknown, end])
    roles = TokenRoles(pad=first + 1, unk=first, bos=ids.get("\n", first + 1), eos=first + 1)
    return Tokenizer(
        json.loads(backend.to_str()), kind="character", roles=roles, special_tokens=SpecialTokens.from_ids((), ())
    )


@dataclass
class _CutTexts(Iterable[str]):
    """Texts in which long words are split, since the time of a trainer grows with the square of the longest word.

    Attributes:
        backend: tokenizer that splits texts into words.
        texts: training texts, which may be larger than memory.
        num_cut: number of long words in the latest iteration.
    """

    backend: tokenizers.Tokenizer
    texts: Iterable[str]
    num_cut: int = 0

    def __iter__(self) -> Iterator[str]:
        self.num_cut = 0
        for text in self.texts:
            start = 0
            words = self.backend.pre_tokenizer.pre_tokenize_str(text) if _LONG_RUN.search(text) else ()
            for _, (first, last) in words:
                self.num_cut += last - first > _LONGEST_WORD
                for cut in range(first + _LONGEST_WORD, min(last, first + _MOST_OF_WORD) + 1, _LONGEST_WORD):
                    yield text[start:cut]
                    start = cut
                start = last if last > first + _MOST_OF_WORD else start
            yield text[start:]


def _train_model(kind: str, texts: Iterable[str], size: _VocabularySize) -> models.Model:
    backend = _pipeline(kind)
    match kind:
        case "bpe" | "byte-bpe":
            return _train_merges(backend, texts, size, kind)
        case "wordpiece":
            return _train_wordpiece(backend, texts, size)
        case "unigram":
            return _train_unigram(backend, texts, size)
        case _:
            return _train_word_level(backend, texts, size)


def _pipeline(kind: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of a kind without a vocabulary: only normalizer, pre-tokenizer and decoder."""
    backend = tokenizers.Tokenizer(models.WordLevel({}, unk_token=SPECIAL_TOKENS[1]))
    if kind == "split":
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif kind == "character":
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
        backend.decoder = decoders.Fuse()
    elif kind == "byte":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    elif kind == "byte-bpe":
        # A space before every text gives its first word the same token as elsewhere.
        backend.normalizer = normalizers.Prepend(" ")
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    else:
        _set_marked_words(backend, kind)
    return backend


def _set_marked_words(backend: tokenizers.Tokenizer, kind: str) -> None:
    """Split at white space and between letters, digits and other signs; a marker before a word stands for its space."""
    digits = r"\p{N}+" if kind == "word" else r"\p{N}"
    # "#" is always a separate piece, so "##" at the start of a WordPiece entry always means a continuation.
    classes = (r"#", r"[\p{L}\p{M}]+", digits, rf"[^\p{{L}}\p{{M}}\p{{N}}{_MARKER}#]+")
    pattern = "|".join(f"{_MARKER}?{name}" for name in classes) + f"|{_MARKER}"
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(rf"[\s{_MARKER}]+"), " "), normalizers.Strip()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=_MARKER, prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(pattern), "isolated"),
        ]
    )
    spaces = decoders.Metaspace(replacement=_MARKER, prepend_scheme="always")
    joined = decoders.Sequence([decoders.Replace(Regex(f"^{_CONTINUING}"), ""), spaces])
    backend.decoder = joined if kind == "wordpiece" else spaces


def _train(backend: tokenizers.Tokenizer, texts: Iterable[str], trainer: Any) -> dict[str, Any]:
    """Run a trainer of the library and return the trained model as JSON values."""
    try:
        backend.train_from_iterator(iter(texts), trainer)
    except (TypeError, UnicodeEncodeError):
        raise InputError("the texts to train a tokenizer on must be str without lone surrogates") from None
    document: dict[str, Any] = json.loads(backend.to_str())
    model: dict[str, Any] = document["model"]
    return model


def _words(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return the distinct words of the texts after pre-tokenization."""
    backend.model = models.WordLevel({}, unk_token=SPECIAL_TOKENS[1])
    return list(_train(backend, texts, trainers.WordLevelTrainer(vocab_size=2**62, show_progress=False))["vocab"])


def _check_room(kind: str, size: _VocabularySize, needed: int, of_what: str) -> None:
    if size.vocab_size < needed:
        fixed = _NUM_BYTES + len(size.special)
        other = f", or use byte-bpe, which needs {fixed}" if needed > fixed else ""
        raise InputError(
            f"vocab_size is {size.vocab_size}, but a {kind} tokenizer of this text needs at least {needed}: "
            f"{len(size.special)} special tokens and {needed - len(size.special)} {of_what}: "
            f"increase vocab_size{other}"
        )


def _check_reached(kind: str, vocab_size: int, reached: int) -> None:
    if reached < vocab_size:
        raise InputError(
            f"vocab_size is {vocab_size}, but this text supports a {kind} vocabulary of at most {reached}: "
            f"set vocab_size = {reached} or less, or give more text"
        )


def _train_merges(
    backend: tokenizers.Tokenizer, texts: Iterable[str], size: _VocabularySize, kind: str
) -> models.Model:
    initial_alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte-bpe" else []
    unknown = None if initial_alphabet else SPECIAL_TOKENS[1]
    backend.model = models.BPE(unk_token=unknown)
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=list(size.special),
        initial_alphabet=initial_alphabet,
        show_progress=False,
    )
    learned = _train(backend, texts, trainer)
    alphabet = sum(len(entry) == 1 for entry in learned["vocab"])
    _check_room(kind, size, alphabet + len(size.special), "bytes" if initial_alphabet else "characters")
    _check_reached(kind, size.vocab_size, len(learned["vocab"]))
    merges = [(left, right) for left, right in learned["merges"]]
    return models.BPE(vocab=learned["vocab"], merges=merges, unk_token=unknown)


def _train_wordpiece(backend: tokenizers.Tokenizer, texts: Iterable[str], size: _VocabularySize) -> models.Model:
    unknown = SPECIAL_TOKENS[1]
    words = _words(backend, texts)
    inside = sorted(set("".join(word[1:] for word in words)))
    first = [*size.special, *sorted(set("".join(words))), *(_CONTINUING + character for character in inside)]
    _check_room("wordpiece", size, len(first), "characters (at the start of a word and inside one)")
    backend.model = models.WordPiece(vocab={}, unk_token=unknown)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size.vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=first,  # the trainer numbers them in order, and breaks ties between merges by number
        continuing_subword_prefix=_CONTINUING,
        show_progress=False,
    )
    vocab = _train(backend, texts, trainer)["vocab"]
    _check_reached("wordpiece", size.vocab_size, len(vocab))
    return models.WordPiece(
        vocab=vocab,
        unk_token=unknown,
        continuing_subword_prefix=_CONTINUING,
        max_input_chars_per_word=1_000,
    )


def _train_unigram(backend: tokenizers.Tokenizer, texts: Iterable[str], size: _VocabularySize) -> models.Model:
    characters = set("".join(_words(backend, texts)))
    _check_room("unigram", size, len(characters) + len(size.special), "characters")
    pieces = _unigram_pieces(backend, texts, size)
    if len(pieces) < size.vocab_size:
        # With a smaller target the trainer may prune further, so train until the recommended size is reached.
        reached = size.vocab_size
        while len(pieces) < reached:
            reached = len(pieces)
            pieces = _unigram_pieces(backend, texts, _VocabularySize(reached, size.special))
        _check_reached("unigram", size.vocab_size, reached)
    return models.Unigram(vocab=pieces, unk_id=ROLES.unk, byte_fallback=False)


def _unigram_pieces(
    backend: tokenizers.Tokenizer, texts: Iterable[str], size: _VocabularySize
) -> list[tuple[str, float]]:
    """Return the special tokens and the learned pieces in a fixed order, with reproducible scores."""
    backend.model = models.Unigram()
    trainer = trainers.UnigramTrainer(
        vocab_size=size.vocab_size,
        special_tokens=list(size.special),
        unk_token=SPECIAL_TOKENS[1],
        show_progress=False,
    )
    learned = [(piece, score) for piece, score in _train(backend, texts, trainer)["vocab"][len(size.special) :]]
    # Keep every character; if the characters alone fill the vocabulary, the trainer returns too many pieces.
    ordered = sorted(_canonical_scores(learned).items(), key=lambda item: (len(item[0]) > 1, -item[1], item[0]))
    longest = ordered[: size.vocab_size - len(size.special)]
    ordered = sorted(longest, key=lambda item: (-item[1], item[0]))
    return [*((token, 0.0) for token in size.special), *ordered]


def _canonical_scores(learned: list[tuple[str, float]]) -> dict[str, float]:
    """Return scores of the pieces that do not depend on the order of hash maps."""
    lowest = min(score for _, score in learned)
    # A pruned character gets the lowest score plus 1e-4 for each pruned character before it, in hash order.
    penalised = lowest + 1e-4 * (sum(len(piece) == 1 for piece, _ in learned) + 1)
    scores = {}
    for piece, score in learned:
        is_pruned = len(piece) == 1 and score <= penalised
        scores[piece] = round(lowest if is_pruned else score, _SCORE_DECIMALS)
    return scores


def _train_word_level(backend: tokenizers.Tokenizer, texts: Iterable[str], size: _VocabularySize) -> models.Model:
    # Twice the room for special tokens: a text may contain them as words, which are dropped below.
    trainer = trainers.WordLevelTrainer(
        vocab_size=size.vocab_size + len(size.special),
        min_frequency=0,
        special_tokens=list(size.special),
        show_progress=False,
    )
    learned: dict[str, int] = _train(backend, texts, trainer)["vocab"]
    words = sorted((word for word in learned if word not in size.special), key=lambda word: learned[word])
    entries = [*size.special, *words][: size.vocab_size]
    return models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=SPECIAL_TOKENS[1])


def _byte_model(size: _VocabularySize) -> models.Model:
    needed = _NUM_BYTES + len(size.special)
    _check_room("byte", size, needed, "bytes")
    # The library writes a printable byte as the character with this code, and other bytes as characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printed = {ord(character): character for character in alphabet}
    moved = (character for character in alphabet if ord(character) >= _NUM_BYTES)
    entries = [*size.special, *(printed[byte] if byte in printed else next(moved) for byte in range(_NUM_BYTES))]
    return models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[])
