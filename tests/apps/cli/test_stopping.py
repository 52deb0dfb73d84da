"""Ctrl-C and SIGTERM: wherever they arrive, the program ends within a second, with a sentence and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from clearhead.apps.cli.stopping import StopOnSignal, Stopped

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
# A shell's background job, as a test run may be, starts with SIGINT ignored, and so would what it starts.
LISTEN = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"


@pytest.mark.parametrize("number", CODES)
def test_a_signal_raises_and_the_handlers_come_back(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the block may take longer to end, and the process that would be ended is that of the tests.
    monkeypatch.setattr("clearhead.apps.cli.stopping.GRACE", 60)
    before, hook = signal.signal(number, signal.default_int_handler), sys.unraisablehook
    try:
        with pytest.raises(Stopped) as stopped, StopOnSignal() as signals:
            os.kill(os.getpid(), number)
            time.sleep(5)
        assert (signals.received, stopped.value.exit_code) == (number, CODES[number])
        assert signal.getsignal(number) is signal.default_int_handler and sys.unraisablehook is hook
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopOnSignal() as signals:
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), CODES.items())
@pytest.mark.parametrize("body", ["hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)", "Held()"])
def test_a_signal_that_is_held_up_or_swallowed(number: int, code: int, body: str) -> None:
    held = "class Held:\n    def __del__(self):\n        time.sleep(60)\n"
    script = f"{LISTEN}import hashlib, time\nfrom clearhead.apps.cli.stopping import StopOnSignal\n{held}"
    script += f"with StopOnSignal():\n    print('ready', flush=True)\n    {body}\n    {body}\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    started = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code and err in ("clearhead: interrupted\n", "clearhead: terminated\n")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("module", ["clearhead.apps.cli.main", "clearhead.checkpoints.reference"])
def test_ctrl_c_while_the_program_is_imported(module: str) -> None:
    script = f"""{LISTEN}
module, sys.argv[1:] = sys.argv[1], ["evaluate", "x"]

class Finder:
    def find_spec(name, path, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
from clearhead.__main__ import main
sys.exit(main())
"""
    process = subprocess.run([sys.executable, "-c", script, module], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "clearhead: interrupted\n")
