"""The demo "fill": its questions, its scores, and a tiny demo from end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from clearhead.apps.cli.main import main
from clearhead.apps.demo import fill
from clearhead.apps.demo.common import DemoPlan, library_sources
from clearhead.apps.demo.fill import (
    LINES,
    RECIPE,
    FillSizes,
    Question,
    answer_table,
    blank_words,
    commonest_word,
    places_of_the_right_word,
    run_fill,
)
from clearhead.base.errors import InputError
from clearhead.core import build
from clearhead.model.facade import Model
from clearhead.spec.presets.hyperparameters import build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.fill.use import BLANK, Filled
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.runfile.read import parse_run_file
from tests.apps.demo.demo_library import TINY, write_library


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    library = write_library(tmp_path_factory.mktemp("library") / "made")
    sources = library_sources(max_bytes=10**6, max_valid_bytes=10**6, folder=library)
    return [file.text for file in sources.train]


@pytest.fixture(scope="module")
def model(texts: list[str]) -> Model:
    """Return an untrained model."""
    tokenizer = train_tokenizer("byte-bpe", texts, vocab_size=307, mask=True)
    hparams = replace(PRESETS["bert"], layers=1, width=6, heads=3, feedforward=7)
    module = build(build_spec(hparams, source_vocab=307, target_vocab=307))
    pair = TokenizerPair(source=tokenizer, target=tokenizer, joint=True)
    return Model(module, pair, TaskRecord(kind="fill", max_length=61))


def make_filled(text: str, probability: float) -> Filled:
    return Filled(text=text, token=text, probability=probability, start=0, end=3, filled=text)


def test_the_run_file_trains_an_encoder_on_blanks() -> None:
    run = parse_run_file(RECIPE.format(run='"r"', train='"a"', valid='"b"'), "recipe")
    assert run.task.kind == "fill" and run.model.family == "encoder"


def test_every_line_has_one_blank() -> None:
    assert fill.BLANK == BLANK
    assert len(set(LINES)) == len(LINES) >= 5
    assert all(line.count(BLANK) == 1 for line in LINES)
    assert {"for i in ___(10):", "import ___"} <= set(LINES)


def test_a_question_is_a_paragraph_less_one_word(texts: list[str], model: Model) -> None:
    questions = blank_words(model, texts, seed=3, count=41)
    assert len(questions) == 41 and len({question.text for question in questions}) > 20
    everything = "\n\n".join(texts)
    for text, word in questions:
        before, after = text.split(BLANK)
        assert before + word + after in everything
        assert re.fullmatch(r"[A-Za-z]{2,}", word)
        assert not re.search(r"\w$", before) and not re.match(r"\w", after)
        # One entry of the vocabulary says it, with or without the space in front of it.
        ids = model.tokenizer.encode(before + word + after)
        assert word in [token.removeprefix("Ġ") for token in model.tokenizer.tokens(ids)]
        assert len(ids) + 2 <= 61


def test_the_seed_and_the_count_decide_the_questions(texts: list[str], model: Model) -> None:
    questions = blank_words(model, texts, seed=3, count=41)
    assert blank_words(model, texts, seed=3, count=41) == questions
    assert blank_words(model, texts, seed=3, count=7) == questions[:7]
    assert blank_words(model, texts, seed=5, count=41) != questions
    assert blank_words(model, ["x = ___\n" * 10], seed=3, count=41) == []


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_places_are_counted(model: Model, batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "a": [make_filled("self", 0.5), make_filled("x", 0.2), make_filled("y", 0.1)],
        "b": [make_filled("x", 0.5), make_filled("y", 0.2), make_filled("None", 0.1)],
        "c": [make_filled("x", 0.5), make_filled("y", 0.2), make_filled("z", 0.1)],
        "d": [make_filled("if", 0.9), make_filled("y", 0.05), make_filled("z", 0.01)],
    }
    sizes: list[int] = []

    def fill(texts: list[str], top_k: int) -> list[list[list[Filled]]]:
        sizes.append(len(texts))
        return [[answers[text][:top_k]] for text in texts]

    monkeypatch.setattr(model, "fill", fill)
    questions = [Question("a", "self"), Question("b", "None"), Question("c", "return"), Question("d", "if")]
    assert places_of_the_right_word(model, questions, batch_size) == [0.5, 0.0, 0.25]
    assert max(sizes) == (batch_size or 4) and sum(sizes) == 4


def test_the_commonest_word_is_the_yardstick() -> None:
    questions = [Question("", word) for word in ("self", "if", "self", "None", "self")]
    assert commonest_word(questions) == ("self", 0.6)
    assert commonest_word([]) == ("", 0.0)


def test_the_table_shows_lines_and_candidates() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(answer_table(["x[___]", "import ___"], [[make_filled("[i]", 0.514)], [make_filled("\n ", 0.25)]]))
    text = shown.get()
    assert re.search(r"x\[___\]\s+\[i\] 51 %", text) and re.search(r"import ___\s+⏎␣ 25 %", text)


def test_a_tiny_demo_makes_an_ordinary_run(tmp_path: Path) -> None:
    library = write_library(tmp_path / "library")
    sizes = FillSizes(max_bytes=20_011, max_valid_bytes=4_003, num_questions=13, folder=library)
    plan = DemoPlan(run=tmp_path / "run", seed=3, batch_size=5, overrides=TINY)
    record = run_fill(plan, sizes).record
    for name in ("run.toml", "spec.json", "metrics.jsonl", "plots/loss.png", "plots/heads.html"):
        assert (plan.run / name).stat().st_size > 0, name
    assert 0 <= record["first"] <= record["among_three"] <= 1 and 0 < record["always_one_word"] <= 1
    assert set(record["lines"]) == set(LINES)
    for candidates in record["lines"].values():
        assert len(candidates) == 3 and 0 < sum(candidate["probability"] for candidate in candidates) <= 1
    json.dumps(record)
    assert main(["inspect", str(plan.run)]) == 0


def test_a_python_without_sources_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="standard library"):
        run_fill(DemoPlan(run=tmp_path / "run", seed=1), FillSizes(folder=tmp_path / "empty"))
    assert not (tmp_path / "run").exists()
