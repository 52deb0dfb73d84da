"""Too long texts get the first ids of the whole text, and only their start is tokenized."""

from __future__ import annotations

import pytest

from clearhead.base.errors import InputError
from clearhead.text.long_texts import CHARACTERS_PER_TOKEN, MOST_CHARACTERS, encode_start, refuse_enormous
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer

WORDS = ["ba de", "go fi ba", "lo ba go de fi"]
SIZES = {"bpe": 24, "byte-bpe": 265, "wordpiece": 24, "word": 24, "character": 24, "byte": 265}


def tokenizer(kind: str) -> Tokenizer:
    return train_tokenizer(kind, WORDS * 9, vocab_size=SIZES[kind])


@pytest.mark.parametrize("kind", SIZES)
def test_the_start_of_the_ids(kind: str) -> None:
    trained, texts = tokenizer(kind), ["ba", "go fi ba " * 40, "lofiba" * 9, ""]
    whole = trained.encode_batch(texts)
    for most in (1, 5, 29):
        ids, is_cut = encode_start(trained, texts, most)
        assert ids == [each[:most] for each in whole]
        assert is_cut == [len(each) > most for each in whole]


@pytest.mark.parametrize("text", ["ba " * 10**6, "bago" * 10**6, " " * 10**6])
def test_no_more_is_tokenized_than_can_be_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, seen = tokenizer("bpe"), list[int]()
    encode = Tokenizer.encode_batch

    def note(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        seen.extend(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", note)
    (ids,), (is_cut,) = encode_start(trained, [text], 17)
    assert len(ids) <= 17 and is_cut and seen == [17 * CHARACTERS_PER_TOKEN]


@pytest.mark.parametrize(("most", "limit"), [(3, 3 * CHARACTERS_PER_TOKEN), (None, MOST_CHARACTERS)])
def test_a_text_far_too_long_is_refused_by_its_number(most: int | None, limit: int) -> None:
    refuse_enormous(["a" * limit], most)
    with pytest.raises(InputError, match=f"the prompt has {limit + 1:,} characters, but at most {limit:,} are read"):
        refuse_enormous(["a" * (limit + 1)], most, "prompt")
    with pytest.raises(InputError, match=r"text 2 has .* split or shorten it"):
        refuse_enormous(["a", "a" * (limit + 1)], most)
