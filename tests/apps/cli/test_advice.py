"""Advice in a message can be followed as it stands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer
from clearhead.training.runfile.read import load_run_file
from tests.apps.cli.test_bad_input import run_refused
from tests.apps.cli.test_new_tasks import SMALL
from tests.apps.cli.tiny_tasks import LINES, SENTENCES, label_of, write_lines

Runs = Callable[[str], Path]
PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.mark.parametrize("command", ["new", "evaluate"])
def test_a_picture_in_a_folder_of_texts_is_left_out_with_the_option_of_the_message(
    command: str, runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    write_lines(tmp_path / "texts" / "a.txt", LINES)
    (tmp_path / "texts" / "b.png").write_bytes(PICTURE)
    words = [command, "generate" if command == "new" else str(runs("generate")), "--text", str(tmp_path / "texts")]
    words += ["--output", str(tmp_path / "run.toml")] if command == "new" else []
    message = run_refused(capfd, *words)
    assert "like binary files and UTF-16; or leave it out: --pattern" in message
    assert main([*words, *shlex.split(message.rpartition("leave it out: ")[2])]) == 0
    if command == "new":
        assert set((tmp_path / "run-data" / "train.txt").read_text(encoding="utf-8").splitlines()) < set(LINES)


def test_a_file_of_questions_that_is_not_there_is_said_before_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file, expected in (("nowhere", "there is no such file"), (".", ". is a folder: name a file in it")):
        assert expected in run_refused(capfd, "new", "answer", "--text", file)


def test_the_field_of_json_lines_has_an_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", [f'{{"body": "{line}"}}' for line in LINES])
    words = ["new", "generate", "--text", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "run.toml")]
    assert "there is no field 'text'; the fields are 'body'; choose one with --text-column" in run_refused(
        capfd, *words
    )
    assert main([*words, "--text-column", "body"]) == 0
    assert set((tmp_path / "run-data" / "train.txt").read_text(encoding="utf-8").splitlines()) < set(LINES)


@pytest.mark.parametrize(
    ("ending", "separator", "options", "advice", "mended"),
    [
        (".tsv", "\t", ["--text-column", "1", "--labels", "3"], "choose one with --labels", ["--labels", "2"]),
        (".tsv", "\t", ["--text-column", "0", "--labels", "2"], "counted from 1", ["--text-column", "1"]),
        (".tsv", "\t", ["--labels", "label"], "choose one with --labels", ["--labels", "2"]),
        (".tsv", "\t", ["--labels", "1", "--text-column", "1"], "--labels and --text-column name", ["--labels", "2"]),
        (".tsv", "\t", ["--labels", "1"], "check --labels", ["--labels", "2"]),
        (".tsv", "\t", ["--labels", "2", "--label-kind", "x"], "expected one of single_label", ["--labels", "2"]),
        (".tsv", ",", ["--labels", "2"], "give the file a name that ends in .csv", ["--text", "a.csv"]),
        (".csv", "\t", ["--labels", "2"], "give the file a name that ends in .tsv", ["--text", "a.tsv"]),
    ],
)
def test_columns_are_counted_from_1_and_named_by_the_options_of_the_command(
    ending: str,
    separator: str,
    options: list[str],
    advice: str,
    mended: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_lines(
        tmp_path / f"a{ending}", [f"{sentence}{separator}{label_of(sentence)}" for sentence in SENTENCES]
    )
    message = run_refused(capfd, "new", "classify", "--text", file.name, *options)
    assert advice in message and "_column" not in message
    if "--text" in mended:
        file.rename(mended[1])
    given_options = dict(zip(options[::2], options[1::2], strict=True)) | dict(
        zip(mended[::2], mended[1::2], strict=True)
    )
    given_options.pop("--label-kind", None)
    words = [word for option in ({"--text": file.name} | given_options).items() for word in option]
    assert main(["new", "classify", *words]) == 0


@pytest.mark.parametrize(
    ("name", "line", "advice"),
    [
        ("a.tsv", "a m\tu\tlate", 'got 3: 1 "a m", 2 "u", 3 "late"; a text cannot hold a tab'),
        ("a.csv", "a, m,late", 'got 3: 1 "a", 2 " m", 3 "late"; put a text that holds a comma into'),
        ("a.tsv", "a m u", 'got 1: 1 "a m u"; add what is missing'),
    ],
)
def test_a_line_with_other_columns_than_the_first_is_refused(
    name: str, line: str, advice: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    separator = {"a.tsv": "\t", "a.csv": ","}[name]
    rows = ["text\tlabel", *(f"{sentence}\t{label_of(sentence)}" for sentence in SENTENCES)]
    file = write_lines(tmp_path / name, [row.replace("\t", separator) for row in rows[:57]] + [line])
    message = run_refused(capfd, "new", "classify", "--text", str(file), "--labels", "label")
    assert f"{file}:58: expected 2 columns" in message and advice in message


def test_numbers_that_are_all_different_have_an_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "a.tsv", [f"{sentence}\t{number}" for number, sentence in enumerate(SENTENCES)])
    words = ["new", "classify", "--text", str(file), "--labels", "2", "--output", str(tmp_path / "run.toml")]
    message = run_refused(capfd, *words)
    assert "check --labels, or for a regression set --label-kind" in message
    assert main([*words, *shlex.split(message.rpartition("for a regression set ")[2])]) == 0
    assert load_run_file(tmp_path / "run.toml").task.labels == "regression"


def test_an_option_that_the_command_lacks_is_not_advised(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "a.jsonl", ['{"text": "a m", "label": 0.5}'])
    message = run_refused(capfd, "evaluate", str(runs("classify")), "--text", str(file), "--labels", "label")
    assert 'numbers need a model with task.labels = "regression"' in message


def test_a_started_model_gets_more_positions_by_the_line_of_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer("character", LINES, vocab_size=100)
    sizes = Hyperparameters(
        family="decoder", layers=1, width=14, heads=2, feedforward=11, positions="learned", max_positions=7
    )
    spec = build_spec(sizes, source_vocab=tokenizer.vocab_size, target_vocab=tokenizer.vocab_size)
    ch.Model(ch.build(spec), TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind="generate")).save("first model")
    write_lines(tmp_path / "text.txt", LINES)
    (tmp_path / "run.toml").write_text(
        '[task]\nkind = "generate"\ninit = "first model"\n[data]\ntrain = { text = "text.txt" }\nvalid = 0.1\n'
        'max_length = 13\n[train]\nrun = "run"\nsteps = 2\nbatch_tokens = 101\n',
        encoding="utf-8",
    )
    message = run_refused(capfd, "train", "run.toml")
    assert "has 13 tokens, but the model has 7 positions: lower data.max_length to 7, or" in message
    assert "model.max_positions" not in message
    words = shlex.split(message)
    at = words.index("-c")
    assert words[at - 1] == sys.executable and words[at + 3 : -1] == ["and", "then", "train", "with"]
    exec(compile(words[at + 1], "advice", "exec"), {})
    assert main(["train", "run.toml", words[-1].removesuffix(".")]) == 0
    assert main(["train", "run.toml", "data.max_length=7", "train.run=shorter"]) == 0


TAGGED = "".join(f"{letter}\tB-A\n\n" for letter in "abcdefghijklmnopqrstuvwxyz")
PROSE = "".join(f"{sentence} walks{' on' * (number % 3)}\n" for number, sentence in enumerate(SENTENCES))
WRONG_DATA = {
    # Task, content and name of the file, the options besides --text, the expected message.
    "UTF-16 without a mark": ("generate", "\n".join(LINES).encode("utf-16-le"), "a.txt", [], "bytes of value 0"),
    "a name that promises gzip": ("generate", "\n".join(LINES).encode(), "a.gz", [], "give it a name without .gz"),
    "one column for two": ("classify", "\n".join(SENTENCES), "a.tsv", ["--labels", "1"], "column for --text-column"),
    "spaces for tabs": (
        "classify", "\n".join(f"{sentence} x" for sentence in SENTENCES), "a.tsv", ["--labels", "2"],
        "write tabs or commas",
    ),
    "names that are no numbers": (
        "classify", "\n".join(f"{sentence}\tl{sentence}" for sentence in SENTENCES), "a.tsv", ["--labels", "2"],
        "); check --labels\n",
    ),
    "all tags the same": (
        "tag", TAGGED.replace("B-A", "O"), "a.conll", [], "all 26 words from here on have the tag 'O'",
    ),
    "plain text as tags": ("tag", PROSE, "a.txt", [], "expected in each line a word in the first column and its tag"),
    "prose of equal lines": (
        "tag", "\n".join(f"one two end{number % 41}" for number in range(99)), "a.txt", [],
        "the 99 words from here on have 41 different tags",
    ),
    "no empty line between sentences": ("tag", TAGGED.replace("\n\n", "\n"), "a.conll", [], "an empty line ends one"),
    "tags in JSON of other names": ("tag", '{"a": 1}', "a.jsonl", [], "there is no field 'tokens'; the fields are 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_DATA)
def test_wrong_data_is_named_with_what_was_expected(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, content, name, options, words = WRONG_DATA[case]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in run_refused(
        capfd, "new", kind, "--text", str(file), *options, "--output", str(tmp_path / "run.toml")
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_one_file_on_both_sides_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(write_lines(tmp_path / "a.txt", LINES))
    words = ["--source", file, "--target", file, "--output", str(tmp_path / "run.toml")]
    assert main(["new", "translate", *words]) == 0
    assert f"{len(LINES)} of {len(LINES)} pairs have the same text on both sides" in capfd.readouterr().err
    assert main(["train", str(tmp_path / "run.toml"), *SMALL, f"train.run={tmp_path}/run"]) == 0
    assert "pairs have the same text on both sides" in capfd.readouterr().err
