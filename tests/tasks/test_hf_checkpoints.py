"""Hugging Face checkpoints read texts and pairs with their own special tokens, and predict what transformers does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.tag.use import tag_words
from tests import hf_models as checkpoints
from tests.tasks import fine_tuning

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

TEXTS = ["the cat sat on the mat", "a small dog", "it"]
PAIRS = [("the cat sat", "a small dog runs"), ("it", "green grass"), ("over the grass", "the")]
LABELS = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}, "label2id": {"no": 0, "yes": 1, "perhaps": 2}}
CLASSIFIERS = {
    "segments": lambda folder: fine_tuning.encoder(folder, "BertForSequenceClassification", **LABELS),
    "the first text ends twice": lambda folder: fine_tuning.roberta(
        folder, "RobertaForSequenceClassification", **LABELS
    ),
    "the decoder reads the text again": lambda folder: fine_tuning.bart(folder, **LABELS),
}


def theirs(folder: Path, kind: str) -> tuple[Any, Any]:
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_labels_of_texts_and_of_pairs(case: str, tmp_path: Path) -> None:
    folder = CLASSIFIERS[case](tmp_path / "model")
    model, tokenizer = theirs(folder, "AutoModelForSequenceClassification")
    ours = ch.load(folder, device="cpu", precision="fp32")
    for texts, columns in ((TEXTS, [TEXTS]), (PAIRS, [list(side) for side in zip(*PAIRS, strict=True)])):
        with torch.no_grad():
            expected = model(**tokenizer(*columns, padding=True, return_tensors="pt")).logits.softmax(1)
        probabilities = [list(classification.probabilities.values()) for classification in ours.classify(texts)]
        torch.testing.assert_close(torch.tensor(probabilities), expected, rtol=0, atol=1e-5)


def test_numbers_are_written_in_their_own_unit(tmp_path: Path) -> None:
    """A model learns numbers in units of its training data, of which a published layout knows nothing."""
    folder = fine_tuning.encoder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    model = ch.load(folder, device="cpu", precision="fp32")
    record = TaskRecord(kind="classify", label_kind="regression", number_mean=3.0, number_scale=7.0)
    trained = model.with_module(model.module, task=record)
    trained.save(tmp_path / "out", format="hf")
    again = ch.load(tmp_path / "out", device="cpu", precision="fp32")
    for left, right in zip(trained.classify(TEXTS), again.classify(TEXTS), strict=True):
        assert left.value is not None and right.value is not None and abs(left.value - right.value) < 1e-4


def test_tags_stand_at_the_words_of_the_other_library(tmp_path: Path) -> None:
    labels = {"id2label": {0: "O", 1: "B-X", 2: "I-X"}, "label2id": {"O": 0, "B-X": 1, "I-X": 2}}
    folder = fine_tuning.encoder(tmp_path / "model", "BertForTokenClassification", **labels)
    model, tokenizer = theirs(folder, "AutoModelForTokenClassification")
    words = "the small dog runs over the green grass".split()
    read = tokenizer(" ".join(words), return_tensors="pt")
    with torch.no_grad():
        states = model(**read).logits[0].softmax(1)
    firsts: dict[int, int] = {}
    for position, word in enumerate(read.word_ids(0)):
        if word is not None:
            firsts.setdefault(word, position)
    ours = ch.load(folder, device="cpu", precision="fp32")
    (word_tags,) = tag_words(ours.module, ours.tokenizer, [words], fallback=0, max_length=41)
    expected = [states[position].max(0) for position in firsts.values()]
    assert word_tags.tags.tolist() == [int(best.indices) for best in expected]
    chances = torch.stack([best.values for best in expected]).double()
    torch.testing.assert_close(torch.from_numpy(word_tags.probabilities), chances, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [fine_tuning.encoder, fine_tuning.roberta])
def test_blanks_are_those_of_the_other_library(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    model, tokenizer = theirs(folder, "AutoModelForMaskedLM")
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=200)
    # A mask of this kind of vocabulary takes the space in front of it with it; published files say so.
    space = "" if make is fine_tuning.roberta else " "
    expected = {
        candidate["token"]: candidate["score"] for candidate in pipe(f"the cat{space}{tokenizer.mask_token} on the mat")
    }
    ours = ch.load(folder, device="cpu", precision="fp32")
    ((candidates,),) = ours.fill(["the cat ___ on the mat"], top_k=7)
    for candidate in candidates:
        (index,) = tokenizer.convert_tokens_to_ids([candidate.token])
        assert math.isclose(candidate.probability, expected[index], rel_tol=1e-4)


def test_a_target_costs_what_it_costs_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Teacher forcing begins where the checkpoint's decoder begins."""
    for name, make, kind in (
        ("marian", checkpoints.translator, "MarianMTModel"),
        ("t5", fine_tuning.t5, "T5ForConditionalGeneration"),
    ):
        folder = make(tmp_path / name)
        model = getattr(transformers, kind).from_pretrained(folder).eval()
        ours = ch.load(folder, device="cpu", precision="fp32")
        source, target = "the cat sat", "a small dog"
        ids = [*ours.tokenizer.encode(source), ours.tokenizer.eos_id]
        labels = [*ours.tokenizers.target.encode(target), ours.tokenizer.eos_id]
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        score = ours.score(source, target)
        assert list(score.ids) == labels
        assert math.isclose(-score.log_probability / len(labels), float(loss), rel_tol=1e-5)
        for side, text in (("a", source), ("b", target)):
            (tmp_path / side).write_text(f"{text}\n", encoding="utf-8")
        files = ["--source", str(tmp_path / "a"), "--target", str(tmp_path / "b")]
        if name == "marian":
            assert main(["evaluate", str(folder), *files, "--device", "cpu"]) == 0
            assert f"{float(loss):.4f} nats per token" in capsys.readouterr().out


@pytest.mark.parametrize("make", [fine_tuning.encoder, fine_tuning.t5])
def test_hidden_tokens_of_a_text_are_measured(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "model")
    (tmp_path / "text").write_text("the cat sat on the mat\na small dog runs\n" * 9, encoding="utf-8")
    limits = ["--document", "line"]
    code = main(["evaluate", str(folder), "--text", str(tmp_path / "text"), *limits, "--device", "cpu"])
    captured = capsys.readouterr()
    if make is fine_tuning.encoder:
        assert code == 0 and "of the hidden tokens come first" in captured.out
    else:
        # Relative distances have no longest text, and nothing says how long those of its training were.
        assert code == 2 and "does not say how long the texts were" in captured.err


def test_a_text_costs_what_it_costs_there(tmp_path: Path) -> None:
    folder = checkpoints.language_model(tmp_path / "model")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    ours = ch.load(folder, device="cpu", precision="fp32")
    ids = [0, *ours.tokenizer.encode("the cat sat"), 0]
    with torch.no_grad():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    score = ours.score("the cat sat")
    assert list(score.ids) == ids[1:]
    assert math.isclose(-score.log_probability / len(score.ids), float(loss), rel_tol=1e-5)
