"""Main loop of a child process with limited memory: it reads requests and writes answers, as lines of JSON.

`child_process.py` starts this file outside the package, where it can import only Python's standard library.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

MEGABYTES, ORPHAN_SECONDS = 512, 60


def run(answer: Callable[[Any], dict[str, Any]]) -> None:
    """Answer requests until the input ends.

    Args:
        answer: function that returns the answer to one request.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    # Write answers to the file descriptor itself, so that output of `answer` is no answer.
    with open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False) as answers:
        for line in sys.stdin:
            _set_limits()
            try:
                result = answer(json.loads(line))
            except MemoryError:
                result = {"fault": f"needs more than the {MEGABYTES} MB that it may have"}
            answers.write(json.dumps(result) + "\n")
            answers.flush()


def _set_limits() -> None:
    # Windows has no such limits; there only the parent limits the time.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES * 2**20, MEGABYTES * 2**20))
        # This ends a child whose parent was killed.
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + ORPHAN_SECONDS, hard))
