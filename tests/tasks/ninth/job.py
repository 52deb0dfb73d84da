"""Commands of clearhead one after the other, in a process that finds the installed package of `test_package`.

    python -m tests.tasks.ninth.job INTERRUPTED COMMANDS

COMMANDS is a JSON list of command lines, each a list of words; "-c" and code stand for Python. Training is interrupted,
as by Ctrl-C, in the first step after the checkpoint INTERRUPTED is there. The last line of the output is a JSON list
with exit code, stdout and stderr of each command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from clearhead.spec.tasks.registry import find_task
from tests.training.quick import leave_out


def interrupt_after(checkpoint: Path) -> None:
    """Send this process SIGINT from the loss of the first batch behind a checkpoint."""
    training = find_task("rate").module("train").Training
    loss = training.loss

    def interrupt_loss(self, module, batch):  # type: ignore[no-untyped-def]
        if checkpoint.exists():
            training.loss = loss
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, module, batch)

    training.loss = interrupt_loss


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Run one command, and return its exit code and what it wrote."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        if words[0] == "-c":
            exec(words[1], {})
            return 0, out.getvalue(), err.getvalue()
        code = main(words)
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    leave_out(pytest.MonkeyPatch())
    interrupt_after(Path(sys.argv[1]))
    print(json.dumps([run(words) for words in json.loads(sys.argv[2])]))
