"""Chat templates: render a chat as the text that a model was trained on, in a sandboxed process."""

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
# Most characters that a template may add to a chat; it may also repeat the chat once.
MOST_ADDED = 2**15

Message = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class ChatTemplate(Printed):
    """Chat templates of a tokenizer.

    Args:
        templates: name -> template; "default" is used if no name is given.
        tokens: name -> special token that a template may use, such as "bos_token".
    """

    templates: Mapping[str, str]
    tokens: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Read the chat templates of a folder; template files take precedence over the configuration.

        Args:
            folder: folder of the tokenizer.
            config: content of its `tokenizer_config.json`.

        Returns:
            The templates, or None if the folder has none.

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
        """Render a chat as text.

        Args:
            messages: messages with a "role" and a "content", at least one.
            name: name of the template. None means "default".
            starts_answer: True if the text ends with the start of the model's answer.

        Raises:
            InputError: the template does not exist, or a message has no role or content. The template rejects the chat,
                needs too much time or memory, or renders far more text than the chat has.
        """
        wanted = self.templates.get(name or _DEFAULT)
        if wanted is None:
            known = ", ".join(sorted(self.templates))
            raise InputError(f"the model has no chat template '{name or _DEFAULT}'; it has: {known}")
        faults = [
            f"message {number} needs a role and a content, got: {', '.join(map(str, message)) or 'nothing'}"
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
        # The child process gets JSON, so that the template sees only plain data.
        text: str = _worker().ask([wanted, values, longest], "the chat template", SECONDS)["text"]
        return text


@cache
def _worker() -> ChildProcess:
    return ChildProcess(Path(__file__).with_name("template_worker.py"), ("jinja2", "markupsafe"))


def _templates(entry: str | list[dict[str, str]] | None) -> dict[str, str]:
    """Return the templates of a configuration entry: one text, or a list of named templates."""
    if isinstance(entry, str):
        return {_DEFAULT: entry}
    return {item["name"]: item["template"] for item in entry or ()}
