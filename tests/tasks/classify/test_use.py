"""Predicted labels equal those of each text alone, for any batch; models that cannot classify are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clearhead.base.errors import InputError, LongTexts, RunFailure
from clearhead.core import Transformer
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.classify.data import DATA
from clearhead.tasks.classify.store import prepare_labelled
from clearhead.tasks.classify.use import (
    Classification,
    ClassifyMeasures,
    LabelMeasures,
    MultiLabelMeasures,
    NumberMeasures,
    check_classifier,
    classify,
    measure_store,
)
from clearhead.text.tokenizer import Tokenizer
from tests.tasks.labelled_models import FAMILIES, character_tokenizer, model, random_texts

LABELS = ("bad", "good", "so so")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return character_tokenizer()


def record(**changes: Any) -> TaskRecord:
    return TaskRecord(
        **{"kind": "classify", "labels": LABELS, "label_kind": "single_label", "max_length": 31, **changes}
    )


def classify_alone(module: Transformer, tokenizer: Tokenizer, *texts: str) -> Tensor:
    """Return the logits of one text, or one pair, without batches, padding or masks."""
    ids, segments = [tokenizer.bos_id], [0]
    for number, text in enumerate(texts):
        piece = [*tokenizer.encode(text), tokenizer.eos_id]
        ids += piece
        segments += [number] * len(piece)
    two_stacks = module.encoder is not None and module.decoder is not None
    first = module.spec.encoder or module.spec.decoder
    assert first is not None
    with torch.no_grad():
        logits = module.eval()(
            torch.tensor([ids]),
            torch.tensor([[tokenizer.bos_id]]) if two_stacks else None,
            segments=torch.tensor([segments]) if first.embedding.num_segments and len(texts) == 2 else None,
        ).logits
    assert logits is not None
    return logits[0]


@pytest.mark.parametrize(("family", "pool"), FAMILIES)
def test_every_text_is_answered_as_if_it_were_alone(family: str, pool: str, tokenizer: Tokenizer) -> None:
    module = model(family, tokenizer, count=3, pool=pool)
    texts = random_texts(17)
    module.train()
    answers = classify(module, tokenizer, record(), texts, batch_tokens=67)
    assert module.training  # its own mode is restored
    for text, answer in zip(texts, answers, strict=True):
        expected = classify_alone(module, tokenizer, text).softmax(0)
        assert list(answer.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-5)
        assert list(answer.probabilities) == list(LABELS)
        assert answer.label == LABELS[int(expected.argmax())]
        assert answer.probability == max(answer.probabilities.values())
        assert answer.labels == (answer.label,)
        assert (answer.value, answer.is_cut) == (None, False)
    assert len({round(answer.probabilities["bad"], 6) for answer in answers}) > 1
    one_by_one = classify(module, tokenizer, record(), texts, batch_size=1)
    assert [answer.label for answer in one_by_one] == [answer.label for answer in answers]


@pytest.mark.parametrize("segments", [0, 2])
@pytest.mark.parametrize("family", ["encoder", "encoder-decoder"])
def test_pairs_are_read_with_their_segments(family: str, segments: int, tokenizer: Tokenizer) -> None:
    module = model(family, tokenizer, count=3, pool="last" if family != "encoder" else "mean", segments=segments)
    pairs = list(zip(random_texts(11, 9, seed=1), random_texts(11, 13, seed=2), strict=True))
    answers = classify(module, tokenizer, record(is_paired=True), pairs, batch_tokens=90)
    for pair, answer in zip(pairs, answers, strict=True):
        expected = classify_alone(module, tokenizer, *pair).softmax(0)
        assert list(answer.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_long_text_is_read_as_its_front(tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=3, pool="mean")
    texts = ["abcde" * 9, "abc"]
    with pytest.warns(LongTexts, match="1 text is longer than the 12 tokens"):
        answers = classify(module, tokenizer, record(max_length=12), texts)
    fronts = classify(module, tokenizer, record(max_length=12), [texts[0][:10], "abc"])
    assert [answer.is_cut for answer in answers] == [True, False]
    assert answers[0].probabilities == pytest.approx(dict(fronts[0].probabilities), abs=1e-6)
    learned = model("encoder", tokenizer, count=3, pool="mean", positions="learned", max_positions=9)
    with pytest.warns(LongTexts, match="the 9 tokens"):
        assert [answer.is_cut for answer in classify(learned, tokenizer, record(), texts)] == [True, False]


def test_several_labels_are_decided_one_by_one(tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=3, pool="mean")
    texts = random_texts(23)
    answers = classify(module, tokenizer, record(label_kind="multi_label"), texts)
    for text, answer in zip(texts, answers, strict=True):
        expected = classify_alone(module, tokenizer, text).sigmoid().tolist()
        assert list(answer.probabilities.values()) == pytest.approx(expected, abs=1e-5)
        chosen = [label for label, probability in zip(LABELS, expected, strict=True) if probability >= 0.5]
        assert answer.labels == tuple(chosen)
        assert answer.label == ", ".join(chosen)
        assert answer.probability == pytest.approx(math.prod(max(chance, 1 - chance) for chance in expected), abs=1e-5)
    assert len({len(answer.labels) for answer in answers}) > 1


def test_a_number_is_in_the_unit_of_the_training_data(tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=1, pool="mean")
    numbers = record(labels=(), label_kind="regression", number_mean=50.0, number_scale=20.0)
    (answer,) = classify(module, tokenizer, numbers, ["abc"])
    value = float(classify_alone(module, tokenizer, "abc")[0]) * 20 + 50
    assert answer.value == pytest.approx(value, rel=1e-5)
    assert answer == Classification(f"{answer.value:.6g}", None, {}, value=answer.value)


@pytest.mark.parametrize(
    ("change", "head", "message"),
    [
        (
            {"kind": "fill", "labels": (), "label_kind": None},
            3,
            "trained to 'fill', so it cannot predict labels.* init =",
        ),
        ({"kind": "tag"}, 3, "trained to 'tag', so it cannot predict labels"),
        ({}, 4, "the model has 4 outputs, but its record names 3 labels"),
        ({}, None, "it cannot predict labels: train it"),
    ],
)
def test_a_head_that_learned_no_labels_never_answers(
    change: dict[str, Any], head: int | None, message: str, tokenizer: Tokenizer
) -> None:
    module = model("encoder", tokenizer, count=head or 3, pool="mean" if head else None)
    with pytest.raises(InputError, match=message):
        classify(module, tokenizer, record(**change), ["abc"])


@pytest.mark.parametrize(
    ("texts", "paired", "message"),
    [
        (["abc", ""], False, "^text 2 is empty"),
        ([("abc", "a"), ("", "a")], True, "^text 2 is empty"),
        (["abc"], True, "trained on pairs of texts, got single texts; give two texts"),
        ([("abc", "a")], False, "trained on single texts, got pairs"),
    ],
)
def test_texts_that_have_no_answer(texts: Any, paired: bool, message: str, tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=3, pool="mean")
    with pytest.raises(InputError, match=message):
        classify(module, tokenizer, record(is_paired=paired), texts)


def test_no_texts_have_no_answers(tokenizer: Tokenizer) -> None:
    assert classify(model("encoder", tokenizer, count=3, pool="mean"), tokenizer, record(), []) == []


def test_outputs_that_are_not_finite_are_no_answer(tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=3, pool="mean")
    with torch.no_grad():
        next(module.head.parameters()).fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(RunFailure, match="not finite"):
        classify(module, tokenizer, record(), ["abc"])


def write_jsonl(folder: Path, texts: list[str], labels: list[Any]) -> Any:
    path = folder / "t.jsonl"
    rows = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return DATA.source({"text": str(path), "labels": "label"})


def measure_file(
    module: Transformer, tokenizer: Tokenizer, task: TaskRecord, source: Any, **sizes: int
) -> tuple[ClassifyMeasures, str]:
    labels = check_classifier(module, task)
    store = prepare_labelled(source, tokenizer, max_length=32, kind=labels.kind, labels=labels)
    return measure_store(module, tokenizer, store, repeats=task.repeats, **sizes), store.report


def test_an_evaluation_counts_what_classify_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    module = model("encoder-decoder", tokenizer, count=3, pool="last")
    texts = random_texts(41)
    labels = [LABELS[number % 3] for number in range(41)]
    measures, report = measure_file(module, tokenizer, record(), write_jsonl(tmp_path, texts, labels), batch_tokens=9)
    answers = classify(module, tokenizer, record(), texts)
    assert isinstance(measures, LabelMeasures)
    right = [answer.label == label for answer, label in zip(answers, labels, strict=True)]
    assert measures.accuracy == pytest.approx(sum(right) / 41)
    assert measures.score == pytest.approx(100 * sum(right) / 41)
    pairs = list(zip(labels, [answer.label for answer in answers], strict=True))
    assert measures.confusion == [[pairs.count((true_label, other)) for other in LABELS] for true_label in LABELS]
    losses = [-math.log(answer.probabilities[label]) for answer, label in zip(answers, labels, strict=True)]
    assert measures.loss == pytest.approx(sum(losses) / 41, rel=1e-4)
    assert report.startswith("41 labelled texts read, 41 kept")


def test_an_evaluation_of_several_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=3, pool="mean")
    texts = random_texts(13)
    labels = [[label for number, label in enumerate(LABELS) if row >> number & 1] for row in range(13)]
    several = record(label_kind="multi_label")
    measures, _ = measure_file(module, tokenizer, several, write_jsonl(tmp_path, texts, labels))
    answers = classify(module, tokenizer, several, texts)
    assert isinstance(measures, MultiLabelMeasures)
    same = [answer.labels == tuple(wanted) for answer, wanted in zip(answers, labels, strict=True)]
    assert measures.exact == pytest.approx(sum(same) / 13)
    losses = [
        -math.log(probability if label in wanted else 1 - probability)
        for answer, wanted in zip(answers, labels, strict=True)
        for label, probability in answer.probabilities.items()
    ]
    assert measures.loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_an_evaluation_of_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    module = model("decoder", tokenizer, count=1, pool="last")
    texts = random_texts(19)
    numbers = record(labels=(), label_kind="regression", number_mean=3.0, number_scale=2.0)
    values = [float(answer.value or 0) for answer in classify(module, tokenizer, numbers, texts)]
    source = write_jsonl(tmp_path, texts, [value**3 + 1 for value in values])
    measures, _ = measure_file(module, tokenizer, numbers, source)
    assert isinstance(measures, NumberMeasures)
    assert measures.spearman == pytest.approx(1.0)
    assert measures.pearson < 1.0
    errors = [(value**3 + 1 - value) ** 2 for value in values]
    assert measures.mean_squared_error == pytest.approx(np.mean(errors), rel=1e-4)
    assert measures.loss == pytest.approx(np.mean(errors) / 4, rel=1e-4)


def test_an_evaluation_with_other_labels_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    module = model("encoder", tokenizer, count=3, pool="mean")
    with pytest.raises(InputError, match=r'.jsonl:2: the label "god" is not among the 3 .* \(did you mean'):
        measure_file(module, tokenizer, record(), write_jsonl(tmp_path, ["a", "b"], ["good", "god"]))
