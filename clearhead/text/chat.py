"""Chat templates: a chat as the text that a model was trained on, rendered by a process with limits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from clearhead.base.child_process import ChildProcess
from clearhead.base.errors import InputError
from clearhead.base.files import read_model_text, refuse_link_out
from clearhead.base.printing import Printed
from clearhead.text.token_roles import content_of

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_DEFAULT = "default"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

SECONDS = 10.0
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
        templates = _templates(config.get("chat_template"))
        if os.path.lexists(folder / _FILE):
            templates = {_DEFAULT: read_model_text(folder / _FILE, what="a chat template")}
        refuse_link_out(folder / _MORE, folder)
        if (folder / _MORE).is_dir():
            templates |= {
                path.stem: read_model_text(path, what="a chat template")
                for path in sorted((folder / _MORE).glob("*.jinja"))
            }
        tokens = {key: text for key in _TOKENS if (text := content_of(config.get(key))) is not None}
        return cls(templates, tokens) if templates else None

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
        # Through JSON, so that the template sees plain data only.
        text: str = _worker().ask([wanted, values, longest], "the chat template", SECONDS)["text"]
        return text


@cache
def _worker() -> ChildProcess:
    return ChildProcess(Path(__file__).with_name("template_worker.py"), ("jinja2", "markupsafe"))


def _templates(entry: str | list[dict[str, str]] | None) -> dict[str, str]:
    """Return the templates of a configuration: one text, or a list of named ones."""
    if isinstance(entry, str):
        return {_DEFAULT: entry}
    return {item["name"]: item["template"] for item in entry or ()}
