"""Chat templates: a chat as the text that a model was trained on, rendered by a process with limits."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from clearhead.errors import InputError
from clearhead.files import read_model_text, refuse_link_out
from clearhead.printing import Printed
from clearhead.text.token_roles import content_of

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_DEFAULT = "default"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Nothing of the imports is garbage; not to look for it saves a quarter of the time.
_WORKER = (
    "import gc, sys; gc.disable(); sys.path += sys.argv[1:]; import template_worker as worker; "
    "gc.enable(); worker.main()"
)
# By the clock; where others keep the processor, it may show so many times more.
SECONDS, SECONDS_TO_START, CLOCK = 10.0, 60.0, 10
# Characters of its own that a template may put around a chat, which it may also repeat once.
MOST_ADDED = 2**15

Message = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class ChatTemplate(Printed):
    """The chat templates of a tokenizer.

    Args:
        templates: by name; "default" is used where none is named.
        tokens: special tokens that a template may use, such as "bos_token".
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Read the templates of a folder: files of their own win over those in the configuration.

        Args:
            folder: holds the tokenizer.
            config: the content of its `tokenizer_config.json`.

        Returns:
            None where there are none.

        Raises:
            InputError: a template is not text.
        """
        found = _templates(config.get("chat_template"))
        if os.path.lexists(folder / _FILE):
            found = {_DEFAULT: read_model_text(folder / _FILE, what="a chat template")}
        refuse_link_out(folder / _MORE, folder)
        if (folder / _MORE).is_dir():
            found |= {
                path.stem: read_model_text(path, what="a chat template")
                for path in sorted((folder / _MORE).glob("*.jinja"))
            }
        tokens = {key: text for key in _TOKENS if (text := content_of(config.get(key))) is not None}
        return cls(found, tokens) if found else None

    def render(self, messages: Sequence[Message], *, name: str | None = None, starts_answer: bool = True) -> str:
        """Return the text of a chat.

        Args:
            messages: each with a "role" and a "content"; at least one.
            name: which of several templates.
            starts_answer: whether the text ends with the start of the model's answer.

        Raises:
            InputError: no such template, a message without role or content, a chat that the template rejects, or a
                template that takes too much time or memory, or makes far more text than the chat has.
        """
        wanted = self.templates.get(name or _DEFAULT)
        if wanted is None:
            known = ", ".join(sorted(self.templates))
            raise InputError(f"there is no chat template named '{name or _DEFAULT}'; the model has: {known}")
        faults = [
            f"message {number} needs a role and a content, it has: {', '.join(map(str, message)) or 'nothing'}"
            for number, message in enumerate(messages, start=1)
            if not {"role", "content"} <= set(message)
        ]
        if not messages:
            faults = ["a chat needs at least one message"]
        if faults:
            raise InputError.from_faults(faults, subject="the chat")
        values = {
            **self.tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": starts_answer,
        }
        longest = MOST_ADDED + 2 * len(json.dumps(values["messages"], ensure_ascii=False))
        return _worker().render(wanted, values, longest)


@cache
def _worker() -> _Worker:
    return _Worker()


class _Worker:
    """The process that renders templates: started for the first one, and again after one that did not end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def render(self, template: str, values: Mapping[str, Any], longest: int) -> str:
        """Return the text of a template.

        Args:
            template: of a stranger.
            values: what it may use; they pass through JSON, so that it sees plain data only.
            longest: characters of the text.

        Raises:
            InputError: it is faulty, refuses its values, or takes too much time or memory.
        """
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    # Without the start files of site-packages, which may import anything.
                    [sys.executable, "-I", "-S", "-c", _WORKER, *_paths()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._answer(b"", SECONDS_TO_START)
            answer = self._answer(json.dumps([template, values, longest]).encode() + b"\n", SECONDS)
        if "fault" in answer:
            raise InputError(f"the chat template {answer['fault']}")
        text: str = answer["text"]
        return text

    def _answer(self, request: bytes, seconds: float) -> dict[str, str]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "it was started"
        done = threading.Event()
        threading.Thread(target=_kill_late, args=(process, seconds, done), daemon=True).start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            done.set()
        if not line.endswith(b"\n"):
            self._end()
            raise InputError(f"the chat template took more than {seconds:g} seconds, or all the memory it may have")
        answer: dict[str, str] = json.loads(line)
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _kill_late(process: subprocess.Popen[bytes], seconds: float, done: threading.Event) -> None:
    """Kill a process that takes too long: by the clock, and half as long of the processor, which others may keep."""
    end = time.monotonic() + CLOCK * seconds
    if done.wait(seconds / 2):
        return
    with contextlib.suppress(psutil.Error):
        watched = psutil.Process(process.pid)
        begun = sum(watched.cpu_times()[:2])
        while sum(watched.cpu_times()[:2]) - begun < seconds / 2 and time.monotonic() < end and not done.is_set():
            done.wait(seconds / 20)
    if not done.is_set():
        process.kill()


def _paths() -> list[str]:
    """Return the folders of jinja2, what it imports and the worker, without importing them."""
    found = [find_spec(name) for name in ("jinja2", "markupsafe")]
    return [*(str(Path(one.origin).parents[1]) for one in found if one and one.origin), str(Path(__file__).parent)]


def _templates(entry: str | list[dict[str, str]] | None) -> dict[str, str]:
    """Return the templates of a configuration: one text, or a list of named ones."""
    if isinstance(entry, str):
        return {_DEFAULT: entry}
    return {one["name"]: one["template"] for one in entry or ()}
