"""Predictions on a GPU, run on a CPU: equal to those of a CPU, no host read before the end, nothing left behind."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.base.errors import InputError, LongTexts
from clearhead.base.hooks import naming_texts
from clearhead.base.progress import Display, use_display
from clearhead.core import Transformer, build
from clearhead.data import feed
from clearhead.data.batches.inputs import InputCollator
from clearhead.generate.scoring import texts as scoring
from clearhead.spec.presets.task_heads import vector_head, with_head
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks import outputs
from clearhead.tasks.answer import use as answering
from clearhead.tasks.classify.use import classify
from clearhead.tasks.embed.use import embed
from clearhead.tasks.fill import use as filling
from clearhead.tasks.tag.use import tag
from clearhead.text.tokenizer import Tokenizer
from tests.data.objectives.noisy import tokenizer as masking_tokenizer
from tests.generate.tiny import tiny_decoder, tiny_model
from tests.laws.host_reads import refuse_host_reads
from tests.tasks.fill.test_use import model as masking_model
from tests.tasks.labelled_models import character_tokenizer, model, random_texts

MODULES = (feed, outputs, filling, scoring, answering)
NUM_TEXTS = 23
BLOCK, BATCH = 7, 5
Move = Callable[[Transformer], Transformer]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return character_tokenizer()


def embeddings(tokenizer: Tokenizer, move: Move) -> Any:
    module = model("encoder", tokenizer, count=5, pool="mean")
    pooled = with_head(module.spec, vector_head(pool="mean"))
    torch.manual_seed(3)
    return embed(move(build(pooled)), tokenizer, random_texts(NUM_TEXTS), prompt="ab", batch_size=BATCH).tolist()


def labels(tokenizer: Tokenizer, move: Move) -> Any:
    module = move(model("encoder", tokenizer, count=3, pool="first"))
    record = TaskRecord(kind="classify", labels=("a", "b", "c"), label_kind="single_label", max_length=40)
    answers = classify(module, tokenizer, record, random_texts(NUM_TEXTS), batch_size=BATCH)
    return [[*answer.probabilities.values()] for answer in answers]


def tags(tokenizer: Tokenizer, move: Move) -> Any:
    module = move(model("decoder", tokenizer, count=5))
    record = TaskRecord(kind="tag", labels=("O", "B-A", "I-A", "B-B", "I-B"), max_length=13)
    answers = tag(module, tokenizer, record, [*random_texts(NUM_TEXTS), "", " , "], batch_size=BATCH)
    return [[[*asdict(entity).values()] for entity in entities] for entities in answers]


def blanks(tokenizer: Tokenizer, move: Move) -> Any:
    texts = [f"{'a' * (number % 5)} ___ bc{' ___' * (number % 3)}" for number in range(NUM_TEXTS)]
    module = move(masking_model("word"))
    answers = filling.fill(module, masking_tokenizer("word"), texts, top_k=3, batch_size=BATCH)
    return [[[word.probability for word in blank] for blank in text] for text in answers]


def answers(tokenizer: Tokenizer, move: Move) -> Any:
    module, record = move(model("encoder", tokenizer, count=2)), TaskRecord(kind="answer", max_length=31)
    pairs = [*zip(random_texts(NUM_TEXTS, 9), random_texts(NUM_TEXTS, 67, seed=4), strict=True)]
    options = {"top_k": 2, "allow_no_answer": True, "align_to_words": True, "batch_size": BATCH}
    found = answering.answer_pairs(module, tokenizer, record, pairs, **options)
    return [[[*asdict(answer).values()] for answer in some] for some in found]


def target_scores(tokenizer: Tokenizer, move: Move) -> Any:
    module = move(tiny_model("modern", seed=9))
    sources = [[3 + number % 5] * (1 + number % 7) for number in range(NUM_TEXTS)]
    targets = [[1, *[4 + number % 3] * (number % 6), 2] for number in range(NUM_TEXTS)]
    options = {"pad_id": 0, "length_penalty": 1.0, "batch_size": BATCH, "forced": 1}
    return [known.token_log_probabilities for known in scoring.score_targets(module, sources, targets, **options)]


def text_scores(tokenizer: Tokenizer, move: Move) -> Any:
    module = move(tiny_decoder("modern", seed=3))
    sequences = [[1, *[3 + number % 6] * (2 + number % 9), 2] for number in range(NUM_TEXTS)]
    scores = scoring.score_sequences(module, sequences, pad_id=0, window=5, stride=3, batch_size=BATCH)
    return [known.token_log_probabilities for known in scores]


PREDICTIONS = [embeddings, labels, tags, blanks, answers, target_scores, text_scores]


def close(actual: Any, expected: Any, error: float = 1e-5) -> bool:
    """Return whether two trees of lists agree, their numbers to within rounding."""
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(partial(close, error=error), actual, expected))
    return actual == pytest.approx(expected, abs=error) if isinstance(expected, float) else bool(actual == expected)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the path of a GPU on any device, with small blocks; no thread may stay."""
    for module in MODULES:
        monkeypatch.setattr(module, "computes_late", lambda device: True)
    monkeypatch.setattr(outputs, "BLOCK", BLOCK)
    monkeypatch.setattr(answering, "_PAIRS", BLOCK)
    before = {*threading.enumerate()}
    yield
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_late_predictions_are_those_of_a_cpu(predict: Any, tokenizer: Tokenizer, request: Any) -> None:
    expected = predict(tokenizer, lambda module: module)
    request.getfixturevalue("late")
    assert close(predict(tokenizer, lambda module: module), expected)


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_no_batch_waits_for_the_device(
    predict: Any, tokenizer: Tokenizer, late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches run on `meta`, where every host read raises; one fetch for each group of calls returns zeros."""
    batches, fetches = list[int](), list[int]()
    launch, fetch_all = feed._launch, feed._fetch

    def watch(pairs: Any, run: Any, copies: Any) -> Any:
        def refuse(key: Any, batch: Any) -> Sequence[Tensor]:
            batches.append(len(batch.ids))
            with refuse_host_reads():
                results: Sequence[Tensor] = run(key, batch)
            assert all(result.device.type == "meta" for result in results)
            return results

        return launch(pairs, refuse, copies)

    def fetch(group: Any) -> Any:
        fetches.append(len(group))
        return fetch_all(
            (key, [torch.ones(each.shape, dtype=each.dtype) for each in results]) for key, results in group
        )

    # Otherwise the thread would make its tensors of the host while reads are refused.
    monkeypatch.setattr(feed, "_make_ahead", iter)
    monkeypatch.setattr(feed, "_launch", watch)
    monkeypatch.setattr(feed, "_fetch", fetch)
    predict(tokenizer, lambda module: copy.deepcopy(module).to("meta"))
    assert sum(fetches) == len(batches) >= NUM_TEXTS // BATCH
    calls = -(-NUM_TEXTS // BLOCK) if predict is answers else 1
    assert len(fetches) == calls, "results stay on the device until all batches are launched"


def test_many_results_are_fetched_in_groups_after_the_next_group_was_launched(
    tokenizer: Tokenizer, late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(feed, "_MOST_WAITING", 2 * 3)
    fetch = feed._fetch

    def note(group: Any) -> Any:
        events.append("fetch")
        return fetch(group)

    monkeypatch.setattr(feed, "_fetch", note)
    module, texts = model("encoder", tokenizer, count=3, pool="first"), random_texts(9)
    inputs = outputs.TextBlock([[tokenizer.encode(text) for text in texts]], range(9))
    collator = InputCollator.of(module.spec, tokenizer)
    for _, rows, _ in outputs.batch_outputs(module, collator, [inputs], batch_size=1):
        events.append(f"use {len(rows)}")
    first_use = events.index("use 1")
    assert events[:first_use] == ["fetch", "fetch"] and events.count("fetch") > 3


def test_a_text_is_named_by_its_number_among_all(tokenizer: Tokenizer, late: None) -> None:
    module = model("encoder", tokenizer, count=3, pool="first")
    record = TaskRecord(kind="classify", labels=("a", "b", "c"), label_kind="single_label", max_length=40)
    texts = random_texts(NUM_TEXTS)
    texts[17] = ""
    with pytest.raises(InputError, match="text 18 is empty"):
        classify(module, tokenizer, record, texts)


def test_one_warning_counts_the_long_texts_of_all_blocks(tokenizer: Tokenizer, late: None) -> None:
    module = model("encoder", tokenizer, count=3, pool="first")
    record = TaskRecord(kind="classify", labels=("a", "b", "c"), label_kind="single_label", max_length=40)
    texts = ["a" * (60 if number % 4 == 0 else 5) for number in range(NUM_TEXTS)]
    with pytest.warns(LongTexts) as warned:
        answers = classify(module, tokenizer, record, texts)
    assert [warning.message.count for warning in warned] == [6]
    assert [answer.is_cut for answer in answers] == [number % 4 == 0 for number in range(NUM_TEXTS)]


def test_progress_never_goes_back(tokenizer: Tokenizer, late: None) -> None:
    seen: list[tuple[int, int]] = []

    class Recorded(Display):
        def update(self, done: int, total: int, what: Any) -> None:
            seen.append((done, total))

    with use_display(Recorded()):
        embeddings(tokenizer, lambda module: module)
    assert {total for _, total in seen} == {NUM_TEXTS}
    assert seen == sorted(seen) and seen[-1] == (NUM_TEXTS, NUM_TEXTS)


def test_captured_activations_keep_the_order_of_the_texts(tokenizer: Tokenizer, late: None) -> None:
    module = model("encoder", tokenizer, count=3, pool="first")
    record = TaskRecord(kind="classify", labels=("a", "b", "c"), label_kind="single_label", max_length=40)
    texts = random_texts(NUM_TEXTS)
    with ch.capture(module, "logits") as seen:
        answers = classify(module, tokenizer, record, texts, batch_size=4)
    logits = torch.cat([entry.tensor for entry in seen["logits"]])
    expected = np.array([[*answer.probabilities.values()] for answer in answers])
    assert np.abs(logits.softmax(1).numpy() - expected).max() < 1e-6


def test_texts_of_files_come_in_larger_groups_on_a_gpu(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model("encoder", tokenizer, count=3, pool="first")
    on_cpu = outputs.texts_together(module)
    monkeypatch.setattr(outputs, "computes_late", lambda device: True)
    assert outputs.texts_together(module) == 2 * outputs.BLOCK > on_cpu
    with naming_texts([0]):
        assert len(outputs.block_starts(3 * outputs.BLOCK + 1, module)) == 4
