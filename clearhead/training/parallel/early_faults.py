"""Wrong input that a process finds before it joins the others, such as a file that only its machine lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from clearhead.base.errors import InputError
from clearhead.training.parallel.world import Process


@contextlib.contextmanager
def reporting_faults() -> Iterator[Process]:
    """Report wrong input inside a with block to the other processes, which this process joins later.

    Yields:
        this process.

    Raises:
        InputError: the environment variables or the input are wrong.
        Quiet: another process has told the user.
    """
    process = Process.here()
    try:
        yield process
    except InputError as error:
        if process.size == 1:
            raise
        # Only now: it loads PyTorch, for which a process alone need not wait.
        from clearhead.training.parallel.meeting import report_wrong_input

        raise report_wrong_input(process, error) from error
