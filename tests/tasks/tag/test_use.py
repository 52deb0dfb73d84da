"""Tags of words come from the first token of each word; entities have the right offsets; other models are refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.base.errors import InputError, RunFailure
from clearhead.core import Transformer
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.tag.data import DATA
from clearhead.tasks.tag.splitting import WordSplitter
from clearhead.tasks.tag.store import prepare_tagged
from clearhead.tasks.tag.tag_set import TagSet
from clearhead.tasks.tag.use import (
    Entity,
    TagMeasures,
    WordTags,
    _entities,
    check_tagger,
    entity_f1,
    entity_spans,
    measure_store,
    tag,
    tag_words,
)
from clearhead.text.tokenizer import Tokenizer
from tests.tasks.labelled_models import character_tokenizer, model, random_texts

TAGS = ("O", "B-A", "I-A", "B-B", "I-B")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return character_tokenizer()


@pytest.fixture(params=["encoder", "decoder"])
def module(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Transformer:
    return model(request.param, tokenizer, count=5)


def record(**changes: Any) -> TaskRecord:
    return TaskRecord(**{"kind": "tag", "labels": TAGS, "max_length": 200, **changes})


def tag_alone(module: Transformer, tokenizer: Tokenizer, words: list[str]) -> list[list[float]]:
    """The probabilities of each word's tags; a character tokenizer shows where its first piece is."""
    text = " ".join(words)
    ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    with torch.no_grad():
        logits = module.eval()(torch.tensor([ids])).logits
    assert logits is not None
    places = np.cumsum([1, *(len(word) + 1 for word in words[:-1])])
    rows: list[list[float]] = logits[0, places].softmax(1).tolist()
    return rows


def split(text: str) -> list[tuple[int, int]]:
    return WordSplitter().spans(text)


def test_every_text_is_answered_as_if_it_were_alone(module: Transformer, tokenizer: Tokenizer) -> None:
    texts = [*random_texts(13), "", " , "]
    module.train()
    answers = tag(module, tokenizer, record(), texts, batch_tokens=70)
    assert module.training  # its own mode is restored
    num_entities = 0
    for text, answer in zip(texts, answers, strict=True):
        spans = split(text)
        if not spans:
            assert answer == []
            continue
        rows = tag_alone(module, tokenizer, [text[start:end] for start, end in spans])
        expected = [
            (label, spans[first][0], spans[behind - 1][1], np.mean([max(row) for row in rows[first:behind]]))
            for first, behind, label in entity_spans([TAGS[int(np.argmax(row))] for row in rows])
        ]
        assert [(entity.label, entity.start, entity.end) for entity in answer] == [want[:3] for want in expected]
        assert [entity.probability for entity in answer] == pytest.approx([want[3] for want in expected], abs=1e-5)
        assert all(entity.text == text[entity.start : entity.end] for entity in answer)
        num_entities += len(answer)
    assert num_entities > 10
    one_by_one = tag(module, tokenizer, record(), texts, batch_size=1)
    places = [[(entity.label, entity.start, entity.end) for entity in answer] for answer in answers]
    assert [[(entity.label, entity.start, entity.end) for entity in answer] for answer in one_by_one] == places


def test_a_list_of_words_is_a_text_with_spaces(module: Transformer, tokenizer: Tokenizer) -> None:
    words = ["ab", "c.d", "e", ",", "gh"]
    (answer,) = tag(module, tokenizer, record(), [words])
    rows = tag_alone(module, tokenizer, words)
    expected = [" ".join(words[first:last]) for first, last, _ in entity_spans([TAGS[np.argmax(row)] for row in rows])]
    assert [entity.text for entity in answer] == expected
    assert all(" ".join(words)[entity.start : entity.end] == entity.text for entity in answer)


def test_raw_text_is_split_as_the_training_data_was(tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=2)
    plain = record(labels=("X", "Y"), inner_signs=".", sign_runs=(",,",))
    (answer,) = tag(module, tokenizer, plain, ["ab.c ,,d, e"])
    assert [entity.text for entity in answer] == ["ab.c", ",,", "d", ",", "e"]
    assert [(entity.start, entity.end) for entity in answer] == [(0, 4), (5, 7), (7, 8), (8, 9), (10, 11)]


def test_long_texts_are_read_in_stretches_and_nothing_is_dropped(tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=2)
    words = ["abc", "de", "f"] * 20
    plain = record(labels=("X", "Y"), max_length=17)
    (answer,) = tag(module, tokenizer, plain, [words])
    assert [entity.text for entity in answer] == words
    (alone,) = tag(module, tokenizer, plain, [words[:5]])
    # The stretches are even, here of five words, and each is read on its own.
    assert [entity.label for entity in answer[:5]] == [entity.label for entity in alone]


def test_a_word_without_a_piece_has_the_fallback(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model("encoder", tokenizer, count=5)
    encode = Tokenizer.encode_with_spans

    def deaf(self: Tokenizer, text: str) -> Any:
        remaining = [
            (index, span) for index, span in zip(*encode(self, text), strict=True) if text[slice(*span)] != "c"
        ]
        return [index for index, _ in remaining], [span for _, span in remaining]

    monkeypatch.setattr(Tokenizer, "encode_with_spans", deaf)
    (word_tags,) = tag_words(module, tokenizer, [["ab", "c", "d"]], fallback=3, max_length=20)
    assert (word_tags.tags[1], word_tags.probabilities[1]) == (3, 0.0)
    assert (word_tags.probabilities[[0, 2]] > 0).all()


@pytest.mark.parametrize(
    ("change", "count", "pool", "message"),
    [
        ({"kind": "generate", "labels": ()}, 5, None, "trained to 'generate', so it cannot tag words.* init ="),
        ({"kind": "classify"}, 5, None, "trained to 'classify', so it cannot tag words"),
        ({}, 4, None, "the model has 4 outputs, but its record names 5 tags"),
        ({}, 5, "mean", "it cannot tag words"),
    ],
)
def test_a_head_that_learned_no_tags_never_answers(
    change: dict[str, Any], count: int, pool: str | None, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InputError, match=message):
        tag(model("encoder", tokenizer, count=count, pool=pool), tokenizer, record(**change), ["abc"])


def test_texts_that_have_no_answer(module: Transformer, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="text 2 is a list of words, but one of them is ' '"):
        tag(module, tokenizer, record(), [["a"], ["b", " "]])
    assert tag(module, tokenizer, record(), []) == []


def test_outputs_that_are_not_finite_are_no_answer(module: Transformer, tokenizer: Tokenizer) -> None:
    with torch.no_grad():
        next(module.head.parameters()).fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(RunFailure, match="not finite"):
        tag(module, tokenizer, record(), ["abc"])


def write_jsonl(folder: Path, sentences: list[list[str]], tags: list[list[str]]) -> Any:
    path = folder / "t.jsonl"
    rows = [json.dumps({"tokens": sentence, "tags": other}) for sentence, other in zip(sentences, tags, strict=True)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return DATA.source({"text": str(path)})


def measure_file(module: Transformer, tokenizer: Tokenizer, source: Any, **sizes: int) -> tuple[TagMeasures, str]:
    store = prepare_tagged(source, tokenizer, max_length=32, tags=check_tagger(module, record()))
    return measure_store(module, tokenizer, store, **sizes), store.report


def test_an_evaluation_counts_what_tag_says(tmp_path: Path, module: Transformer, tokenizer: Tokenizer) -> None:
    sentences = [text.replace(".", "").replace(",", "").split() or ["a"] for text in random_texts(31)]
    tags = [["B-A", *["O"] * (len(sentence) - 1)] for sentence in sentences]
    tags[0] = ["B-B", *["I-B"] * (len(sentences[0]) - 1)]
    measures, report = measure_file(module, tokenizer, write_jsonl(tmp_path, sentences, tags), batch_tokens=9)
    answers = tag(module, tokenizer, record(), sentences)
    first = [Entity("A", sentence[0], 0, len(sentence[0]), 0.0) for sentence in sentences[1:]]
    hits = sum(
        any((entity.label, entity.start, entity.end) == (want.label, want.start, want.end) for entity in answer)
        for answer, want in zip(answers[1:], first, strict=True)
    )
    whole = " ".join(sentences[0])
    hits += any((entity.label, entity.start, entity.end) == ("B", 0, len(whole)) for entity in answers[0])
    assert hits and measures.precision == hits / sum(map(len, answers)) and measures.recall == hits / 31
    losses = [
        -math.log(row[TAGS.index(name)])
        for sentence, names in zip(sentences, tags, strict=True)
        for row, name in zip(tag_alone(module, tokenizer, sentence), names, strict=True)
    ]
    assert measures.loss == pytest.approx(np.mean(losses), rel=1e-4)
    assert report.startswith("31 sentences of")


def test_an_evaluation_with_other_tags_is_refused(tmp_path: Path, module: Transformer, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=r'.jsonl:1, word 2: the tag "B-C" is not among the 5'):
        measure_file(module, tokenizer, write_jsonl(tmp_path, [["a", "b"]], [["O", "B-C"]]))


def end_of_chunk(before: str, now: str, type_before: str, type_now: str) -> bool:
    """The table of conlleval, case by case."""
    listed = {("B", "B"), ("B", "O"), ("I", "B"), ("I", "O"), ("B", "S"), ("I", "S"), ("E", "B"), ("E", "I"),
              ("E", "E"), ("E", "S"), ("E", "O"), ("S", "B"), ("S", "I"), ("S", "E"), ("S", "S"),
              ("S", "O")}  # fmt: skip
    return (before, now) in listed or (before != "O" and type_before != type_now)


def start_of_chunk(before: str, now: str, type_before: str, type_now: str) -> bool:
    """The table of conlleval, case by case."""
    listed = {("B", "B"), ("I", "B"), ("O", "B"), ("O", "I"), ("O", "E"), ("O", "S"), ("E", "B"), ("E", "E"),
              ("E", "I"), ("E", "S"), ("S", "B"), ("S", "E"), ("S", "I"), ("S", "S"), ("B", "S"),
              ("I", "S")}  # fmt: skip
    return (before, now) in listed or (now != "O" and type_before != type_now)


def conlleval(predicted: list[list[str]], expected: list[list[str]]) -> tuple[int, int, int]:
    """The counts of conlleval the way it makes them: one pass over the words, both sides open at once."""
    num_expected = num_predicted = num_correct = 0
    words = [pair for guessed, true in zip(predicted, expected, strict=True)
             for pair in [*zip(guessed, true, strict=True), ("O", "O")]]  # fmt: skip
    guess_before, guess_type_before, true_before, true_type_before, both_open = "O", "", "O", "", False
    for guess_tag, true_tag in words:
        guess, _, guess_type = guess_tag.partition("-")
        true, _, true_type = true_tag.partition("-")
        true_side = (true_before, true, true_type_before, true_type)
        guess_side = (guess_before, guess, guess_type_before, guess_type)
        if both_open:
            if end_of_chunk(*true_side) and end_of_chunk(*guess_side) and guess_type_before == true_type_before:
                both_open = False
                num_correct += 1
            elif end_of_chunk(*true_side) != end_of_chunk(*guess_side) or guess_type != true_type:
                both_open = False
        if start_of_chunk(*true_side) and start_of_chunk(*guess_side) and guess_type == true_type:
            both_open = True
        num_expected += start_of_chunk(*true_side)
        num_predicted += start_of_chunk(*guess_side)
        guess_before, guess_type_before, true_before, true_type_before = guess, guess_type, true, true_type
    return num_expected, num_predicted, num_correct


@pytest.mark.parametrize("prefixes", ["BI", "I", "BIES"])
def test_entities_are_counted_as_conlleval_does(prefixes: str) -> None:
    draw = random.Random(len(prefixes))
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("PER", "LOC-x"))]
    expected = [draw.choices(tags, k=draw.randint(0, 13)) for _ in range(401)]
    predicted = [[tag if draw.random() < 0.7 else draw.choice(tags) for tag in sentence] for sentence in expected]
    scores = entity_f1(predicted, expected)
    assert (scores.all.expected, scores.all.predicted, scores.all.correct) == conlleval(predicted, expected)
    assert scores.all.correct > 50
    for name in ("expected", "predicted", "correct"):
        assert sum(getattr(counts, name) for counts in scores.by_type.values()) == getattr(scores.all, name)
    words = [pair for left, right in zip(predicted, expected, strict=True) for pair in zip(left, right, strict=True)]
    assert scores.num_words == len(words)
    assert scores.tag_accuracy == pytest.approx(sum(left == right for left, right in words) / len(words))


def test_scores_by_hand() -> None:
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-PER"]]
    predicted = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "B-PER"]]
    scores = entity_f1(predicted, expected)
    assert (scores.all.precision, scores.all.recall) == (2 / 4, 2 / 3)
    assert scores.all.f1 == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))
    assert scores.by_type["PER"].precision == pytest.approx(2 / 3)
    assert scores.by_type["LOC"].f1 == 0.0
    assert list(scores.by_type) == ["LOC", "PER"]


def test_spans_where_tags_do_not_follow_the_scheme() -> None:
    assert entity_spans(["O", "I-A", "I-A", "I-B", "B-B", "O"]) == [(1, 3, "A"), (3, 4, "B"), (4, 5, "B")]
    assert entity_spans(["B-A", "E-A", "I-A", "S-A"]) == [(0, 2, "A"), (2, 3, "A"), (3, 4, "A")]
    assert entity_spans([]) == entity_spans(["O"]) == []


def test_plain_classes_are_one_entity_for_each_word() -> None:
    assert entity_spans(["NN", "NN", "O", "-LRB-"]) == [(0, 1, "NN"), (1, 2, "NN"), (3, 4, "-LRB-")]
    scores = entity_f1([["NN", "VB", "NN"]], [["NN", "NN", "NN"]])
    assert scores.all.f1 == scores.tag_accuracy == pytest.approx(2 / 3)


def test_sentences_do_not_run_into_each_other() -> None:
    assert entity_f1([["B-A"], ["I-A"]], [["B-A"], ["I-A"]]).all.expected == 2


def test_nothing_to_find_gives_zero() -> None:
    assert entity_f1([["O"]], [["O"]]).all.f1 == 0.0


@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_tags_without_a_type_count_as_entities_of_one_type(prefixes: str) -> None:
    draw = random.Random(7)
    expected = [draw.choices("O" + prefixes, k=draw.randint(0, 13)) for _ in range(301)]
    predicted = [[tag if draw.random() < 0.7 else draw.choice("O" + prefixes) for tag in tags] for tags in expected]
    typed = [[[tag if tag == "O" else f"{tag}-X" for tag in tags] for tags in side] for side in (predicted, expected)]
    scores = entity_f1(predicted, expected)
    assert scores.all == entity_f1(*typed).all and scores.by_type == {"": scores.all}
    assert (scores.all.expected, scores.all.predicted, scores.all.correct) == conlleval(*typed)
    assert entity_f1([["B", "O", "O", "B"]], [["B", "I", "O", "B"]]).all.f1 == 0.5


def test_entities_without_a_type_have_an_empty_label() -> None:
    tags = TagSet(("O", "B", "I"))
    words = WordTags(np.array([1, 2, 0, 1]), np.ones(4))
    spans = [(0, 3), (4, 8), (9, 10), (11, 13)]
    entities = _entities("New York is NY", spans, words, tags)
    assert [(entity.label, entity.start, entity.end) for entity in entities] == [("", 0, 8), ("", 11, 13)]
