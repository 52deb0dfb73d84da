"""While activations are captured or edited, rows are in the order of the texts, and every record names their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from clearhead import spec
from clearhead.core import build
from clearhead.interpret.maps.hook_points import ActivationContext
from clearhead.model.facade import Model
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

TEXTS = ["w1 w5", "w7 w8 w9 w2 w4 w1", "w3", "w6 w2 w2 w9 w5 w7 w1", "w9 w8 w3"]
Call = Callable[[Model, list[str]], list[Any]]


def model_of(family: str, kind: str, **record: Any) -> Model:
    torch.manual_seed(11)
    words = " ".join(f"w{number}" for number in range(10))
    tokenizer = train_tokenizer("word", [words], vocab_size=20, mask=True)
    size = tokenizer.vocab_size
    hparams = Hyperparameters(family, layers=2, width=14, heads=2, feedforward=17, tie="none")
    model = build_spec(hparams, source_vocab=size, target_vocab=size)
    if record:
        pool = () if kind == "tag" else (spec.Pool(by="mean"),)
        model = model.model_copy(update={"head": spec.Head(layers=(*pool, spec.Linear(size=len(record["labels"]))))})
    module = build(model).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0)
    return Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=kind, **record))


def writer() -> Model:
    return model_of("decoder", "generate")


def translator() -> Model:
    return model_of("encoder-decoder", "translate")


def generate_call(**options: Any) -> Call:
    return lambda model, texts: [
        [generation.text for generation in generations] for generations in model.generate(texts, **options)
    ]


def translate_call(**options: Any) -> Call:
    def translate(model: Model, texts: list[str]) -> list[Any]:
        hypotheses = model.translate_n_best(texts, n=1, max_length=6, **options)
        return [(hypothesis.text, hypothesis.log_probability) for (hypothesis,) in hypotheses]

    return translate


CASES: dict[str, tuple[Callable[[], Model], Call]] = {
    "greedy": (writer, generate_call(max_new_tokens=5, temperature=0)),
    "several samples": (writer, generate_call(max_new_tokens=5, seed=3, num_return_sequences=2)),
    "beams": (writer, generate_call(max_new_tokens=5, beam_size=3, num_return_sequences=1)),
    "small batches": (writer, generate_call(max_new_tokens=5, temperature=0, batch_size=2)),
    "translate": (translator, translate_call(beam_size=4)),
    "translate, greedy": (translator, translate_call(beam_size=1)),
    "score pairs": (
        translator,
        lambda model, texts: [result.log_probability for result in model.score(texts, [*reversed(texts)])],
    ),
    "score": (writer, lambda model, texts: [result.log_probability for result in model.score(texts)]),
    "classify": (
        lambda: model_of("encoder", "classify", labels=("a", "b", "c"), label_kind="single_label"),
        lambda model, texts: [
            float(probability)
            for classification in model.classify(texts)
            for probability in classification.probabilities.values()
        ],
    ),
    "tag": (
        lambda: model_of("encoder", "tag", labels=("B-X", "I-X", "O")),
        lambda model, texts: [
            [(entity.text, entity.probability) for entity in entities] for entities in model.tag(texts)
        ],
    ),
    "fill": (
        lambda: model_of("encoder", "fill"),
        lambda model, texts: [
            [candidate.probability for candidate in blanks[0]]
            for blanks in model.fill([f"{text} ___" for text in texts])
        ],
    ),
}


def is_same(left: Any, right: Any) -> bool:
    """Return whether results are equal; numbers may differ by rounding, as kernels run only without captures."""
    if isinstance(left, float):
        return bool(left == pytest.approx(right, abs=1e-3, rel=1e-3))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


def per_text(results: list[Any]) -> list[Any]:
    """Return the results grouped by text; class probabilities of a text are consecutive."""
    each = len(results) // len(TEXTS)
    return [results[first : first + each] for first in range(0, len(results), each)]


@pytest.mark.parametrize("name", CASES)
def test_rows_are_in_the_order_of_the_texts_and_records_name_them(name: str) -> None:
    make, call = CASES[name]
    model = make()
    before = call(model, TEXTS)
    with model.capture("*.layers.0.before") as seen:
        assert is_same(call(model, TEXTS), before), "watching changes no result"
    records = [record for records_of_point in seen.values() for record in records_of_point]
    assert records
    for record in records:
        assert record.texts is not None and len(record.texts) == len(record.tensor)
        assert list(record.texts) == sorted(record.texts), "in the order of the texts"
    first: list[int] = []
    for record in next(iter(seen.values())):
        first += [number for number in dict.fromkeys(record.texts or ()) if number not in first]
    assert first == list(range(len(TEXTS)))


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_an_edit_by_its_texts_changes_no_other_text(name: str, number: int) -> None:
    make, call = CASES[name]
    model = make()
    before = per_text(call(model, TEXTS))

    def turn(x: torch.Tensor, at: ActivationContext) -> torch.Tensor:
        assert at.texts is not None
        rows = torch.tensor([text == number for text in at.texts])
        return torch.where(rows[:, None, None], x.flip(-1) * 2, x)

    with model.edit({"*.layers.*.before": turn}):
        after = per_text(call(model, TEXTS))
    changed = [text for text, (left, right) in enumerate(zip(before, after, strict=True)) if not is_same(left, right)]
    assert changed == [number]


def test_row_0_is_the_first_text_also_where_a_later_one_is_longer() -> None:
    model = writer()

    def turn_row_0(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1].flip(-1) * 2, x[1:]])

    options = {"max_new_tokens": 3, "temperature": 0}
    before = [generations[0].text for generations in model.generate(TEXTS[:2], **options)]
    with model.edit({"decoder.layers.0.before": turn_row_0}):
        after = [generations[0].text for generations in model.generate(TEXTS[:2], **options)]
    assert after[0] != before[0] and after[1] == before[1]


def test_empty_texts_and_windows_of_an_iterator_count() -> None:
    model = translator()
    texts = ["", *TEXTS, " ", *TEXTS, *TEXTS]
    with model.capture("encoder.layers.0.before") as seen:
        list(model.translate(iter(texts), max_length=3, beam_size=1))
    (records,) = seen.values()
    named = [number for record in records for number in record.texts or ()]
    assert named == [number for number, text in enumerate(texts) if text.strip()]


def test_ids_given_to_the_module_have_no_texts() -> None:
    model = writer()
    with model.capture("decoder.layers.0.before") as seen:
        model.generate(TEXTS[:1], max_new_tokens=1, temperature=0)
        model.module(torch.tensor([[4, 5]]))
    (records,) = seen.values()
    assert [record.texts for record in records] == [(0,), None]
    assert "texts=(0,)" in repr(records[0])
