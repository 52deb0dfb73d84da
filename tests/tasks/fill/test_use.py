"""Filling blanks: candidates have the model's probabilities, for every kind of vocabulary, and refused inputs."""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import pairwise

import pytest
import torch

from clearhead.base.errors import InputError, LongTexts, RunFailure
from clearhead.core import Transformer, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.tasks.fill.use import BLANK, fill
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.text.word_starts import WordBoundaries, special_ids
from tests.data.objectives.noisy import SIZES, lines, tokenizer

SMALL = Hyperparameters(
    family="encoder", layers=2, width=14, heads=2, feedforward=19, dropout=0.0, positions="learned", max_positions=83
)


@cache
def model(kind: str) -> Transformer:
    torch.manual_seed(11)
    size = tokenizer(kind).vocab_size
    module = build(build_spec(SMALL, source_vocab=size, target_vocab=size)).eval()
    assert module.head is not None
    with torch.no_grad():  # fresh weights find all entries nearly alike
        for parameter in module.parameters():
            parameter.mul_(3.0)
    return module


def expected_candidates(kind: str, ids: list[int], position: int) -> list[tuple[int, float]]:
    """Ordinary entries and their probabilities at one place of a framed text, best first, from all the logits."""
    kind_tokenizer = tokenizer(kind)
    with torch.no_grad():
        logits = model(kind)(torch.tensor([[kind_tokenizer.bos_id, *ids, kind_tokenizer.eos_id]])).logits
    assert logits is not None
    probabilities = logits[0, position + 1].double().softmax(0)
    ordinary = sorted(
        set(range(kind_tokenizer.vocab_size)) - special_ids(kind_tokenizer),
        key=lambda index: -float(probabilities[index]),
    )
    return [(index, float(probabilities[index])) for index in ordinary]


def parts(kind: str) -> tuple[list[str], str, str]:
    """Return the words of a line, and the text to put before and after a word so that it encodes as in a whole text."""
    words = [word for line in lines(kind) for word in line.split() if word.isalpha()][:7]
    return words, *((" ", " ") if kind in ("character", "byte") else ("", ""))


@pytest.mark.parametrize("kind", SIZES)
def test_candidates_are_those_of_the_model_and_texts_read_as_decoding_gives(kind: str) -> None:
    kind_tokenizer = tokenizer(kind)
    words, before, behind = parts(kind)
    left, right = (
        kind_tokenizer.encode(" ".join(words[:3]) + before),
        kind_tokenizer.encode(behind + " ".join(words[3:])),
    )
    text = " ".join([*words[:3], BLANK, *words[3:]])
    ordinary = int(WordBoundaries(kind_tokenizer).ordinary.sum())
    ((candidates,),) = fill(model(kind), kind_tokenizer, [text], top_k=ordinary)
    wanted = expected_candidates(kind, [*left, kind_tokenizer.mask_id, *right], len(left))
    assert len(candidates) == len(wanted)
    start = text.index(BLANK)
    for candidate, (_, probability) in zip(candidates, wanted, strict=True):
        assert candidate.probability == pytest.approx(probability, rel=1e-4)
        assert (candidate.start, candidate.end) == (start, start + len(BLANK))
    by_token = {candidate.token: candidate for candidate in candidates}
    for index, _ in wanted:
        candidate = by_token[kind_tokenizer.tokens([index])[0]]
        decoded = kind_tokenizer.decode([*left, index, *right])
        if candidate.text.strip() and "\ufffd" not in decoded + candidate.filled:
            # Segmented text keeps the marks that decoding would join.
            filled = re.sub("@@ ", "", candidate.filled) if kind == "split" else candidate.filled
            assert filled == decoded
            assert candidate.text in candidate.filled


@pytest.mark.parametrize("kind", SIZES)
def test_all_blanks_are_filled_at_once(kind: str) -> None:
    kind_tokenizer = tokenizer(kind)
    words, before, behind = parts(kind)
    text = f"{BLANK} {words[0]} {BLANK} {words[1]} {BLANK}"
    middle = [kind_tokenizer.encode(behind + words[0] + before), kind_tokenizer.encode(behind + words[1] + before)]
    ids = [kind_tokenizer.mask_id, *middle[0], kind_tokenizer.mask_id, *middle[1], kind_tokenizer.mask_id]
    places = [position for position, index in enumerate(ids) if index == kind_tokenizer.mask_id]
    (blanks,) = fill(model(kind), kind_tokenizer, [text], top_k=3)
    assert len(blanks) == 3
    for candidates, position, start in zip(blanks, places, re.finditer(BLANK, text), strict=True):
        wanted = expected_candidates(kind, ids, position)[:3]
        assert [candidate.probability for candidate in candidates] == pytest.approx([p for _, p in wanted], rel=1e-4)
        assert {candidate.start for candidate in candidates} == {start.start()}
    best = blanks[0][0].filled
    assert all(candidates[0].filled == best for candidates in blanks)
    assert BLANK not in best and (kind == "split" or [words[0] in best, words[1] in best] == [True, True])


def test_neither_neighbours_nor_the_mode_of_the_module_matter() -> None:
    kind_tokenizer, module = tokenizer("bpe"), model("bpe")
    texts = [f"{line} {BLANK}" for line in lines("bpe")[:11] if len(line) < 60] + [f"{BLANK} ba"]
    alone = [fill(module, kind_tokenizer, [text], top_k=3)[0] for text in texts]
    module.train()
    together = fill(module, kind_tokenizer, texts, top_k=3, batch_tokens=97)
    assert module.training
    module.eval()
    for alone_blanks, together_blanks in zip(alone, together, strict=True):
        for left, right in zip(alone_blanks, together_blanks, strict=True):
            assert [entry.token for entry in left] == [entry.token for entry in right]
            for first, second in zip(left, right, strict=True):
                assert first.probability == pytest.approx(second.probability, rel=1e-4)
                assert first.filled == second.filled
    assert all(left.probability >= right.probability for left, right in pairwise(together[0][0]))


def test_the_mask_token_and_longer_lines_are_blanks_too() -> None:
    kind_tokenizer, module = tokenizer("bpe"), model("bpe")
    texts = ["ba ___ fi", "ba <mask> fi", "ba ______ fi"]
    found_tokens = [[entry.token for entry in blanks[0]] for blanks in fill(module, kind_tokenizer, texts, top_k=5)]
    assert found_tokens[0] == found_tokens[1] == found_tokens[2]
    assert [blanks[0][0].end for blanks in fill(module, kind_tokenizer, texts, top_k=1)] == [6, 9, 9]


@pytest.mark.parametrize("kind", ["bpe", "byte-bpe", "unigram", "wordpiece", "word"])
def test_a_blank_that_touches_a_word_is_a_piece_of_it(kind: str) -> None:
    kind_tokenizer = tokenizer(kind)
    words, _, _ = parts(kind)
    ((candidates,),) = fill(model(kind), kind_tokenizer, [f"{words[0]}{BLANK} {words[1]}"], top_k=7)
    ids = [*kind_tokenizer.encode(words[0]), kind_tokenizer.mask_id, *kind_tokenizer.encode(words[1])]
    wanted = expected_candidates(kind, ids, ids.index(kind_tokenizer.mask_id))[:7]
    assert [candidate.probability for candidate in candidates] == pytest.approx([p for _, p in wanted], rel=1e-4)
    for candidate in candidates:
        assert candidate.filled.startswith(words[0]) and candidate.filled.endswith(words[1])


def test_special_entries_have_their_share_but_are_no_candidates() -> None:
    kind_tokenizer = tokenizer("bpe")
    fresh = build(model("bpe").spec)  # finds all entries nearly alike
    ((candidates,),) = fill(
        fresh, kind_tokenizer, [f"ba {BLANK}"], top_k=int(WordBoundaries(kind_tokenizer).ordinary.sum())
    )
    share = len(candidates) / kind_tokenizer.vocab_size
    assert math.fsum(candidate.probability for candidate in candidates) == pytest.approx(share, abs=0.05)
    special = set(kind_tokenizer.tokens(sorted(special_ids(kind_tokenizer))))
    assert special.isdisjoint(candidate.token for candidate in candidates)


@pytest.mark.parametrize(
    ("texts", "top_k", "message"),
    [
        (["ba ___", "ba de"], 5, "text 2 has no blank: write ___ or <mask>"),
        (["ba __"], 5, "text 1 has no blank"),
        (["ba ___", "go " * 99 + "___"], 5, "text 2 has its blanks after the 83 tokens that the model reads"),
        (["go " * 10**5 + "___"], 5, "text 1 has its blanks after"),
        (["ba ___"], 0, "top_k is 0"),
        (["ba ___"], 10_000, "top_k is 10000; expected 1 to"),
    ],
)
def test_texts_that_cannot_be_filled_are_refused(texts: list[str], top_k: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fill(model("bpe"), tokenizer("bpe"), texts, top_k=top_k)


def test_a_long_text_is_read_as_its_front() -> None:
    kind_tokenizer = tokenizer("character")
    special = kind_tokenizer.special_tokens.num_added()
    text = "ab ___ c ___ d" + " ___" * 10**5
    with pytest.warns(LongTexts, match=f"1 text is longer than the {7 + special} tokens"):
        ((first, *others),) = fill(model("character"), kind_tokenizer, [text], top_k=3, max_length=7 + special)
    ((expected, *_),) = fill(model("character"), kind_tokenizer, ["ab ___ c "], top_k=3)
    assert [(word.token, word.start) for word in first] == [(word.token, word.start) for word in expected]
    assert [word.probability for word in first] == pytest.approx([word.probability for word in expected], rel=1e-4)
    assert len(others) < 2 and first[0].filled.startswith("ab ") and first[0].filled.endswith("d" + " ___" * 10**5)


def test_a_blank_that_the_tokenizer_cannot_tell_apart_is_refused() -> None:
    with pytest.raises(InputError, match="blank at characters 2 to 5 and the text next to it are one"):
        fill(model("split"), tokenizer("split"), ["ba___ de"])


def test_models_and_tokenizers_that_cannot_fill_are_refused() -> None:
    kind_tokenizer = tokenizer("bpe")
    size = kind_tokenizer.vocab_size
    hparams = {"source_vocab": size, "target_vocab": size}
    decoder = build(build_spec(Hyperparameters(family="decoder", layers=1, width=8, heads=2, feedforward=8), **hparams))
    with pytest.raises(InputError, match="reads only from left to right"):
        fill(decoder, kind_tokenizer, ["ba ___"])
    spec = model("bpe").spec
    headless = build(spec.model_copy(update={"head": None}))
    with pytest.raises(InputError, match="does not predict vocabulary entries"):
        fill(headless, kind_tokenizer, ["ba ___"])
    plain: Tokenizer = train_tokenizer("bpe", lines("bpe"), vocab_size=size)
    with pytest.raises(InputError, match="has no mask token"):
        fill(model("bpe"), plain, ["ba ___"])


def test_outputs_that_are_not_finite_are_a_failure() -> None:
    broken = build(model("bpe").spec)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(RunFailure, match="not finite"):
        fill(broken, tokenizer("bpe"), ["ba ___"])


def test_the_vocabulary_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kind_tokenizer, text = tokenizer("bpe"), f"{parts('bpe')[0][0]} {BLANK}"
    first = fill(model("bpe"), kind_tokenizer, [text])
    monkeypatch.setattr(Tokenizer, "entries", None)
    assert fill(model("bpe"), kind_tokenizer, [text]) == first
