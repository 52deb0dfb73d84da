"""Ctrl-C and SIGTERM: end a command within a second, even during a long call into a library."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

# Seconds in which a stopped command may close its files.
GRACE = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """Raised when SIGINT or SIGTERM stops a command; a BaseException, which `except Exception` does not catch.

    Args:
        number: the number of the signal.

    Attributes:
        done: the progress of the command as text; empty if there is none to report.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.done = ""

    @property
    def exit_code(self) -> int:
        """The exit code for a program that a signal ended."""
        return 128 + self.number

    def __str__(self) -> str:
        """Return the message for the user."""
        sentence = "clearhead: interrupted" if self.number == signal.SIGINT else "clearhead: terminated"
        return f"{sentence}; {self.done}" if self.done else sentence


class StopOnSignal:
    """Context manager that raises `Stopped` at SIGINT and SIGTERM; handlers set inside, such as by training, win.

    Python runs signal handlers between two instructions, so a long call into a library delays them. Therefore a thread
    ends the process if the with block has not ended `GRACE` seconds after the signal.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._hook_before = sys.unraisablehook
        self._wakeup_before = -1
        self._sockets: tuple[socket.socket, ...] = ()

    def __enter__(self) -> StopOnSignal:
        # Only the main thread can install handlers. A background job of a shell keeps ignoring SIGINT.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._raise)
        self._sockets = receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sockets:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        sys.unraisablehook = self._hook_before
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # The thread then reads the end of its input and closes the other socket.
        self._sockets[1].close()
        if self.received is not None and error is None:
            raise Stopped(self.received)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        # An exception inside a destructor is only reported; the thread then ends the process.
        sys.unraisablehook = lambda unraisable: None
        raise Stopped(self.received)

    def _watch(self, receiver: socket.socket) -> None:
        with receiver:
            while number := receiver.recv(1):
                if signal.getsignal(number[0]) == self._raise:
                    self._end(receiver, number[0])

    def _end(self, receiver: socket.socket, number: int) -> None:
        """End the process after `GRACE` seconds, unless the with block ends first."""
        receiver.settimeout(GRACE)
        try:
            while receiver.recv(1):
                pass
        except TimeoutError:
            os.write(2, f"{Stopped(number)}\n".encode())
            os._exit(128 + number)
