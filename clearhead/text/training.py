"""Train a tokenizer on text, in a canonical form: the same text gives the same ids on every run.

The library iterates over hash maps that are seeded anew in every process. What follows from that order is fixed here:
word-level vocabularies are numbered by count and text, WordPiece gets its alphabet in a fixed order before the first
merge (ties between merges are broken by id), and unigram scores are rounded and sorted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.errors import InputError, nearest
from clearhead.text.tokenizer import Roles, Tokenizer

SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
ROLES = Roles(pad=0, unk=1, bos=2, eos=3)
KINDS = ("bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split")

_MARKER = "▁"
_CONTINUING = "##"
# A piece seen once teaches a model nothing, so merges stop there.
_MIN_FREQUENCY = 2
# The library's scores differ between runs by up to 4e-11 (sums in hash order); this many decimals hide that.
_SCORE_DECIMALS = 3
_NUM_BYTES = 256


def train_tokenizer(kind: str, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a tokenizer of one kind.

    Args:
        kind: one of KINDS. "bpe", "unigram", "wordpiece" and "word" mark word starts, so that decoding restores a text
            up to its white space; "byte-bpe", "byte" and "character" restore it exactly; "split" takes tokens
            separated by white space as they are and joins "@@ " when it decodes.
        texts: the texts, read once.
        vocab_size: rows of the vocabulary, special tokens included. Subword kinds reach it exactly; for "word",
            "character" and "split" it is an upper limit; "byte" always has 260 rows and needs room for them.

    Returns:
        A tokenizer whose special tokens are "<pad>", "<unk>", "<s>", "</s>" with ids 0 to 3.

    Raises:
        InputError: an unknown kind, no text, or a vocabulary that the text does not support.
    """
    if kind not in KINDS:
        raise InputError(
            f"'{kind}' is not a kind of tokenizer; expected one of {', '.join(KINDS)}{nearest(kind, KINDS)}"
        )
    if vocab_size <= len(SPECIAL_TOKENS):
        raise InputError(f"vocab_size is {vocab_size}; expected more than the {len(SPECIAL_TOKENS)} special tokens")
    texts = list(texts)
    if kind == "byte":
        model: models.Model = _byte_model(vocab_size)
    elif not any(text and not text.isspace() for text in texts):
        raise InputError(f"no text to train a {kind} tokenizer on: expected at least one line that is not empty")
    else:
        model = _train_model(kind, texts, vocab_size)
    backend = _pipeline(kind)
    backend.model = model
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(json.loads(backend.to_str()), kind=kind, roles=ROLES)


def _train_model(kind: str, texts: Sequence[str], vocab_size: int) -> models.Model:
    backend = _pipeline(kind)
    match kind:
        case "bpe" | "byte-bpe":
            return _train_merges(backend, texts, vocab_size, kind)
        case "wordpiece":
            return _train_wordpiece(backend, texts, vocab_size)
        case "unigram":
            return _train_unigram(backend, texts, vocab_size)
        case _:
            return _train_word_level(backend, texts, vocab_size)


def _pipeline(kind: str) -> tokenizers.Tokenizer:
    """Return everything but the vocabulary: how a text is cut before the model sees it, and put together again."""
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
        # One space in front of every text makes its first word the same token as anywhere else.
        backend.normalizer = normalizers.Prepend(" ")
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    else:
        _set_marked_words(backend, kind)
    return backend


def _set_marked_words(backend: tokenizers.Tokenizer, kind: str) -> None:
    """Cut at white space and between letters, digits and other signs; a marker in front of a word holds its space."""
    digits = r"\p{N}+" if kind == "word" else r"\p{N}"
    # "#" stands alone, so that "##" at the start of a WordPiece entry always means that it continues a word.
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


def _train(backend: tokenizers.Tokenizer, texts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Run the library's trainer and return what it made of the model, as data."""
    try:
        backend.train_from_iterator(texts, trainer, length=len(texts))
    except (TypeError, UnicodeEncodeError):
        raise InputError("expected texts as str of whole Unicode characters to train a tokenizer on") from None
    document: dict[str, Any] = json.loads(backend.to_str())
    model: dict[str, Any] = document["model"]
    return model


def _words(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[str]:
    """Return the distinct pieces into which the texts are cut before a model sees them."""
    backend.model = models.WordLevel({}, unk_token=SPECIAL_TOKENS[1])
    return list(_train(backend, texts, trainers.WordLevelTrainer(vocab_size=2**62, show_progress=False))["vocab"])


def _check_room(kind: str, vocab_size: int, needed: int, of_what: str) -> None:
    if vocab_size < needed:
        fixed = _NUM_BYTES + len(SPECIAL_TOKENS)
        other = f", or use byte-bpe, which needs {fixed}" if needed > fixed else ""
        raise InputError(
            f"vocab_size is {vocab_size}, but a {kind} tokenizer of this text needs at least {needed}: "
            f"{len(SPECIAL_TOKENS)} special tokens and {needed - len(SPECIAL_TOKENS)} {of_what}; "
            f"raise vocab_size{other}"
        )


def _check_reached(kind: str, vocab_size: int, reached: int) -> None:
    if reached < vocab_size:
        raise InputError(
            f"vocab_size is {vocab_size}, but this text supports a {kind} vocabulary of at most {reached}; "
            f"set vocab_size = {reached} or less, or give more text"
        )


def _train_merges(backend: tokenizers.Tokenizer, texts: Sequence[str], vocab_size: int, kind: str) -> models.Model:
    initial_alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte-bpe" else []
    unknown = None if initial_alphabet else SPECIAL_TOKENS[1]
    backend.model = models.BPE(unk_token=unknown)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=initial_alphabet,
        show_progress=False,
    )
    learned = _train(backend, texts, trainer)
    alphabet = sum(len(entry) == 1 for entry in learned["vocab"])
    _check_room(kind, vocab_size, alphabet + len(SPECIAL_TOKENS), "bytes" if initial_alphabet else "characters")
    _check_reached(kind, vocab_size, len(learned["vocab"]))
    merges = [(left, right) for left, right in learned["merges"]]
    return models.BPE(vocab=learned["vocab"], merges=merges, unk_token=unknown)


def _train_wordpiece(backend: tokenizers.Tokenizer, texts: Sequence[str], vocab_size: int) -> models.Model:
    unknown = SPECIAL_TOKENS[1]
    words = _words(backend, texts)
    inside = sorted(set("".join(word[1:] for word in words)))
    first = [*SPECIAL_TOKENS, *sorted(set("".join(words))), *(_CONTINUING + character for character in inside)]
    _check_room("wordpiece", vocab_size, len(first), "characters (at the start of a word and inside one)")
    backend.model = models.WordPiece(vocab={}, unk_token=unknown)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=first,  # the trainer numbers these in order, and breaks ties between merges by number
        continuing_subword_prefix=_CONTINUING,
        show_progress=False,
    )
    vocab = _train(backend, texts, trainer)["vocab"]
    _check_reached("wordpiece", vocab_size, len(vocab))
    return models.WordPiece(
        vocab=vocab,
        unk_token=unknown,
        continuing_subword_prefix=_CONTINUING,
        max_input_chars_per_word=1_000,
    )


def _train_unigram(backend: tokenizers.Tokenizer, texts: Sequence[str], vocab_size: int) -> models.Model:
    characters = set("".join(_words(backend, texts)))
    _check_room("unigram", vocab_size, len(characters) + len(SPECIAL_TOKENS), "characters")
    pieces = _unigram_pieces(backend, texts, vocab_size)
    if len(pieces) < vocab_size:
        # Asked for less, the trainer can prune further: only a size that a training reached may be recommended.
        reached = vocab_size
        while len(pieces) < reached:
            reached = len(pieces)
            pieces = _unigram_pieces(backend, texts, reached)
        _check_reached("unigram", vocab_size, reached)
    return models.Unigram(vocab=pieces, unk_id=ROLES.unk, byte_fallback=False)


def _unigram_pieces(backend: tokenizers.Tokenizer, texts: Sequence[str], vocab_size: int) -> list[tuple[str, float]]:
    """Return the special tokens and the learned pieces in canonical order with canonical scores."""
    backend.model = models.Unigram()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        unk_token=SPECIAL_TOKENS[1],
        show_progress=False,
    )
    learned = [(piece, score) for piece, score in _train(backend, texts, trainer)["vocab"][len(SPECIAL_TOKENS) :]]
    lowest = min(score for _, score in learned)
    # The trainer gives characters that it pruned the lowest score plus 1e-4 for each one before them, in hash order.
    penalised = lowest + 1e-4 * (sum(len(piece) == 1 for piece, _ in learned) + 1)
    scores = {
        piece: round(lowest if len(piece) == 1 and score <= penalised else score, _SCORE_DECIMALS)
        for piece, score in learned
    }
    # Every character stays; the trainer overshoots where they alone fill the vocabulary.
    ordered = sorted(scores.items(), key=lambda item: (len(item[0]) > 1, -item[1], item[0]))
    kept = ordered[: vocab_size - len(SPECIAL_TOKENS)]
    ordered = sorted(kept, key=lambda item: (-item[1], item[0]))
    return [*((token, 0.0) for token in SPECIAL_TOKENS), *ordered]


def _train_word_level(backend: tokenizers.Tokenizer, texts: Sequence[str], vocab_size: int) -> models.Model:
    # Room for the special tokens twice: a text may contain them as words, which the vocabulary leaves to their role.
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size + len(SPECIAL_TOKENS),
        min_frequency=0,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    learned: dict[str, int] = _train(backend, texts, trainer)["vocab"]
    words = sorted((word for word in learned if word not in SPECIAL_TOKENS), key=lambda word: learned[word])
    entries = [*SPECIAL_TOKENS, *words][:vocab_size]
    return models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=SPECIAL_TOKENS[1])


def _byte_model(vocab_size: int) -> models.Model:
    needed = _NUM_BYTES + len(SPECIAL_TOKENS)
    _check_room("byte", vocab_size, needed, "bytes")
    # The library writes a byte as the character of that number where it can be printed, the others from 256 upwards.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printed = {ord(character): character for character in alphabet}
    moved = (character for character in alphabet if ord(character) >= _NUM_BYTES)
    entries = [*SPECIAL_TOKENS, *(printed[byte] if byte in printed else next(moved) for byte in range(_NUM_BYTES))]
    return models.BPE(vocab={entry: index for index, entry in enumerate(entries)}, merges=[])
