"""Ctrl-C and SIGTERM: a command leaves within a second, even from a long call into a library."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

# Seconds in which a command that was stopped may close its files.
GRACE = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """SIGINT or SIGTERM ended a command; not an Exception, so that no handler of exceptions catches it.

    Args:
        number: the signal.

    Attributes:
        done: what the command has done, in words; empty where there is nothing to say.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.done = ""

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended."""
        return 128 + self.number

    def __str__(self) -> str:
        """Return the sentence for the user."""
        sentence = "clearhead: interrupted" if self.number == signal.SIGINT else "clearhead: terminated"
        return f"{sentence}; {self.done}" if self.done else sentence


class StopOnSignal:
    """Raises `Stopped` in its with block at SIGINT and SIGTERM; handlers that are set inside, as by training, go first.

    Python runs a handler between two of its own instructions, which a long call into a library holds up. So a thread
    ends the process where the block has not ended `GRACE` seconds after the signal.

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
        # Only the main thread can install handlers. A shell's background job ignores SIGINT, and goes on doing so.
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
        # The thread reads the end of its input, and closes the other socket.
        self._sockets[1].close()
        if self.received is not None and error is None:
            raise Stopped(self.received)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        # What is raised inside a destructor is only reported, and the block goes on until the thread ends it.
        sys.unraisablehook = lambda unraisable: None
        raise Stopped(self.received)

    def _watch(self, receiver: socket.socket) -> None:
        with receiver:
            while number := receiver.recv(1):
                if signal.getsignal(number[0]) == self._raise:
                    self._end(receiver, number[0])

    def _end(self, receiver: socket.socket, number: int) -> None:
        """End the process, unless the with block ends first."""
        receiver.settimeout(GRACE)
        try:
            while receiver.recv(1):
                pass
        except TimeoutError:
            os.write(2, f"{Stopped(number)}\n".encode())
            os._exit(128 + number)
