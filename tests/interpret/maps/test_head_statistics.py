"""Statistics of heads equal loops over queries and keys; planted heads are found and named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.interpret.maps import head_statistics
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.head_statistics import HeadStatistics
from clearhead.model.facade import Model
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from tests.interpret.maps import planted

TEXT, TARGET = "the quick fox jumps.", "over it"
KINDS = {"encoder": "embed", "decoder": "generate", "encoder-decoder": "translate"}


def random_model(family: str, **changes: object) -> Model:
    torch.manual_seed(3)
    tokenizer = planted.vocabulary()
    hparams = Hyperparameters(family=family, layers=2, width=14, heads=3, head_size=5, feedforward=17, tie="none")
    size = tokenizer.vocab_size
    module = ch.build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval()
    for name, parameter in module.named_parameters():
        if "query.weight" in name or "key.weight" in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return Model(module, TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=KINDS[family]))


def maps_of(model: Model) -> AttentionMaps:
    return model.attention(TEXT, TARGET) if model.task.kind == "translate" else model.attention(TEXT)


def expected_statistics(weights: np.ndarray, *, is_self: bool) -> dict[str, float | None]:
    """Return every statistic of one text, computed query by query."""
    queries, keys = weights.shape
    rows: dict[str, list[float]] = {name: [] for name in head_statistics.STATISTICS}
    for i in range(queries):
        row = weights[i]
        rows["entropy"].append(-sum(w * math.log(w) for w in row if w > 0))
        rows["diagonal"].append(row[math.floor((i + 0.5) * keys / queries)])
        if is_self:
            rows["distance"].append(sum(row[j] * abs(i - j) for j in range(keys)))
            if i > 0:
                rows["first_token"].append(row[0])
                rows["previous_token"].append(row[i - 1])
        else:
            rows["first_token"].append(row[0])
            j = int(np.argmax(row))
            rows["alignment"].append(row[j] if int(np.argmax(weights[:, j])) == i else 0.0)
    return {name: float(np.mean(numbers)) if numbers else None for name, numbers in rows.items()}


@pytest.mark.parametrize("chunk", [2**24, 100])
@pytest.mark.parametrize("family", KINDS)
def test_statistics_of_a_text_are_loops_over_its_weights(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_statistics, "_CHUNK", chunk)
    maps = maps_of(random_model(family))
    rows = maps.heads()
    assert [(row.stack, row.layer, row.head) for row in rows] == [
        (stack, layer, head) for stack in maps.stacks for layer in maps.layers(stack) for head in range(3)
    ]
    for row in rows:
        weights = maps.weights(row.stack, row.layer, row.head).double().numpy()
        expected = expected_statistics(weights, is_self=row.stack.endswith("self"))
        for name in set(head_statistics.STATISTICS) - {"duplicate_token", "induction"}:
            value = getattr(row, name)
            assert value == (None if expected[name] is None else pytest.approx(expected[name], abs=1e-6)), name
        assert row.num_texts == 1


@pytest.mark.parametrize("family", KINDS)
def test_repeat_scores_are_loops_over_generated_sequences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads random distinct ids twice, with special tokens around them."""
    model = random_model(family)
    maps, module = maps_of(model), model.module
    read = []
    forward = type(module).forward

    def record(self: Any, source: Any, target: Any = None, **options: Any) -> Any:
        read.append((source, target))
        return forward(self, source, target, **options)

    monkeypatch.setattr(type(module), "forward", record)
    rows = maps.heads()
    (source, target) = read[0]
    tokenizer, n = model.tokenizer, head_statistics.LENGTH
    start, end = (0 if family == "encoder-decoder" else 1), (0 if family == "decoder" else 1)
    for ids in source.ids.tolist():
        assert len(ids) == start + 2 * n + end
        once = ids[start : start + n]
        assert once == ids[start + n : start + 2 * n] and len(set(once)) == n
        assert tokenizer.encode(tokenizer.decode(once)) == once, "special tokens are not drawn"
    if target is not None:
        assert target.ids[:, 0].tolist() == [tokenizer.bos_id] * head_statistics.SEQUENCES
        assert torch.equal(target.ids[:, 1:], source.ids[:, :-1])
    with ch.capture(module, "**.weights") as seen, torch.no_grad():
        forward(module, source, target, head=False)
    for row in rows:
        record = maps.record(row.stack, row.layer)
        weights = seen.tensor(f"{record.address}.weights")[:, row.head].double()
        x = source.ids if target is None or row.stack != "decoder.self" else target.ids
        y = target.ids if target is not None and row.stack.startswith("decoder") else source.ids
        offset = 1 if y is not source.ids or start else 0
        scores: dict[str, list[list[float]]] = {"duplicate_token": [], "induction": []}
        for b in range(len(y)):
            duplicate, induction = [], []
            for i in range(offset + n, offset + 2 * n):
                others = [
                    j for j in range(x.shape[1]) if x[b, j] == y[b, i] and not (row.stack.endswith("self") and i == j)
                ]
                duplicate.append(sum(float(weights[b, i, j]) for j in others))
                induction.append(sum(float(weights[b, i, j + 1]) for j in others if j + 1 < x.shape[1]))
            scores["duplicate_token"].append(duplicate)
            scores["induction"].append(induction)
        for name, values in scores.items():
            means = np.mean(values, axis=1)
            assert getattr(row, name) == pytest.approx(means.mean(), abs=1e-6)
            assert row.spread[name] == pytest.approx(means.std(ddof=1), abs=1e-6)


def patterns_of(rows: list[HeadStatistics], stack: str) -> dict[tuple[int, int], tuple[str, ...]]:
    return {(row.layer, row.head): row.patterns for row in rows if row.stack == stack}


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_planted_heads_of_one_stack_are_named(family: str) -> None:
    rows = planted.one_stack(family).attention(TEXT).heads()
    assert patterns_of(rows, f"{family}.self") == {
        (0, 0): ("previous token",),
        (0, 1): ("first token",),
        (0, 2): ("duplicate token",),
        (1, 0): ("induction",),
        (1, 1): ("current token",),
        (1, 2): (),
    }
    previous = rows[0]
    assert previous.previous_token == pytest.approx(1.0) and previous.entropy < 0.2
    assert previous.distance is not None and 0.9 < previous.distance < 1.6


def test_planted_heads_over_the_memory_are_named() -> None:
    model = planted.two_stacks()
    rows = model.attention("abcdefgh", "abcdefgh").heads()
    patterns = patterns_of(rows, "decoder.memory")
    assert set(patterns[0, 0]) == {"copying", "diagonal", "alignment"}
    assert patterns[0, 1] == ("first token",)
    assert set(patterns[0, 2]) == {"duplicate token", "alignment"}
    assert not any(patterns_of(rows, "encoder.self").values())


def test_two_vocabularies_have_no_common_tokens_to_repeat() -> None:
    rows = planted.two_stacks(joint=False).attention("abc", "cba").heads()
    for row in rows:
        is_scored = row.stack != "decoder.memory"
        assert (row.induction is not None) == (row.duplicate_token is not None) == is_scored


def test_what_is_not_defined_is_none() -> None:
    """A single token has none before it, and two positions have no room for repeated tokens."""
    model = random_model("encoder")
    hparams = Hyperparameters(
        family="encoder", layers=1, width=14, heads=3, head_size=5, feedforward=17, tie="none", positions="learned",
        max_positions=5,
    )  # fmt: skip
    size = model.tokenizer.vocab_size
    short = model.with_module(ch.build(build_spec(hparams, source_vocab=size, target_vocab=size)).eval())
    row = short.attention("ab").heads()[0]
    assert row.induction is None and row.duplicate_token is None and row.alignment is None and row.entropy is not None
    decoder = random_model("encoder-decoder").attention("ab", "a", generate=0)
    assert decoder.heads()[0].alignment is None


@pytest.mark.parametrize("family", KINDS)
def test_many_texts_give_mean_and_spread(family: str) -> None:
    model = random_model(family)
    texts, targets = ["abc", TEXT, "qrs tuvw xyz"], ["ab", TARGET, "cd ef"]
    reports: list[tuple[int, int]] = []
    arguments = (texts, targets) if family == "encoder-decoder" else (texts,)
    rows = model.heads(*arguments, notify=lambda done, total: reports.append((done, total)))
    single = [model.attention(*both).heads() for both in zip(*arguments, strict=True)]
    assert reports == [(1, 3), (2, 3), (3, 3)]
    for row, *ones in zip(rows, *single, strict=True):
        assert row.num_texts == 3 and {
            (single_row.stack, single_row.layer, single_row.head) for single_row in [row, *ones]
        } == {(row.stack, row.layer, row.head)}
        for name in head_statistics.STATISTICS:
            values = [getattr(single_row, name) for single_row in ones]
            if values[0] is None:
                assert getattr(row, name) is None
                continue
            assert getattr(row, name) == pytest.approx(np.mean(values), abs=1e-9)
            if name not in ("duplicate_token", "induction"):
                assert row.spread[name] == pytest.approx(np.std(values, ddof=1), abs=1e-9)


def test_targets_that_are_not_given_are_the_greedy_translations() -> None:
    model = random_model("encoder-decoder")
    rows, alone = model.heads([TEXT]), model.attention(TEXT).heads()
    assert rows == alone
    assert model.heads(TEXT) == rows, "a single text is a list of one"
    assert model.heads([TEXT], seed=1) != rows, "the random tokens are drawn anew"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there is no text"),
        ((["a", "b"], ["c"]), "as many targets as texts, 2"),
        ((["a", " "], ["b", "c"]), "text 2: the text is empty"),
        ((["a", "a" * 62], ["b", "c"]), "text 2: the text has 63 tokens, but the model has 61 positions"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(arguments: tuple[list[str], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planted.two_stacks().heads(*arguments)
