"""Exit codes of the program as a shell sees them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clearhead.apps.cli import main as program
from clearhead.base.errors import InputError, RunFailure
from tests.apps.cli.tiny_run import write_run_file

pytestmark = pytest.mark.slow
# A shell's background job, as a test run may be, starts with SIGINT ignored, and so would what it starts.
LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{LISTEN}; import sys; from clearhead.apps.cli.main import main; sys.exit(main())"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("wrong"), 2),
        (RunFailure("failed"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device"), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_every_failure_is_a_sentence(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(ref: str) -> None:
        raise error

    monkeypatch.setattr("clearhead.apps.cli.inspect.read_reference", fail)
    assert program.main(["inspect", "x"]) == code
    captured = capfd.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err and captured.err.count("\n") == 1
    if isinstance(error, OSError):
        assert captured.err == "clearhead: the output cannot be written: No space left on device\n"
    program.main(["inspect", "x", "--debug"])
    assert ("Traceback" in capfd.readouterr().err) == (code != 130)


def start_training(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a training that would take for ever, and wait until it steps."""
    file = write_run_file(folder, train="steps = 1000000\nvalidate_every = 5\nwarmup = 5\n")
    process = subprocess.Popen(
        [*COMMAND, "train", str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 2:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"training did not start: {process.communicate()}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_resume(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start_training(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert "--resume" in err and "Traceback" not in err and out == ""
    assert program.main(["train", str(tmp_path / "run"), "--resume", "train.steps=1"]) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_translating(number: signal.Signals, code: int, trained: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "translate", f"{trained}/run", "--beam-size", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"a m u\n")
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code and b"Traceback" not in err


def test_a_reader_that_goes_away_is_no_traceback(trained: Path) -> None:
    command = " ".join(f"'{word}'" for word in COMMAND)
    text = "a m u\\n" * 3000
    line = f"printf '{text}' | {command} translate '{trained}/run' --beam-size 1 | head -1"
    process = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=600)
    assert "Traceback" not in process.stderr and process.stdout.count("\n") == 1
