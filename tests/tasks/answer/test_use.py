"""Answers are those of a plain recipe around transformers' own models: windows, spans, scores, "no answer"."""

from __future__ import annotations

import io
import json
import random
import string
import sys
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.tasks.answer.use import Answer, answer, answer_scores
from tests.apps.cli.test_commands import run
from tests.checkpoints.hf import tokenizer_folders

QUESTION = "what runs over the grass?"
SHORT = "the cat sat on the mat, and the dog looked at it."
# What byte-level pieces cut inside a character has a place of its own in each library.
PLAIN = [text for text in tokenizer_folders.SENTENCES[:8] if text.isascii()]
LONG = " ".join([*PLAIN, *reversed(PLAIN), *PLAIN, *reversed(PLAIN)])
POSITIONS = 61


def word_pieces(folder: Path) -> dict[str, int]:
    tokenizer_folders.write(
        folder,
        {"vocab.txt": tokenizer_folders.word_list(), "tokenizer_config.json": {"tokenizer_class": "BertTokenizer"}},
    )
    return {"vocab_size": len(tokenizer_folders.word_list().splitlines()), "pad_token_id": 0}


def byte_merges(folder: Path) -> dict[str, int]:
    vocabulary, merges = tokenizer_folders.merges(("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    config = {"tokenizer_class": "RobertaTokenizer"}
    tokenizer_folders.write(folder, {"vocab.json": vocabulary, "merges.txt": merges, "tokenizer_config.json": config})
    return {"vocab_size": len(transformers.AutoTokenizer.from_pretrained(folder)), "pad_token_id": 1}


SIZES = {
    "hidden_size": 26, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 31,
    "max_position_embeddings": POSITIONS, "num_labels": 2, "initializer_range": 0.7,
}  # fmt: skip
BART = {
    "d_model": 26, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 31, "decoder_ffn_dim": 29,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": POSITIONS, "init_std": 0.7,
    "num_labels": 2, "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, Callable[[Path], dict[str, int]], dict[str, object]]] = {
    "BertForQuestionAnswering": ("bert", word_pieces, SIZES),
    "RobertaForQuestionAnswering": ("roberta", byte_merges, SIZES | {"max_position_embeddings": POSITIONS + 2}),
    "BartForQuestionAnswering": ("bart", byte_merges, BART),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, tokens, sizes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("answers")
    config = transformers.AutoConfig.for_model(model_type, **sizes, **tokens(folder))
    torch.manual_seed(7)
    getattr(transformers, request.param)(config).eval().save_pretrained(folder)
    return folder


def ours(folder: Path, context: str, **options: object) -> list[Answer]:
    model = clearhead.load(folder, precision="fp32", device="cpu")
    return answer(model.module, model.tokenizer, model.task, QUESTION, context, **options)


def plain(folder: Path, context: str, top_k: int, allow_no_answer: bool, longest: int = 15) -> list[Answer]:
    """The recipe with loops: windows as their tokenizer cuts them, every span of every window, best first."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder, attn_implementation="eager").eval()
    windows = tokenizer(
        QUESTION, context, truncation="only_second", max_length=POSITIONS, return_overflowing_tokens=True,
        stride=overlap(tokenizer), return_offsets_mapping=True,
    )  # fmt: skip
    scores: dict[tuple[int, int], float] = {}
    nowhere = 1.0
    for index in range(len(windows["input_ids"])):
        names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in windows]
        with torch.no_grad():
            out = model(**{name: torch.tensor([windows[name][index]]) for name in names})
        places = windows["offset_mapping"][index]
        inside = [number == 1 for number in windows.sequence_ids(index)]
        allowed = [0, *(position for position, is_inside in enumerate(inside) if is_inside)]
        begins, ends = (np.zeros(len(places)) for _ in range(2))
        for shares, logits in ((begins, out.start_logits[0]), (ends, out.end_logits[0])):
            shares[allowed] = logits.double()[allowed].softmax(0).numpy()
        nowhere = min(nowhere, begins[0] * ends[0])
        for first in allowed[1:]:
            for last in range(first, min(first + longest, allowed[-1] + 1)):
                span = places[first][0], places[last][1]
                scores[span] = max(scores.get(span, 0.0), begins[first] * ends[last])
    answers = [Answer(context[start:end], score, start, end) for (start, end), score in scores.items()]
    answers += [Answer("", nowhere, 0, 0)] if allow_no_answer else []
    return sorted(answers, key=lambda candidate: -candidate.score)[:top_k]


def overlap(tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    room = POSITIONS - len(tokenizer(QUESTION, "a")["input_ids"]) + len(tokenizer.tokenize("a"))
    return min(128, POSITIONS // 2, room // 2)


@pytest.mark.parametrize("allow_no_answer", [False, True])
@pytest.mark.parametrize("context", [SHORT, LONG])
def test_answers_are_those_of_the_recipe(folder: Path, context: str, allow_no_answer: bool) -> None:
    expected = plain(folder, context, 5, allow_no_answer)
    actual = ours(folder, context, top_k=5, allow_no_answer=allow_no_answer)
    assert [(candidate.start, candidate.end) for candidate in actual] == [
        (candidate.start, candidate.end) for candidate in expected
    ]
    assert np.allclose(
        [candidate.score for candidate in actual], [candidate.score for candidate in expected], rtol=1e-4, atol=0
    )
    assert all(candidate.text == context[candidate.start : candidate.end] for candidate in actual)


def test_a_long_text_is_read_in_windows_whose_batches_do_not_matter(folder: Path) -> None:
    model = clearhead.load(folder, precision="fp32", device="cpu")
    assert len(model.tokenizer.encode(LONG)) > 2 * POSITIONS
    alone, together = ours(folder, LONG, top_k=3, batch_size=1), ours(folder, LONG, top_k=3)
    assert [candidate.text for candidate in alone] == [candidate.text for candidate in together]
    assert np.allclose([candidate.score for candidate in alone], [candidate.score for candidate in together], rtol=1e-4)


def test_an_answer_has_no_more_tokens_than_asked_for(folder: Path) -> None:
    tokenizer = clearhead.load(folder).tokenizer
    for candidate in ours(folder, SHORT, top_k=7, max_tokens=2):
        assert len(tokenizer.encode(candidate.text)) <= 3  # cut out of its text, a piece can fall into two


@pytest.mark.parametrize(
    ("question", "context", "options", "sentence"),
    [
        ("", SHORT, {}, "the question is empty; there is nothing to ask"),
        (QUESTION, "", {}, "the context is empty; there is nothing to read"),
        (QUESTION * 20, SHORT, {}, "are read together with the text; shorten it"),
        (QUESTION, SHORT, {"top_k": 0}, "top_k must be at least 1, got 0"),
        (QUESTION, SHORT, {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_answered_is_said(
    folder: Path, question: str, context: str, options: dict[str, int], sentence: str
) -> None:
    model = clearhead.load(folder, precision="fp32", device="cpu")
    with pytest.raises(InputError, match=sentence):
        answer(model.module, model.tokenizer, model.task, question, context, **options)


def test_the_command_says_what_the_method_says(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = clearhead.load(folder, precision="fp32", device="cpu").answer(QUESTION, SHORT, top_k=2)
    (tmp_path / "text").write_text(SHORT, encoding="utf-8")
    arguments = (
        "answer",
        str(folder),
        "--question",
        QUESTION,
        "--top-k",
        "2",
        "--device",
        "cpu",
        "--precision",
        "fp32",
    )
    output = run(capfd, *arguments, "--context", SHORT)
    assert output == "".join(f"{candidate.text}\t{candidate.score:.4f}\n" for candidate in expected)
    assert run(capfd, *arguments, "--context-file", str(tmp_path / "text")) == output
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SHORT.encode())))
    record = json.loads(run(capfd, *arguments, "--json"))
    assert record == {"question": QUESTION, "answers": [asdict(candidate) for candidate in expected]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--context-file", "no-such"), "no-such: there is no such file"),
        (("--context", "a", "--context-file", "b"), "two ways to give the text"),
    ],
)
def test_a_text_that_is_not_there_is_no_text(
    options: tuple[str, ...], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The name of a missing file once was taken for the text, and the answer was found in it."""
    assert main(["answer", "no-such-model", "--question", QUESTION, *options]) == 2
    assert words in capfd.readouterr().err


def plain_words(text: str) -> list[str]:
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in letters.split() if word not in ("a", "an", "the")]


def plain_answer_f1(guess: str, gold: str) -> Fraction:
    """Take the words that both have off one list, one by one."""
    first, second = plain_words(guess), plain_words(gold)
    if not first or not second:
        return Fraction(first == second)
    left, common = list(second), 0
    for word in first:
        if word in left:
            left.remove(word)
            common += 1
    return Fraction(2 * common, len(first) + len(second))


def test_answers_against_plain_counting() -> None:
    draw = random.Random(9)
    pieces = ["the", "The", "A", "an", "cat", "Cat!", "(dog)", "-", "x.y", "théâtre", ""]
    texts = [" ".join(draw.choices(pieces, k=draw.randint(0, 5))) for _ in range(700)]
    golds = [draw.choices([text for text in texts if plain_words(text)], k=draw.randint(0, 3)) for _ in texts]
    scores = answer_scores(texts, golds)
    right = sum(
        any(plain_words(a) == plain_words(b) for b in gold or [""]) for a, gold in zip(texts, golds, strict=True)
    )
    best = sum(max(plain_answer_f1(a, b) for b in gold or [""]) for a, gold in zip(texts, golds, strict=True))
    assert scores.exact_match == pytest.approx(right / 700, rel=1e-12) and scores.num_questions == 700
    assert scores.f1 == pytest.approx(float(best / 700), rel=1e-12)
    assert 0.1 < scores.exact_match < scores.f1 < 1


@pytest.mark.parametrize(
    ("guess", "golds", "exact", "f1"),
    [
        ("The Normans.", ["normans"], 1, 1),
        ("an apple-pie", ["applepie"], 1, 1),
        ("in the 10th century", ["10th century"], 0, 0.8),
        ("10th 10th", ["10th century", "10th"], 0, 2 / 3),
        ("theatre", ["atre"], 0, 0),
        ("", [], 1, 1),
        ("the", [], 1, 1),
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("", ["cat", "the"], 0, 0),  # a right answer without a word is none, if there is another
        ("", ["The"], 1, 1),
    ],
)
def test_answers_counted_by_hand(guess: str, golds: list[str], exact: float, f1: float) -> None:
    measures = answer_scores([guess, "x"], [golds, ["x"]])
    assert (measures.exact_match, measures.num_questions) == ((exact + 1) / 2, 2)
    assert measures.f1 == pytest.approx((f1 + 1) / 2)
