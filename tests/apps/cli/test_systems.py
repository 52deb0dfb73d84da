"""Consoles of other systems: without UTF-8, without colours, 80 columns wide, and a system without POSIX calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
SAY = r"""
import sys
from clearhead.apps.cli.main import main

main(["--version"])
from clearhead.apps.cli.console import print_message, print_result

print_result("gr\u00fcn \u2713 \u6771\u4eac")
print_message("\u2713")
"""


def run(job: str, *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    return subprocess.run(
        [sys.executable, "-c", job, *words],
        cwd=ROOT, env=inherited | PLAIN | environment, capture_output=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        (None, "grün ✓ 東京"),
        ("utf-8", "grün ✓ 東京"),
        ("cp1252", "grün \\u2713 \\u6771\\u4eac"),
        ("ascii", "gr\\xfcn \\u2713 \\u6771\\u4eac"),
    ],
)
def test_every_character_is_written_in_every_encoding(encoding: str | None, expected: str) -> None:
    """A pipe gets UTF-8 whatever the system's code page is; an encoding that the user names is kept."""
    done = run(SAY, **({} if encoding is None else {"PYTHONIOENCODING": encoding}))
    written = done.stdout.decode(encoding or "utf-8").splitlines()
    assert done.returncode == 0 and written[1] == expected, done.stderr
    assert b"UnicodeEncodeError" not in done.stderr and b"\x1b" not in done.stdout + done.stderr


USE = """
import sys
from clearhead.apps.cli.main import main

run, text = sys.argv[1:]
for words in (["explain", run, "a m u"], ["heads", run, text], ["translate", run, text], ["inspect", run], ["doctor"]):
    assert main(words) == 0, words
"""


def test_commands_work_in_a_console_of_ascii(trained: Path, tmp_path: Path) -> None:
    """Their tables, marks and boxes have characters that it lacks; lines of the text end as on Windows."""
    text = tmp_path / "text"
    text.write_bytes(b"a m u\r\nb n v\r\n")
    done = run(USE, str(trained / "run"), str(text), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr.decode("ascii")
    assert b"\\u2500" in done.stdout and b"\r" not in done.stdout and b"\x1b" not in done.stdout + done.stderr


NARROW = """
import pty, sys
sys.stdout.isatty = lambda: True
from clearhead.apps.cli.heads import _print_table
from clearhead.interpret.maps.head_statistics import STATISTICS, HeadStatistics

numbers = {name: 29.58 for name in STATISTICS}
row = HeadStatistics("decoder.memory", 11, 7, **numbers, spread=numbers, patterns=("previous",))
_print_table([row])
"""


def test_a_table_of_heads_fits_80_columns_with_whole_numbers() -> None:
    done = run(NARROW.replace("import pty, sys", "import sys"), PYTHONIOENCODING="utf-8")
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr
    assert max(map(len, lines)) <= 80 and "decoder.memory" in done.stdout.decode()
    assert sum(line.count("29.58") for line in lines) == 8


WITHOUT = """
import json, os, signal, subprocess, sys, multiprocessing, torch, psutil, huggingface_hub, asyncio, numpy
import filelock, platform, pydantic, rich.console, sysconfig, tokenizers, typer

sysconfig.get_config_vars(), platform.platform(), torch.get_num_threads()

signals = [name for name in dir(signal) if name[:3] == "SIG" and name not in
           ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV", "SIGBREAK", "SIG_DFL", "SIG_IGN", "SIGKILL")]
calls = ["geteuid", "getuid", "getgid", "getpgid", "killpg", "setsid", "mkfifo", "register_at_fork", "statvfs",
         "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "sysconf", "getloadavg", "uname", "chown", "fchmod"]
for owner, names in ((signal, signals), (os, calls)):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
sys.platform, os.environ["CLEARHEAD_KERNELS"] = "win32", "auto"
from clearhead.apps.cli.main import main

# What needs a file of /proc or a signal of POSIX at import or in use would end here.
assert main(["translate", *sys.argv[1:]]) == 0
assert main(["doctor", "--json"]) == 0
"""


def test_a_system_without_posix_calls_translates(trained: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a m u\r\nb n v\r\n")
    done = run(WITHOUT, str(trained / "run"), str(text))
    assert done.returncode == 0, done.stderr.decode()
    *lines, last = done.stdout.decode().splitlines()
    assert len(lines) == 2
    assert json.loads(last)["kernels"]["inference"] == {"served": False, "why": "the kernels need Linux"}


SPAWN = """
import multiprocessing, sys
import clearhead

def translated(_):
    return clearhead.load(sys.argv[1]).translate("a m u")

if __name__ == "__main__":
    here = translated(None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(translated, [None]) == [here]
"""


def test_a_model_is_used_in_a_process_that_was_started_by_spawn(trained: Path, tmp_path: Path) -> None:
    """Start processes as on macOS and Windows: they get nothing from the parent but the sent objects."""
    script = tmp_path / "job.py"
    script.write_text(SPAWN, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(trained / "run")],
        env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
