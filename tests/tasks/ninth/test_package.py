"""A task from an installed package works in every command like a built-in task."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file

from tests.house.source import ROOT

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).with_name("package")
GOOD, BAD, OTHER = ("good", "fine", "warm"), ("bad", "dull", "cold"), ("film", "play", "story", "scene")
TEXTS = ["good fine film", "bad dull cold play", "story"]
USE = """
import json, sys
import clearhead

*references, texts = sys.argv[1:]
texts = json.loads(texts)
for reference in references:
    model = clearhead.load(reference)
    found = {"list": model.predict(texts), "one": model.predict(texts[0]), "lazy": list(model.predict(iter(texts)))}
    print(json.dumps(found if model.task.kind == "rate" else found["list"].tolist()))
assert not [name for name in sys.modules if name.startswith("clearhead.training") or name == "clearhead_rate.train"]
"""


LISTS = """
import clearhead

examples = [("good good film", 2.0), ("good play", 1.0), ("bad", -1)] * 9
tables = {
    "task": {"kind": "rate", "loss": "squared"},
    "data": {"valid": 0.2},
    "tokenizer": {"kind": "word"},
    "model": {"layers": 1, "width": 16, "heads": 2, "feedforward": 24},
    "train": {"run": "lists", "steps": 4, "warmup": 1, "device": "cpu"},
}
measures = clearhead.train(tables, data={"train": examples}).load().evaluate(examples)
print(sorted(measures), measures["texts"])
"""


class CommandResult(NamedTuple):
    """Exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the package into a separate folder, and return the environment variables that find it."""
    folder = tmp_path_factory.mktemp("ninth")
    source = shutil.copytree(PACKAGE, folder / "source")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    install += ["--no-deps", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")])}


def write_ratings(path: Path, count: int) -> None:
    """Write texts with 1 to 5 stars: 3, plus 0.5 for each good word, minus 0.5 for each bad word."""
    draw, lines = random.Random(path.name), ["text\tstars"]
    for _ in range(count):
        words = draw.choices(GOOD + BAD + OTHER, k=draw.randint(3, 7))
        stars = 3 + (sum(word in GOOD for word in words) - sum(word in BAD for word in words)) / 2
        lines.append(f"{' '.join(words)}\t{min(max(stars, 1.0), 5.0)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the commands run."""
    folder = tmp_path_factory.mktemp("ratings")
    write_ratings(folder / "ratings.tsv", 80)
    write_ratings(folder / "test.tsv", 30)
    (folder / "texts").write_text("".join(f"{text}\n" for text in (TEXTS[0], "", *TEXTS[1:])), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ran(environment: dict[str, str], folder: Path) -> dict[str, CommandResult]:
    """Run every command in one process, and return the results by name."""
    sizes = ["model.layers=1", "model.width=16", "model.heads=2", "model.feedforward=24"]
    length = ["train.steps=60", "train.validate_every=20", "train.learning_rate=0.02", "train.device=cpu"]
    train = ["train", "run.toml", *sizes, *length, "data.least=1", "data.most=5"]
    commands = {
        "new": ["new", "rate", "--text", "ratings.tsv", "--number", "stars", "--minutes", "0.02"],
        "cut short": [*train, "train.run=resumed"],
        "resumed": [*train, "train.run=resumed", "--resume"],
        "train": [*train, "train.run=whole"],
        "evaluate": ["evaluate", "whole", "--text", "test.tsv", "--number", "stars"],
        "own data": ["evaluate", "whole"],
        "as json": ["evaluate", "whole", "--text", "test.tsv", "--number", "stars", "--json"],
        "as trained": ["evaluate", "whole", "--text", "test.tsv"],
        "inspect": ["inspect", "whole"],
        "view": ["view", "whole", TEXTS[0], "-o", "view.html"],
        "convert": ["convert", "whole", "converted", "--to", "hf"],
        "predict": ["predict", "whole", "texts"],
        "predictions": ["predict", "whole", "texts", "--json"],
        "untrained": ["predict", "whole@step-0", "texts"],
        "paired": ["predict", "whole", "pairs", "--pair"],
        "unknown kind": ["train", "run.toml", "task.kind=rat"],
        "unknown key": ["train", "run.toml", "task.los=squared"],
        "key of others": ["train", "run.toml", "task.temperature=1.0"],
        "bounds": ["train", "run.toml", "data.least=5", "data.most=1"],
        "out of bounds": ["train", "run.toml", "data.most=2"],
        "smoothed": ["train", "run.toml", "train.label_smoothing=0.1"],
        "lists": ["-c", LISTS],
        "other option": ["evaluate", "whole", "--text", "test.tsv", "--labels", "stars"],
    }
    (folder / "pairs").write_text("good\tfilm\n", encoding="utf-8")
    job = [sys.executable, "-m", "tests.tasks.ninth.job", "resumed/checkpoints/step-20"]
    job.append(json.dumps([*commands.values()]))
    done = subprocess.run(job, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return {
        name: CommandResult(*result)
        for name, result in zip(commands, json.loads(done.stdout.splitlines()[-1]), strict=True)
    }


def test_new_writes_a_run_file_from_the_words_of_the_task(ran: dict[str, CommandResult], folder: Path) -> None:
    assert ran["new"].code == 0, ran["new"].err
    assert "80 texts, " in ran["new"].err and "; numbers from " in ran["new"].err
    text = (folder / "run.toml").read_text("utf-8")
    assert 'kind = "rate"\npool = "mean"   # states that' in text
    assert 'loss = "absolute"   # absolute | squared\n' in text
    assert 'train = { text = "run-data/train.jsonl" }' in text
    copies = (folder / "run-data" / "train.jsonl").read_text("utf-8").splitlines()
    assert len(copies) == 72 and json.loads(copies[0]).keys() == {"text", "number"}


def test_it_is_trained_and_measured(ran: dict[str, CommandResult], folder: Path) -> None:
    assert ran["train"].code == 0, ran["train"].err
    assert "next      clearhead evaluate whole\n" in ran["train"].err
    assert 'data.valid = {"text": "run-data/valid.jsonl"' in ran["own data"].err and ran["own data"].code == 0
    assert "correlation  0." in ran["own data"].out
    assert "clearhead predict whole FILE" in ran["train"].err
    assert float(ran["train"].err.partition("best      correlation ")[2].split()[0]) > 80
    assert ran["evaluate"].code == 0, ran["evaluate"].err
    error, correlation = ran["evaluate"].out.splitlines()
    assert error.endswith("on average, of 30 texts") and correlation.startswith("correlation  0.")
    measures = json.loads(ran["as json"].out)
    assert measures["correlation"] > 0.8 and 0 < measures["mean_absolute_error"] < 1 and measures["texts"] == 30


def test_it_takes_lists_of_examples(ran: dict[str, CommandResult]) -> None:
    assert ran["lists"].out == "['correlation', 'mean_absolute_error', 'texts'] 27\n", ran["lists"].err


def test_a_run_that_was_cut_short_goes_on_with_the_same_bits(ran: dict[str, CommandResult], folder: Path) -> None:
    assert ran["cut short"].code == 130
    assert ran["resumed"].code == 0, ran["resumed"].err
    assert "resum" in ran["resumed"].err
    ends = [folder / run / "checkpoints" / "step-60" for run in ("whole", "resumed")]
    names = sorted(path.name for path in ends[0].glob("*.safetensors"))
    assert len(names) > 1
    for name in names:
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name


def test_it_is_looked_at(ran: dict[str, CommandResult], folder: Path) -> None:
    assert ran["inspect"].code == ran["view"].code == 0, ran["view"].err
    assert "Linear(size=1)" in ran["inspect"].out
    assert "encoder.self" in (folder / "view.html").read_text("utf-8")
    record = json.loads((folder / "whole" / "task.json").read_text("utf-8"))
    assert record["kind"] == "rate" and record["facts"] == {"least": 1.0, "most": 5.0}


def test_it_predicts(ran: dict[str, CommandResult], folder: Path, environment: dict[str, str]) -> None:
    """And what is loaded, also as a checkpoint in the layout of the hub, never imports training."""
    assert ran["predict"].code == ran["convert"].code == 0, ran["convert"].err
    shown = ran["predict"].out.splitlines()
    answers = [json.loads(line) for line in ran["predictions"].out.splitlines()]
    assert shown[1] == "" and answers[1]["prediction"] is None
    numbers = [answer["prediction"] for answer in answers if answer["prediction"] is not None]
    assert [float(line) for line in shown if line] == pytest.approx(numbers, rel=1e-5)
    assert numbers[0] > 3 > numbers[1] and all(1 <= number <= 5 for number in numbers)
    job = [sys.executable, "-c", USE, "whole", "converted", json.dumps(TEXTS)]
    done = subprocess.run(job, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    vectors, converted = map(json.loads, done.stdout.splitlines())
    assert vectors["list"] == pytest.approx(numbers) and vectors["one"] == vectors["list"][0]
    assert vectors["lazy"] == pytest.approx(vectors["list"])
    within: Any = [min(max(vector[0], 1.0), 5.0) for vector in converted]
    assert within == pytest.approx(vectors["list"], abs=1e-4)


def test_it_is_converted_as_what_its_head_returns(ran: dict[str, CommandResult], folder: Path) -> None:
    """A vector is a head of sentence-transformers, and the numbers are in their own unit there."""
    assert ran["convert"].err.splitlines()[-1] == "written as eurobert"
    modules = json.loads((folder / "converted" / "modules.json").read_text("utf-8"))
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Dense"]
    assert load_file(folder / "converted" / "2_Dense" / "model.safetensors")["linear.weight"].shape == (1, 16)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("as trained", "there is no column 'number'; its columns, separated by tabs, are"),
        ("untrained", "is the first checkpoint of a run, and its head is untrained: use a later checkpoint"),
        ("paired", "this model was trained to 'rate' single texts, got a pair; give one text"),
        ("unknown kind", "[task] kind must be one of translate, generate, fill, classify, tag, embed, denoise, answer, "
         "rate, got the text 'rat' (did you mean 'rate'?)"),
        ("unknown key", "unknown key 'los' in [task] (did you mean 'loss'?)"),
        ("key of others", "[task] temperature has no effect for the task 'rate', only for 'embed'; remove it"),
        ("smoothed", "[train] label_smoothing has no effect for the task 'rate'; remove it"),
        ("bounds", "[data] most = 1 must be above least = 5"),
        ("out of bounds", "run-data/train.jsonl:"),
        ("other option", "--labels has no effect here: a model trained to 'rate' is evaluated with --text F"),
    ],
)  # fmt: skip
def test_mistakes_are_named(ran: dict[str, CommandResult], name: str, sentence: str) -> None:
    assert ran[name].code == 2 and sentence in ran[name].err
    assert "Traceback" not in ran[name].err


def test_help_names_the_task(environment: dict[str, str]) -> None:
    pages = []
    for words in ([], ["new"], ["new", "rate"], ["evaluate"]):
        job = [sys.executable, "-m", "clearhead", *words, "--help"]
        done = subprocess.run(job, env=environment, capture_output=True, text=True, check=True, timeout=60)
        pages.append(" ".join(done.stdout.split()))
    start, new, rate, evaluate = pages
    assert "denoise, answer and rate. Use predict for a task without a separate command" in start
    assert "rate Write a run file that trains a model to rate texts with numbers." in new
    assert "clearhead new rate --text ratings.tsv --number stars" in rate and "--number VALUE The column" in rate
    assert "rate mean absolute error, correlation" in evaluate and "--number VALUE The column" in evaluate
