"""Each unfair difference is reported in one sentence, and so are equal properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clearhead.apps.compare.fairness import Fairness, judge_fairness
from clearhead.apps.compare.table import read_rows
from tests.apps.compare.run_maker import RunMaker

CHECKS = set("tokenizer objective score order budget machine seeds tokens".split())
CHECKS |= {"training data", "validation data", "starting point"}
DROPOUT = "model.dropout=0.25"
PLANNED = {"planned_steps": 40}


def judge_changed_run(folder: Path, **changes: Any) -> Fairness:
    """Judge a run against a plain one, from which it differs in the dropout and in `changes`."""
    seed = changes.pop("seed", 1)
    overrides = [DROPOUT, *changes.pop("overrides", ())]
    return judge_fairness(
        read_rows(
            [RunMaker().write(folder / "a"), RunMaker(overrides=overrides, **changes).write(folder / "b", seed=seed)]
        )
    )


def test_a_fair_comparison(tmp_path: Path) -> None:
    fairness = judge_changed_run(tmp_path)
    assert fairness.unfair == ()
    assert set(fairness.same) == CHECKS
    assert not fairness.losses and not fairness.scores


@pytest.mark.parametrize(
    ("changes", "check", "expected"),
    [
        ({"batches": {"data": "d2"}}, "training data", "b had other training data than a"),
        ({"choices": {"valid_data": "v2"}}, None, None),
        (
            {"overrides": ['data.valid.source="other.de"']},
            "validation data",
            "b had other validation data than a (data.valid.source other.de, not valid.de)",
        ),
        ({"overrides": ["data.max_length=29"]}, "validation data", "(data.max_length 29, not 31)"),
        ({"choices": {"tokenizer": "t2"}}, "tokenizer", "b used another tokenizer than a, so losses per token"),
        ({"step_tokens": 130}, "tokens", "b saw 1.3 x the tokens of a"),
        ({"step_tokens": 5}, "tokens", "b saw 0.05 x the tokens of a"),
        ({"step_tokens": 102}, "tokens", "b saw 1.02 x the tokens of a"),
        ({"seed": 2}, "seeds", "b had the seed 2, a the seed 1"),
        (
            {"batches": {"batch_tokens": 97}},
            "order",
            "b read batches in another order than a (batch_tokens 97, not 101)",
        ),
        (
            {"overrides": ["train.steps=3000"], "choices": PLANNED},
            "budget",
            "b had a budget of 3,000 steps, a had 40 steps",
        ),
        ({"overrides": ["train.epochs=2"], "choices": PLANNED}, "budget", "b had a budget of 2 epochs, a had 40 steps"),
        (
            {"replaced": {'init = ""': 'init = "runs/c"'}},
            "starting point",
            "b started from runs/c, whose training is not counted here, a from scratch",
        ),
        (
            {"choices": {"threads": 2, "precision": "bf16"}},
            "machine",
            "b ran with precision bf16 instead of fp32, and threads 2 instead of 1, so seconds cannot be",
        ),
        ({"choices": {"score_name": "chrF"}}, "score", "b had the score chrF, a had BLEU"),
    ],
)
def test_each_unfairness(tmp_path: Path, changes: dict[str, Any], check: str | None, expected: str | None) -> None:
    fairness = judge_changed_run(tmp_path, **changes)
    if expected is None:
        assert fairness.unfair == ()
        return
    assert len(fairness.unfair) == 1 and expected in fairness.unfair[0], fairness.unfair
    assert set(fairness.same) == CHECKS - {check}


def test_the_same_identity_is_worth_more_than_the_same_name(tmp_path: Path) -> None:
    moved = judge_changed_run(tmp_path, overrides=['data.train.source="elsewhere/train.de"'])
    assert moved.unfair == (), "the checkpoint remembers what was read, wherever it lies"
    third = RunMaker(choices={"valid_data": "v1"}).write(tmp_path / "c")
    other = RunMaker(choices={"valid_data": "v2"}, overrides=[DROPOUT]).write(tmp_path / "d")
    fairness = judge_fairness(read_rows([third, other]))
    assert fairness.unfair == ("d had other validation data than c",)
    assert fairness.losses == fairness.scores == {"d"}


def test_another_tokenizer_is_not_other_data(tmp_path: Path) -> None:
    fairness = judge_changed_run(tmp_path, choices={"tokenizer": "t2"}, batches={"data": "ids under t2"})
    assert "training data" in fairness.same and len(fairness.unfair) == 1
    assert fairness.losses == {"b"} and not fairness.scores


def test_a_tokenizer_spoils_no_loss_of_labels(tmp_path: Path) -> None:
    kind = {'kind = "translate"': 'kind = "classify"'}
    first = RunMaker(replaced=kind).write(tmp_path / "a")
    other = RunMaker(replaced=kind, overrides=[DROPOUT], choices={"tokenizer": "t2"}).write(tmp_path / "b")
    fairness = judge_fairness(read_rows([first, other]))
    assert fairness.unfair == ("b used another tokenizer than a",) and not fairness.losses


def test_a_temperature_spoils_the_loss_alone(tmp_path: Path) -> None:
    kind = {'kind = "translate"': 'kind = "embed"\ntemperature = 0.05\npool = "mean"'}
    hot = {'kind = "translate"': 'kind = "embed"\ntemperature = 0.5\npool = "last"'}
    fairness = judge_fairness(
        read_rows([RunMaker(replaced=kind).write(tmp_path / "a"), RunMaker(replaced=hot).write(tmp_path / "b")])
    )
    assert len(fairness.unfair) == 1 and "(task.temperature 0.5, not 0.05)" in fairness.unfair[0]
    assert fairness.losses == {"b"} and not fairness.scores


def test_another_objective(tmp_path: Path) -> None:
    first = RunMaker(replaced={'init = ""': 'init = ""\nmask_share = 0.15'}).write(tmp_path / "a")
    other = RunMaker(replaced={'init = ""': 'init = ""\nmask_share = 0.3'}, overrides=[DROPOUT]).write(tmp_path / "b")
    fairness = judge_fairness(read_rows([first, other]))
    assert fairness.unfair == ("b had another objective than a (task.mask_share 0.3, not 0.15)",)
    assert fairness.losses == fairness.scores == {"b"}


@pytest.mark.parametrize(
    ("overrides", "tally", "expected"),
    [
        ([], {}, "step 40 of 90"),
        (["train.seconds=19"], {}, None),
        (["train.seconds=21"], {}, "step 40 of 90"),
        (['train.early_stop={metric="loss", patience=3}'], {"misses": 3}, None),
        (['train.early_stop={metric="loss", patience=3}'], {"misses": 2}, "step 40 of 90"),
    ],
)
def test_runs_that_are_not_finished(tmp_path: Path, overrides: list[str], tally: Any, expected: str | None) -> None:
    run = RunMaker(overrides=overrides, choices={"planned_steps": 90}, tally=tally).write(tmp_path / "a")
    notes = judge_fairness(read_rows([run])).notes
    assert notes == (() if expected is None else (f"{run} reached {expected}: still in training, or interrupted",))


def test_a_run_that_does_not_say_what_it_planned(tmp_path: Path) -> None:
    run = RunMaker(overrides=["train.epochs=2"], choices={"planned_steps": None}).write(tmp_path / "a")
    assert judge_fairness(read_rows([run])).notes == ()


def test_what_holds_for_several_is_said_once(tmp_path: Path) -> None:
    runs = [RunMaker().write(tmp_path / "a")]
    for number, name in enumerate("bcd"):
        runs.append(RunMaker(overrides=[f"model.dropout=0.{number + 2}"], step_tokens=130).write(tmp_path / name))
    assert judge_fairness(read_rows(runs)).unfair == ("b, c and d saw 1.3 x the tokens of a",)


def test_one_run_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    fairness = judge_fairness(read_rows([RunMaker().write(tmp_path / "a")]))
    assert fairness == Fairness((), (), (), frozenset(), frozenset())


def test_a_run_without_a_sound_checkpoint(tmp_path: Path) -> None:
    first, other = RunMaker().write(tmp_path / "a"), RunMaker(overrides=[DROPOUT]).write(tmp_path / "b")
    (other / "checkpoints" / "step-40" / "state.json").write_text("{}", encoding="utf-8")
    fairness = judge_fairness(read_rows([first, other]))
    assert fairness.unfair == ()
    assert fairness.notes == (f"{other} has no undamaged checkpoint, so data, tokenizer and order are not checked",)
    assert not {"tokenizer", "order", "machine"} & set(fairness.same), "what is not known is not called the same"


def test_a_run_that_was_never_validated_or_measured(tmp_path: Path) -> None:
    run = RunMaker(choices={"work.tokens": 0}).write(tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "metrics.jsonl").write_text(lines[0].replace("3.0", "null").replace("1.5", "null"), encoding="utf-8")
    sentences = judge_fairness(read_rows([run])).notes
    assert any("has no validation yet" in line for line in sentences)
    assert any("its FLOPs are unknown" in line for line in sentences)


def test_a_seed_that_counts_twice(tmp_path: Path) -> None:
    runs = [RunMaker().write(tmp_path / name) for name in ("a", "a-2")]
    fairness = judge_fairness(read_rows(runs))
    assert fairness.notes == (
        f"{runs[0]} and {runs[1]} have equal configurations and seeds, so the spread of a is too small",
    )


def test_one_seed_among_others_is_named_by_its_folder(tmp_path: Path) -> None:
    runs = [RunMaker().write(tmp_path / "a"), RunMaker(batches={"data": "d2"}).write(tmp_path / "a-2", seed=2)]
    assert judge_fairness(read_rows(runs)).unfair == (f"{runs[1]} had other training data than a",)
