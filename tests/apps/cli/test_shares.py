"""Shares of a file of texts: in order they are the bytes of one process, also after a kill at any byte."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clearhead.apps.cli.lines import InputLine, TextInput, answer_lines
from clearhead.apps.cli.main import main
from clearhead.apps.cli.options import _local_device
from clearhead.apps.cli.outputs import AnswerFile, FileShare, RankedLines, VectorFile
from clearhead.apps.cli.progress import FIRST_LOG_SECONDS, ProgressLog
from clearhead.base.errors import InputError

Runs = Callable[[str], Path]
LETTERS = "abcdemnopquvwxy"
IMPLIED = ("RANK", "WORLD_SIZE", *(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "MAX", "STEP")))
COMMANDS: dict[str, list[str]] = {
    "translate": ["translate", "TEXTS", "--beam-size", "2", "--json"],
    "ranked": ["translate", "TEXTS", "--n-best", "3", "--beam-size", "4"],
    "generate": ["generate", "--file", "TEXTS", "--seed", "3", "--max-new-tokens", "8", "--json"],
    "classify": ["classify", "TEXTS", "--json"],
    "tag": ["tag", "TEXTS", "--json"],
    "fill": ["fill", "--file", "BLANKS", "--top-k", "2"],
    "embed": ["embed", "FULL"],
    "similarity": ["embed", "PAIRS", "--similarity"],
    "answer": ["answer", "--file", "PAIRS", "--top-k", "2"],
    "predict": ["predict", "TEXTS"],
}
KINDS = {"similarity": "embed", "predict": "classify"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IMPLIED:
        monkeypatch.delenv(name, raising=False)


def write_texts(folder: Path) -> None:
    """Write files of 60 lines: some are empty, lines end in two ways, and the last one has no line end."""
    draw = random.Random(5)
    texts = [" ".join(draw.choices(LETTERS, k=draw.randint(0, 8))) for _ in range(59)] + ["é a ü m"]
    (folder / "TEXTS").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode())
    (folder / "BLANKS").write_text("\n".join(text and f"{text} ___" for text in texts), encoding="utf-8")
    (folder / "PAIRS").write_text("\n".join(text and f"{text[0]}\t{text}" for text in texts), encoding="utf-8")
    (folder / "FULL").write_text("\n".join(text or "a" for text in texts), encoding="utf-8")


@pytest.fixture
def command(
    request: pytest.FixtureRequest, trained: Path, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], str]:
    """A command with a model and texts, and the name of its output."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    name: str = request.param
    words = COMMANDS[name]
    kind = KINDS.get(name, words[0])
    ref = trained / "run" if kind == "translate" else runs(kind)
    return [words[0], str(ref), *words[1:]], "out.npy" if name == "embed" else "out"


def read_shares(output: str, count: int) -> list[bytes]:
    return [Path(f"{output}.{number}-of-{count}").read_bytes() for number in range(1, count + 1)]


def join(shares: list[bytes], output: str) -> bytes:
    """Return the file that shares make: lines one after the other, or the rows of arrays."""
    if not output.endswith(".npy"):
        return b"".join(shares)
    file = io.BytesIO()
    np.save(file, np.concatenate([np.load(io.BytesIO(share)) for share in shares]))
    return file.getvalue()


@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_shares_are_one_process_also_after_a_kill_at_any_byte(
    command: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words, output = command
    assert main([*words, "-o", output]) == 0
    for number in (1, 3):
        assert main([*words, "-o", output, "--share", f"{number}/3"]) == 0

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    share = [*words, "-o", output, "--share", "2/3"]
    with monkeypatch.context() as stopped:
        stopped.setattr(AnswerFile, "finish", kill)
        stopped.setattr(VectorFile, "finish", kill)
        assert main(share) == 130
    (partial,) = Path().glob(f"{output}.2-of-3.partial-*")
    content = partial.read_bytes()
    whole: bytes | None = None
    draw = random.Random(7)
    assert main(share) == 2, "a share that was begun needs --resume"
    for cut in (len(content), *(draw.randrange(len(content)) for _ in range(2))):
        partial.write_bytes(content[:cut])
        assert main([*share, "--resume"]) == 0 and not partial.exists()
        shares = read_shares(output, 3)
        assert whole in (None, shares[1])
        whole = shares[1]
        assert join(shares, output) == Path(output).read_bytes()
        Path(f"{output}.2-of-3").unlink()
    capfd.readouterr()
    assert main([*words, "-o", output, "--share", "3/3"]) == 0
    captured = capfd.readouterr()
    assert captured.err == f"{output}.3-of-3 is complete already, so nothing is computed; --force computes it again\n"
    assert captured.out == ""


@pytest.mark.parametrize("command", ["classify", "embed"], indirect=True)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_shares(
    count: int, command: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words, output = command
    lines = Path(words[2]).read_bytes().splitlines(keepends=True)[:5]
    Path(words[2]).write_bytes(b"".join(lines))
    assert main([*words, "-o", output]) == 0
    # torchrun starts 2 processes in each task of a Slurm array.
    levels = 2 if count == 2 else 1
    for number in range(count):
        values = {"ID": 5 + number // levels, "MIN": 5, "MAX": 4 + count // levels, "COUNT": count // levels}
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
        if levels == 2:
            monkeypatch.setenv("RANK", str(number % 2))
            monkeypatch.setenv("WORLD_SIZE", "2")
        assert main([*words, "-o", output]) == 0
    assert join(read_shares(output, count), output) == Path(output).read_bytes()
    assert "implied by " in capfd.readouterr().err


@pytest.mark.parametrize("command", ["classify"], indirect=True)
def test_other_options_or_another_input_do_not_continue_a_share(
    command: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words, output = command
    share = [*words, "-o", output, "--share", "1/2"]
    with monkeypatch.context() as stopped:
        stopped.setattr(AnswerFile, "finish", lambda *_: 1 / 0)
        assert main(share) == 1
    assert main([*share, "--resume", "--batch-size", "3"]) == 2
    assert "has answers with other options or of another input" in capfd.readouterr().err
    os.utime(words[2], (1, 1))
    assert main([*share, "--resume"]) == 2
    assert main([*share, "--force"]) == 0
    assert sorted(path.name for path in Path().glob("out*")) == ["out.1-of-2"]


def test_bits_that_depend_on_the_batch_survive_a_kill(tmp_path: Path) -> None:
    """The window in which a command was stopped is computed again as a whole, and those before it are not."""
    (tmp_path / "in").write_text("".join(f"{number}\n" for number in range(100)), encoding="utf-8")
    windows: list[list[str]] = []

    def answer(texts: Sequence[str]) -> list[str]:
        windows.append(list(texts))
        return [f"{text} of {len(texts)}" for text in texts]

    def run() -> bytes:
        output = AnswerFile(tmp_path / "out", tmp_path / "partial", None, can_resume=True)
        lines = replace(TextInput.of(tmp_path / "in"), output=output)
        answer_lines(lines, answer, lambda line, text: print(text), batch_size=None)
        return (tmp_path / "out").read_bytes()

    whole = run()
    assert [len(window) for window in windows] == [16, 32, 52]
    windows.clear()
    (tmp_path / "partial").write_bytes(b"".join(whole.splitlines(keepends=True)[:20]) + b"20 o")
    assert run() == whole and [len(window) for window in windows] == [32, 52]


@pytest.mark.parametrize("kind", [AnswerFile, RankedLines])
def test_whole_answers_are_those_that_nothing_can_follow(kind: type[AnswerFile], tmp_path: Path) -> None:
    lines = [f"{number} ||| hypothesis ||| -1.0\n".encode() for number in (4, 4, 5, 5, 6)]
    answers = kind(Path("out"), Path("partial"), None, can_resume=True)
    content = b"".join(lines)
    for cut in range(len(content) + 1):
        (tmp_path / "out").write_bytes(content[:cut])
        with (tmp_path / "out").open("rb") as file:
            count, end = answers.find_end(file)
        num_lines = content[:cut].count(b"\n")
        starts = [0, 0, 0, 2, 2, 4] if kind is RankedLines else [*range(6)]
        assert end == len(b"".join(lines[: starts[num_lines]]))
        assert count == (starts[num_lines] // 2 if kind is RankedLines else num_lines)


def test_a_real_kill_loses_no_line(runs: Runs, tmp_path: Path) -> None:
    write_texts(tmp_path)
    texts = (tmp_path / "FULL").read_text(encoding="utf-8")
    (tmp_path / "FULL").write_text(f"{texts}\n" * 20, encoding="utf-8")
    words = ["classify", str(runs("classify")), f"{tmp_path}/FULL", "--json", "-o"]
    program = [sys.executable, "-m", "clearhead", *words, f"{tmp_path}/killed"]
    process = subprocess.Popen(program, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and sum(file.stat().st_size for file in tmp_path.glob("killed.partial-*")) < 5_000:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial,) = tmp_path.glob("killed.partial-*")
    assert partial.stat().st_size >= 5_000, "the kill came between two answers"
    assert main([*words, f"{tmp_path}/killed", "--resume"]) == main([*words, f"{tmp_path}/whole"]) == 0
    assert (tmp_path / "killed").read_bytes() == (tmp_path / "whole").read_bytes()


MEMORY = """
import resource, sys
from pathlib import Path
from clearhead.apps.cli.lines import TextInput, answer_lines
from clearhead.apps.cli.outputs import OutputOptions
folder = Path(sys.argv[1])
lines = TextInput.of(folder / "in", OutputOptions(folder / "out", sys.argv[2], settings={"as_json": False}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answer_lines(lines, lambda texts: texts, lambda line, text: print(len(text)), batch_size=None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measures peak memory as Linux reports it")
def test_memory_does_not_depend_on_the_size_of_the_file(tmp_path: Path) -> None:
    line = b"word " * 800 + b"\n"
    with (tmp_path / "in").open("wb") as file:
        for _ in range(150):
            file.write(line * 256)
    program = [sys.executable, "-c", MEMORY, str(tmp_path), "2/2"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert (tmp_path / "out.2-of-2").read_text(encoding="utf-8") == "4000\n" * (150 * 256 // 2)
    # The share has 77 MB, and as a list of lines as many more.
    assert int(done.stdout.split()[-1]) < 25


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, FileShare(1, 1, "torchrun")),
        ({"RANK": "3", "WORLD_SIZE": "4"}, FileShare(4, 4, "torchrun")),
        ({"ID": "5", "MIN": "1", "MAX": "9", "COUNT": "5", "STEP": "2"}, FileShare(3, 5, "a Slurm array")),
        (
            {"ID": "11", "MIN": "10", "COUNT": "3", "RANK": "1", "WORLD_SIZE": "2"},
            FileShare(4, 6, "torchrun of a Slurm array"),
        ),
        ({"RANK": "1"}, "RANK is 1, WORLD_SIZE is None"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4, WORLD_SIZE is 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"ID": "2", "MIN": "1", "MAX": "7", "COUNT": "3"}, "not evenly spaced"),
        ({"ID": "7", "MIN": "1", "COUNT": "3"}, "not evenly spaced"),
    ],
)
def test_torchrun_and_slurm_imply_a_share(
    variables: dict[str, str], expected: FileShare | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name if name in IMPLIED else f"SLURM_ARRAY_TASK_{name}", value)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            FileShare.from_environment()
    else:
        assert FileShare.from_environment() == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["FULL", "-o", "out", "--share", "3/2"],
            "--share expects I/N with I from 1 to N, such as 2/8; received '3/2'",
        ),
        (["FULL", "-o", "out", "--share", "0/2"], "received '0/2'"),
        (["FULL", "-o", "out", "--share", "a/b"], "received 'a/b'"),
        (["FULL", "-o", "out", "--share", "2"], "received '2'"),
        (["FULL", "--share", "1/2"], "2 shares, each with its file: add -o FILE"),
        (["-", "-o", "out", "--share", "1/2"], "standard input has no shares"),
        (["FULL.gz", "-o", "out", "--share", "1/2"], "FULL.gz has no shares, since it is compressed"),
        (["absent", "-o", "out", "--share", "1/2"], "there is no such file"),
        (["empty", "-o", "out", "--share", "1/2"], "the file is empty"),
        (["FULL", "-o", "absent/out", "--share", "1/2"], "there is no such folder"),
        (["FULL", "-o", "out", "--resume", "--force"], "leave out one"),
        (["-", "-o", "out", "--resume"], "standard input cannot be read twice"),
        (["FULL", "--resume"], "--resume has no effect without -o"),
        (["FULL", "--force"], "--force has no effect without -o"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    (tmp_path / "empty").touch()
    before = sorted(tmp_path.iterdir())
    assert main(["classify", "no-such-run", *words]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err and captured.out == "" and sorted(tmp_path.iterdir()) == before
    # A file that is to be written is announced before the input is opened.
    assert captured.err.count("\n") <= 1 + captured.err.startswith("out.1-of-2: share 1/2 of ")


def test_rounding_that_depends_on_the_batch_is_announced(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    words = ["classify", str(runs("classify")), "FULL", "-o", "out"]
    for precision, share, is_announced in (("bf16", "1/2", True), ("bf16", "1/1", False), ("fp32", "2/2", False)):
        assert main([*words, "--precision", precision, "--share", share]) == 0
        assert ("depend on their batch in the last digits" in capfd.readouterr().err) == is_announced


def test_torchrun_without_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["translate", "no-such-run", f"{tmp_path}/FULL"]) == 2
    assert "torchrun splits the lines into 2 shares, each with its file: add -o FILE" in capfd.readouterr().err
    assert main(["translate", "no-such-run"]) == 2
    assert "add -o FILE" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["translate", "--alignments"], "--alignments chooses heads by the first lines"),
        (["generate"], "without --seed a seed is drawn"),
    ],
)
def test_a_choice_that_differs_between_shares_is_refused(
    words: list[str],
    expected: str,
    trained: Path,
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    texts = ["--file", "FULL"] if words[0] == "generate" else ["FULL"]
    ref = trained / "run" if words[0] == "translate" else runs("generate")
    assert main([words[0], str(ref), *texts, *words[1:], "-o", "out", "--share", "1/2"]) == 2
    assert expected in capfd.readouterr().err and not [*tmp_path.glob("out*")]


def test_a_log_has_the_rate_of_this_command_and_the_time_left(capfd: pytest.CaptureFixture[str]) -> None:
    times: Iterator[float] = iter([0.0, 1.0, FIRST_LOG_SECONDS, 6.0, 10.0, 3610.0])
    log = ProgressLog("out.1-of-2: ", "lines", is_estimate=True, clock=lambda: next(times))
    log.num_skipped = 1000
    for done in (1010, 1050, 1060, 1100, 73200):
        log.show(done, 5000 if done < 5000 else 80000)
    assert capfd.readouterr().err.splitlines() == [
        "out.1-of-2: 1,050 of about 5,000 lines are done, 10.0/s, 6 min 35 s left",
        "out.1-of-2: 1,100 of about 5,000 lines are done, 10.0/s, 6 min 30 s left",
        "out.1-of-2: 73,200 of about 80,000 lines are done, 20.0/s, 5 min 40 s left",
    ]


def test_a_share_names_its_lines_by_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\tb\n" * 8 + b"c\n")
    output = AnswerFile(tmp_path / "out", tmp_path / "partial", FileShare(2, 2), can_resume=True)
    shown: list[InputLine] = []
    # A large file is not read whole before its first line is answered.
    with pytest.MonkeyPatch.context() as small, pytest.raises(InputError, match="in:9: expected two texts"):
        small.setattr("clearhead.apps.cli.outputs.OutputOptions.find_output", lambda *_: output)
        from clearhead.apps.cli.outputs import OutputOptions

        lines = TextInput.of(tmp_path / "in", OutputOptions(settings={"as_json": True}))
        answer_lines(lines, list, lambda line, _: shown.append(line), batch_size=None, paired=True)


def test_torchrun_gives_each_process_of_a_box_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert _local_device("auto") == "auto"
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert [_local_device(name) for name in ("auto", "cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:1", "cuda:0", "cpu"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert _local_device("auto") == "auto"
