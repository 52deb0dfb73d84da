"""Cases of the fuzz: copy, change and use a folder, in a process with limits of time and memory."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import transformers

import clearhead
from clearhead.base.errors import InputError, RunFailure
from tests.fuzz.folders import KINDS
from tests.fuzz.mutations import mutate
from tests.fuzz.uses import draw_use, prepare

# Limits of a case: seconds of processor time, seconds on the clock (for cases that wait), and memory.
SECONDS, CLOCK_SECONDS, MEGABYTES = 20, 240, 1500

LIBRARY_CLASSES = (
    "AutoTokenizer", "PreTrainedTokenizerFast", "LlamaForCausalLM", "MarianMTModel", "MarianTokenizer", "BertModel",
    "BertTokenizer",
)  # fmt: skip


class TooLong(BaseException):
    """A case that did not end in time; no handler of the library may catch it."""


@dataclass
class Findings:
    """Results of the cases: their number by outcome, and one case for each fault, printed when it is found."""

    outcomes: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    files: int = 0

    def report(self) -> str:
        """Return the results as lines of text."""
        lines = [f"{count:7,}  {name}" for name, count in self.outcomes.most_common()]
        lines += [f"{count:7,}  of {name}" for name, count in sorted(self.uses.items())]
        lines.append(
            f"each of {self.files} files was changed {sum(self.outcomes.values()) // max(1, self.files)} times"
        )
        lines.append(f"the slowest took {self.slowest[0]:.1f} s: {self.slowest[1]}")
        return "\n".join(lines)


def fuzz(folder: Path, seed: int, findings: Findings, *, first: int = 0) -> Iterator[int]:
    """Run one case after another without end, and yield the number of each.

    Every file of every kind of folder is changed once, in an order that the seed determines, before any is changed for
    the second time.

    Args:
        folder: an empty folder.
        seed: the seed of all cases; each case has a separate generator, so that it can be repeated alone.
        findings: collects the results.
        first: the number of the first case.
    """
    _import_all()
    # Training starts threads, which forked processes would lack, so make the folders in a separate process.
    _in_a_process(lambda: [make(folder / name) for name, make in KINDS.items()] and None, folder, seconds=None)
    files = sorted((kind, name) for kind in KINDS for name in _files(folder / kind))
    findings.files = len(files)
    work = folder / "work"
    number = first
    while True:
        order = random.Random(f"{seed} round {number // len(files)}").sample(files, len(files))
        kind, name = order[number % len(files)]
        draw = random.Random(f"{seed} {number}")
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(folder / kind, work / "case")
        prepare(work)
        changed = mutate(work / "case", name, draw)
        words, use = draw_use(work, kind, draw)
        what = f"case {number}: {kind}/{changed}: {words}"
        begun = time.process_time() + psutil.Process().cpu_times().children_user
        outcome, message = _in_a_process(use, work, seconds=SECONDS)
        took = time.process_time() + psutil.Process().cpu_times().children_user - begun
        findings.slowest = max(findings.slowest, (took, what))
        findings.outcomes[outcome] += 1
        findings.uses[words.partition(" ")[0]] += 1
        if (work / "outside").read_text() != "from outside" or (work / "escaped").exists():
            outcome, message = "something outside was changed", ""
        if message is not None and outcome not in findings.faults:
            findings.faults[outcome] = f"{what}: {message}"
            print(f"FINDING {outcome}\n  {findings.faults[outcome]}\n", flush=True)
        yield number
        number += 1


def _files(folder: Path) -> list[str]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith(".png"))


def _import_all() -> None:
    """Import the library once, so that cases need not import it."""
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(clearhead.__path__, "clearhead."):
        if not module.name.endswith(("__main__", "template_worker")):
            importlib.import_module(module.name)
    # transformers imports its classes at their first use.
    for name in LIBRARY_CLASSES:
        getattr(transformers, name)


def _in_a_process(use: Callable[[], None], folder: Path, *, seconds: int | None) -> tuple[str, str | None]:
    """Call a function in a separate process; return the outcome, and the message of a finding.

    Args:
        use: the function.
        folder: the current directory of the process, with the files `stdout` and `stderr` for its output.
        seconds: the limit of processor time. None means no limits, and that the function must not fail.
    """
    outcome = folder / "outcome"
    for name in ("stdout", "stderr", "outcome"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).touch()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            _redirect(folder)
            if seconds is not None:
                _limit(seconds)
            outcome.write_text(json.dumps(_outcome(use)))
        finally:
            os._exit(0)
    status = _wait_for(process)
    text = outcome.read_text()
    assert seconds is not None or text.startswith('["usable"'), (text, (folder / "stderr").read_text())
    if not text:
        return f"a process that ended with {status}", (folder / "stderr").read_text(errors="replace")[-300:]
    name, message = json.loads(text)
    return name, message


def _wait_for(process: int) -> str:
    """Wait for a process up to `CLOCK_SECONDS`, and return a description of its end."""
    end, pause = time.monotonic() + CLOCK_SECONDS, 0.001
    while time.monotonic() < end:
        ended_pid, status = os.waitpid(process, os.WNOHANG)
        if ended_pid:
            code = os.waitstatus_to_exitcode(status)
            return signal.Signals(-code).name if code < 0 else f"code {code}"
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return f"no end within {CLOCK_SECONDS} s"


def _redirect(folder: Path) -> None:
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # Those of pytest would keep what is written.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _limit(seconds: int) -> None:
    signal.signal(signal.SIGXCPU, _too_long)
    # Python handles no signal inside a hanging library call: the hard limit kills it.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, 3 * seconds))
    most = psutil.Process().memory_info().vms + MEGABYTES * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _too_long(number: int, frame: object) -> None:
    raise TooLong


def _outcome(use: Callable[[], None]) -> tuple[str, str | None]:
    try:
        use()
    except (InputError, RunFailure) as error:
        return type(error).__name__, None
    except BaseException as error:  # noqa: BLE001 every other exception is a finding
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/clearhead/" in f.filename]
        places = [f"{frame.filename.rpartition('/clearhead/')[2]}:{frame.lineno}" for frame in reversed(frames)]
        return f"{type(error).__name__} at {next(iter(places), '')}", f"{str(error)[:300]}\n  {' < '.join(places[:8])}"
    return "usable", None
