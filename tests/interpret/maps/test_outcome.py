"""The outcome is the token or label that the user meant, at the position whose logits predict it."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.core import Sequence, Transformer
from clearhead.interpret.maps.outcome import ModelOutcome, OutcomeChoice, OutputNames, choose_outcome, predicts_next
from clearhead.interpret.maps.streams import Streams
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.interpret.maps.cases import make

WORDS = "a b c d e f g h i j"


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer("word", [WORDS], vocab_size=23, mask=True)


@cache
def streams(name: str, text: str, target: str | None = None) -> Streams:
    module = make(name)
    return Streams.of(module, encode(text), None if target is None else encode(target))


def encode(text: str) -> Sequence:
    ids = [tokenizer().mask_id if word == "<mask>" else tokenizer().encode(word)[0] for word in text.split()]
    return Sequence(torch.tensor([ids]))


def choose(of: OutcomeChoice, text_streams: Streams, labels: tuple[str, ...] = ()) -> tuple[int | None, str]:
    names = OutputNames(labels) if labels else OutputNames(tokenizer().entries(), tokenizer())
    outcome = choose_outcome(of, text_streams, names, text_streams.last.ids[0, 1:].tolist())
    assert names.name(outcome.id) == outcome.token
    assert outcome.is_next == predicts_next(text_streams, names)
    return outcome.position, outcome.token.removeprefix("▁")


def best(text_streams: Streams, position: int | None, labels: tuple[str, ...] = ()) -> str:
    with torch.no_grad():
        logits = text_streams.module(text_streams.source, text_streams.target).logits[0]
    row = (logits if position is None else logits[position])[: len(labels or tokenizer().entries())].tolist()
    if text_streams.module.decoder is None and not labels:  # special tokens fill no blank
        row[:5] = [-math.inf] * 5
    return (labels or tokenizer().entries())[row.index(max(row))].removeprefix("▁")


@pytest.mark.parametrize(("name", "target"), [("decoder, norms behind", None), ("two stacks", "a b c d")])
def test_a_token_of_a_language_model_is_predicted_by_the_position_before_it(name: str, target: str | None) -> None:
    text_streams = streams(name, "a b c d", target)
    assert choose(None, text_streams) == choose(3, text_streams) == (3, "d")
    assert choose(1, text_streams) == (1, "b")
    assert choose(4, text_streams) == (4, best(text_streams, 3))
    assert choose("g", text_streams) == (4, "g")
    assert choose((2, "g"), text_streams) == (2, "g")
    names = OutputNames(tokenizer().entries(), tokenizer())
    assert choose_outcome(3, text_streams, names).logits_position == 2


def test_a_decoder_that_reads_one_token_says_what_comes_next() -> None:
    text_streams = streams("two stacks", "a b", "c")
    assert choose(None, text_streams) == (1, best(text_streams, 0))


def test_an_end_token_is_an_outcome_only_by_its_position() -> None:
    text_streams, end = streams("two stacks", "a b", "c d"), tokenizer().eos_id
    names, labels = OutputNames(tokenizer().entries(), tokenizer()), (tokenizer().encode("d")[0], end)
    assert choose_outcome(None, text_streams, names, labels).position == 1
    assert choose_outcome(2, text_streams, names, labels) == ModelOutcome(2, "</s>", end, is_next=True)


def test_a_masked_model_predicts_at_its_masks() -> None:
    text_streams = streams("encoder", "a <mask> c <mask>")
    assert choose(None, text_streams) == (1, best(text_streams, 1))
    assert choose("g", text_streams) == (1, "g")
    assert choose(3, text_streams) == (3, best(text_streams, 3))
    assert choose((0, "g"), text_streams) == (0, "g")


def test_labels_are_of_a_text_or_of_a_position() -> None:
    kinds, tags = ("no", "yes", "perhaps"), tuple("uvwxy")
    text, tagged = streams("classifier by the mean", "a b c"), streams("tagger", "a b c")
    assert choose(None, text, kinds) == (None, best(text, None, kinds))
    assert choose("perhaps", text, kinds) == (None, "perhaps")
    assert choose(2, tagged, tags) == (2, best(tagged, 2, tags))
    assert choose((1, "x"), tagged, tags) == (1, "x")


@pytest.mark.parametrize(
    ("name", "of", "message"),
    [
        ("decoder, norms behind", 0, "position 0; expected 1 to 3, the positions which a token before them predicts"),
        ("decoder, norms behind", 4, "position 4; expected 1 to 3"),
        ("decoder, norms behind", "a b", r"'a b' must be one token, but the tokenizer makes these of it: .*; choose"),
        ("encoder", None, "no mask, so 'of' must name a position"),
        ("encoder", "g", "no mask, so 'of' must name a position"),
        ("encoder", (0, "never"), "the vocabulary has no token 'never'"),
        ("encoder", (0, "a", "never"), "the vocabulary has no token 'never'"),
        ("encoder", (0, "a", "a"), "'of' compares 'a' with itself: name two different ones, or one alone"),
        ("encoder", 3, "expected 0 to 2, the positions at which the model predicts"),
        ("classifier by the mean", 1, "this model labels whole texts: name a label alone"),
        ("classifier by the mean", "yess", r"no label 'yess' \(did you mean 'yes'\?\); its labels are 'no', 'yes'"),
    ],
)
def test_a_wrong_choice_is_refused(name: str, of: OutcomeChoice, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose(of, streams(name, "a b c"), ("no", "yes", "perhaps") if name.startswith("classifier") else ())


@pytest.mark.parametrize(
    "record",
    [
        TaskRecord(kind="embed"),
        TaskRecord(kind="answer"),
        TaskRecord(kind="classify", label_kind="regression"),
        # The scores of a task of another package need no names.
        TaskRecord(kind="classify"),
    ],
)
def test_a_model_without_probabilities_is_refused(record: TaskRecord) -> None:
    with pytest.raises(InputError, match="gives no probabilities of tokens or labels"):
        OutputNames.of(make("tagger"), tokenizer(), record)


def test_names_follow_the_task() -> None:
    module: Transformer = make("tagger")
    several = OutputNames.of(
        module, tokenizer(), TaskRecord(kind="classify", labels=("u", "v"), label_kind="multi_label")
    )
    assert several.are_independent and several.names == ("u", "v")
    words = OutputNames.of(module, tokenizer(), TaskRecord(kind="generate"))
    assert words.find("a") == tokenizer().encode("a")[0] and words.name(1000) == ""


def test_the_probability_is_a_share_or_its_own() -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0]])
    total = math.e + math.e**2 + 1 / math.e
    assert ModelOutcome(None, "", 1).log_probability(logits).item() == pytest.approx(math.log(math.e**2 / total))
    alone = ModelOutcome(None, "", 1, is_independent=True).log_probability(logits).item()
    assert alone == pytest.approx(math.log(1 / (1 + math.exp(-2.0))))
