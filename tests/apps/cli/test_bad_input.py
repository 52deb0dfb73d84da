"""Every mistake ends in one clear sentence and exit code 2, and leaves nothing half-written."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from tests.apps.cli.tiny_run import PAIRS, write_pairs, write_run_file


def run_refused(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Return the message that a faulty command line ends in."""
    capfd.readouterr()
    assert main(list(arguments)) == code
    captured = capfd.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_missing_data_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    (tmp_path / "train.target").unlink()
    assert f"{tmp_path}/train.target: there is no such file" in run_refused(capfd, "train", str(file))
    assert not (tmp_path / "run").exists()


def test_empty_data_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    (tmp_path / "valid.source").write_text("", encoding="utf-8")
    assert f"{tmp_path}/valid.source: the file is empty" in run_refused(capfd, "train", str(file))
    assert not (tmp_path / "run").exists()


def test_unequal_line_counts_name_the_first_line_that_looks_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_run_file(tmp_path)
    long = [(f"{'word ' * (3 + index % 7)}", f"{'wort ' * (3 + index % 7)}") for index in range(60)]
    write_pairs(tmp_path, "train", long)
    lines = (tmp_path / "train.target").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.target").write_text("".join(lines[:31] + lines[32:]), encoding="utf-8")
    message = run_refused(capfd, "train", str(file))
    assert "has 60 lines" in message and "has 59" in message and "train.source:3" in message
    assert not (tmp_path / "run").exists()


def test_invalid_utf8(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    (tmp_path / "train.source").write_bytes(b"a m u\n" * 41 + b"a \xff u\n" + b"a m u\n" * 58)
    assert "train.source:42: invalid UTF-8" in run_refused(capfd, "train", str(file))


def test_gzip_cut_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    whole = gzip.compress((tmp_path / "train.source").read_bytes())
    (tmp_path / "train.source.gz").write_bytes(whole[: len(whole) // 2])
    message = run_refused(capfd, "train", str(file), f"data.train.source={tmp_path}/train.source.gz")
    assert "train.source.gz:" in message and "cut off" in message


def test_faults_of_the_run_file_come_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = run_refused(
        capfd, "train", str(write_run_file(tmp_path)), "model.widht=3", "model.heads=4", "train.keep=all"
    )
    assert "3 faults" in message and "did you mean 'width'?" in message
    assert "14 is not a multiple of 4" in message and "must be a whole number, got the text 'all'" in message
    assert not (tmp_path / "run").exists()


def test_vocabulary_larger_than_the_data_supports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path, tokenizer='kind = "bpe"\nvocab_size = 5000')
    message = run_refused(capfd, "train", str(file))
    assert "vocab_size is 5000, but this text supports" in message
    assert not (tmp_path / "run").exists()


def test_run_directory_of_another_configuration(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = run_refused(capfd, "train", f"{trained}/run.toml", "--resume", "model.dropout=0.2")
    assert "another configuration" in message and "model.dropout was 0.1, now 0.2" in message


def test_run_directory_that_holds_a_run(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "add --resume" in run_refused(capfd, "train", f"{trained}/run.toml")


def test_run_directory_that_holds_something_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("", encoding="utf-8")
    assert "holds no run" in run_refused(capfd, "train", str(file))
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_run_directory_in_use(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from clearhead.checkpoints.runs.directory import open_run

    with open_run(trained / "run", resume=True):
        assert "is in use by" in run_refused(capfd, "train", f"{trained}/run.toml", "--resume")


def test_resume_without_a_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "there is no such run directory" in run_refused(capfd, "train", str(write_run_file(tmp_path)), "--resume")
    assert not (tmp_path / "run").exists()


def test_resume_with_another_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from clearhead.text.tokenizer_training import train_tokenizer

    file = write_run_file(tmp_path)
    train_tokenizer("word", ["a m u", "b n v"], vocab_size=1000).save(tmp_path / "own" / "tokenizer.json")
    whole = file.read_text(encoding="utf-8").replace('kind = "word"', f'path = "{tmp_path}/own/tokenizer.json"')
    file.write_text(whole, encoding="utf-8")
    assert main(["train", str(file), "train.steps=2"]) == 0
    train_tokenizer("word", ["c o w", "d p x"], vocab_size=1000).save(tmp_path / "own" / "tokenizer.json")
    message = run_refused(capfd, "train", str(file), "--resume", "train.steps=3")
    assert "has changed since the run" in message and "restore it and resume, or start anew" in message


def test_resume_with_other_training_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    assert main(["train", str(file), "train.steps=2"]) == 0
    error_text = capfd.readouterr().err
    assert "training ended after step 2" in error_text and "all 2 steps are done" in error_text
    assert f"next      clearhead evaluate {tmp_path}/run\n" in error_text and "step-2" in error_text
    source = next(path for path in tmp_path.glob("train*"))
    whole = source.read_text(encoding="utf-8")
    source.write_text(whole + whole.splitlines(keepends=True)[0], encoding="utf-8")
    lines = len(whole.splitlines())
    message = run_refused(capfd, "train", str(file), "--resume", "train.steps=3")
    assert f"{source} has {lines + 1} lines, 1 more than before. Restore it and resume, or start anew" in message


def test_a_failed_start_does_not_block_the_next_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a failure before the first checkpoint, nor one before the first step."""
    from clearhead.training import loop, step

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = write_run_file(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(loop.files, "save_checkpoint", full)
        assert main(["train", str(file), "train.steps=2"]) == 1
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patched:
        patched.setattr(step, "scale_gradients", full)
        assert main(["train", str(file), "train.steps=2"]) == 1
    assert (tmp_path / "run").exists()
    capfd.readouterr()
    assert main(["train", str(file), "train.steps=1", "model.dropout=0.3"]) == 0, capfd.readouterr().err


def test_source_longer_than_the_positions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    assert main(["train", str(file), "train.steps=1", 'model.positions="learned"', "model.max_positions=16"]) == 0
    text = tmp_path / "long"
    text.write_text("a m u\n" + "a " * 16 + "\n" + "a " * 10**6 + "\n" + "a " * 15 + "\n", encoding="utf-8")
    capfd.readouterr()
    assert main(["translate", f"{tmp_path}/run", str(text)]) == 0
    shown = capfd.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) == 4 and lines[1] == lines[2] == lines[3]
    assert shown.err == (
        "clearhead: 2 texts are longer than the 16 tokens that the model reads; the rest of each is left out\n"
    )


def test_nan_loss_keeps_the_last_good_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    message = run_refused(
        capfd, "train", str(file), "train.steps=50", "train.learning_rate=1e30", "train.warmup=1", code=1
    )
    assert "step" in message and "last good checkpoint" in message
    from clearhead.checkpoints.runs.checkpoint import find_newest_undamaged

    assert find_newest_undamaged(tmp_path / "run")[0] is not None


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "the file is empty"), (b"a m u\na \xff u\n", ":2: invalid UTF-8"), (None, "there is no such file")],
)
def test_file_to_translate(
    content: bytes | None, expected: str, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "input"
    if content is not None:
        file.write_bytes(content)
    message = run_refused(capfd, "translate", f"{trained}/run", str(file))
    assert str(file) in message and expected in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "standard input is empty; expected at least one line of text"),
        (b"a m u\n\xff\n", "standard input:2: not valid UTF-8"),
        (b"a m\0 u\n", "standard input:1: expected text in UTF-8, but it contains bytes of value 0"),
    ],
)
def test_standard_input(
    content: bytes, expected: str, trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert expected in run_refused(capfd, "translate", f"{trained}/run")


HUGE = "9" * 24


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", ""], "the reference is empty: name a run directory"),
        (["inspect", "RUN@"], "'@' is not a checkpoint of"),
        (["translate", "RUN", "FILE", "--threads", "1000"], "--threads 1000 is far more than the "),
        (["heads", "RUN", "FILE", "--threads", "1000"], "--threads 1000 is far more than the "),
        (["translate", "RUN", "FILE", "--threads", HUGE], f"--threads {HUGE} is far more than the "),
        (["translate", "RUN", "FILE", "--seed", HUGE], "--seed must be at most 9,223,372,036,854,775,807, got"),
        (["translate", "RUN", "FILE", "--batch-size", HUGE], "--batch-size must be at most 2,147,483,647, got"),
        (["translate", "RUN", "FILE", "--beam-size", "1001"], "--beam-size must be at most 1,000, got 1001"),
        (["generate", "RUN", "--seed", HUGE], "--seed must be at most 9,223,372,036,854,775,807"),
        (["generate", "RUN", "--max-new-tokens", HUGE], "--max-new-tokens must be at most 2,147,483,647"),
        (["convert", "RUN", "FILE/x", "--to", "hf"], "FILE is not a folder"),
        (["check", "RUN", "--against", "transformers", "--reference", "RUNS"], "no such folder: FOLDER has no 'runs'"),
        (["average", "RUN"], "missing option '--last'; see clearhead average"),
        (["translate", "RUN", "FILE", "--length-penalty", "inf"], "--length-penalty must be a number from -10 to 10"),
        (["translate", "RUN", "FILE", "--n-bset", "2"], "no such option: --n-bset (did you mean '--n-best'?)"),
        (["average", "RUN@best", "--last", "2"], "RUN@best names one checkpoint, but an average needs the last"),
        (["average", "RUNS", "--last", "2"], "there is no such run directory: FOLDER has no 'runs'"),
        (["train", "RUN.toml", "train.run=RUNS", "--resume"], "no such run directory: FOLDER has no 'runs'"),
        (["inspect", "RUN", "--svg", "FOLDER"], "give a name that ends in .svg"),
        (["inspect", "RUN", "--svg", "FILE/x.svg"], "valid.source is not a folder"),
    ],
)
def test_wrong_words(arguments: list[str], expected: str, trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A place in capitals stands for the run, its folder, a file of text or a folder that is not there."""
    names = {"RUNS": "runs", "RUN": "run", "FILE": "valid.source"}

    def fill_names(word: str) -> str:
        for name, file in names.items():
            word = word.replace(name, f"{trained}/{file}")
        return word.replace("FOLDER", str(trained))

    assert fill_names(expected) in run_refused(capfd, *map(fill_names, arguments))


def test_a_file_that_must_not_be_read(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    access, file = os.access, f"{trained}/valid.source"
    monkeypatch.setattr(
        os, "access", lambda path, *mode, **rest: os.fsdecode(path) != file and access(path, *mode, **rest)
    )
    message = run_refused(capfd, "translate", f"{trained}/run", file)
    assert f"clearhead translate: FILE is not valid: path '{file}' is not readable; see clearhead" in message


def test_a_file_never_takes_the_place_of_a_device(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is anything computed for a file that cannot be written."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, fault in (("folder", "is a folder: name a file in it"), ("pipe", "is a device or a pipe, not a file")):
        data = ("--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target")
        message = run_refused(capfd, "evaluate", f"{trained}/run", *data, "-o", f"{tmp_path / name}", "--force")
        assert message == f"clearhead: {tmp_path / name} {fault}" + ("\n" if name == "folder" else ": name a file\n")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("ref", "expected"), [("@bset", "did you mean 'best'?"), ("@step-4", "no checkpoint of step 4"), ("x", "")]
)
def test_reference_that_leads_nowhere(
    ref: str, expected: str, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert expected in run_refused(capfd, "translate", f"{trained}/run{ref}", f"{trained}/valid.source")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tokenize", "13b"], "did you mean '13a'?"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--device", "gpu"], "gpu"),
        (["--precision", "fp23"], "clearhead: --precision must be one of auto, fp32, bf16, int8, int4; got 'fp23'"),
    ],
)
def test_faulty_option_of_evaluate(
    arguments: list[str], expected: str, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = ["--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target"]
    assert expected in run_refused(capfd, "evaluate", f"{trained}/run", *data, *arguments)


def test_average_of_more_than_there_is(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "has 2 undamaged checkpoints" in run_refused(capfd, "average", f"{trained}/run", "--last", "3")
    assert "is not a run directory: it has no checkpoints" in run_refused(capfd, "average", str(trained), "--last", "1")


def test_faulty_spec_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spec.json"
    file.write_text('{"encoder": 3, "colour": 1}', encoding="utf-8")
    message = run_refused(capfd, "inspect", str(file))
    assert str(file) in message and "colour" in message and "encoder" in message


def test_new_refuses_unequal_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path, "train", PAIRS)
    (tmp_path / "train.target").write_text("a\n", encoding="utf-8")
    data = [
        "--source",
        f"{tmp_path}/train.source",
        "--target",
        f"{tmp_path}/train.target",
        "-o",
        f"{tmp_path}/run.toml",
    ]
    assert "has 125 lines" in run_refused(capfd, "new", "translate", *data)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["train.source", "train.target"]
