"""The cases of the fuzz: a folder is copied, changed and used, under a limit of time and of memory."""

from __future__ import annotations

import faulthandler
import random
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import clearhead as ch
from clearhead.compare.runs import read_run
from clearhead.errors import InputError, RunFailure
from tests.fuzz.folders import KINDS
from tests.fuzz.mutations import mutate

SECONDS, HARD_SECONDS, MEGABYTES = 20, 120, 1500


class TooLong(BaseException):
    """A case that did not end in time; no handler of the library may catch it."""


@dataclass
class Findings:
    """What came out of the cases: their number by outcome, and one case for each different fault."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)

    def report(self) -> str:
        """Return both for a person."""
        counts = [f"{count:7,}  {name}" for name, count in self.outcomes.most_common()]
        return "\n".join([*counts, *(f"\nFINDING {place}\n  {case}" for place, case in self.faults.items())])


def fuzz(folder: Path, seed: int, found: Findings, *, first: int = 0) -> Iterator[int]:
    """Try one case after another without end, and yield its number.

    Args:
        folder: an empty one.
        seed: of all cases; each has its own generator, so that it can be tried alone.
        found: takes what comes out.
        first: number of the first case.
    """
    for name, make in KINDS.items():
        make(folder / name)
    number = first
    while True:
        draw = random.Random(f"{seed} {number}")
        kind = draw.choice(sorted(KINDS))
        case = folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(folder / kind, case)
        what = f"case {number}: {kind}/{mutate(case, draw)}"
        outcome, message = _limited(case)
        found.outcomes[outcome] += 1
        if message is not None:
            found.faults.setdefault(outcome, f"{what}: {message}")
        yield number
        number += 1


def _limited(case: Path) -> tuple[str, str | None]:
    """Use a folder; return the outcome, and the message of a finding."""
    before = psutil.Process().memory_info().vms
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (before + MEGABYTES * 2**20, limits[1]))
    handler = signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    # What hangs inside a library hears no signal.
    faulthandler.dump_traceback_later(HARD_SECONDS, exit=True)
    try:
        use(case)
    except (InputError, RunFailure) as error:
        return type(error).__name__, None
    except BaseException as error:  # every other kind is what is looked for
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [f for f in traceback.extract_tb(sys.exc_info()[2]) if "/clearhead/" in f.filename]
        last = frames[-1] if frames else None
        place = "" if last is None else f"{last.filename.partition('/clearhead/')[2]}:{last.lineno}"
        return f"{type(error).__name__} at {place}", str(error)[:150]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return "usable", None


def _alarm(number: int, frame: object) -> None:
    raise TooLong


def use(folder: Path) -> None:
    """Load a model and let it do what it is for."""
    if (folder / "checkpoints").is_dir():
        read_run(folder)
    model = ch.load(folder, device="cpu", precision="fp32")
    text = "the cat sat on a mat"
    match model.task.kind:
        case "embed":
            model.embed([text])
        case "translate":
            model.translate(text)
        case "classify":
            model.classify(text)
        case _:
            model.generate(text, max_new_tokens=3)
            has_chat = model.hf_checkpoint is not None and model.hf_checkpoint.tokenizers.chat is not None
            model.generate(text, chat=has_chat, max_new_tokens=3, temperature=0)
