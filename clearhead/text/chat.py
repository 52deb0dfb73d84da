"""Chat templates: a chat as the text that a model was trained on, rendered in a sandbox.

Source: the chat templates of the transformers library, with the same environment and extensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser

from clearhead.errors import InputError
from clearhead.files import read_model_text
from clearhead.printing import Printed
from clearhead.text.token_roles import content_of

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_DEFAULT = "default"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

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
        found = _templates(folder, config.get("chat_template"))
        if (folder / _FILE).is_file():
            found = {_DEFAULT: read_model_text(folder / _FILE, what="a chat template")}
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
            InputError: no such template, a message without role or content, or a chat that the template rejects.
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
        # Values pass through JSON, so that a template sees plain data only.
        plain = json.loads(json.dumps([dict(message) for message in messages]))
        try:
            return (
                _environment()
                .from_string(wanted)
                .render(**self.tokens, messages=plain, tools=None, documents=None, add_generation_prompt=starts_answer)
            )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"the chat template is faulty in line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses this chat: {error.message or error}") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(f"the chat template cannot be run on this chat: {error}") from None


def _templates(folder: Path, entry: object) -> dict[str, str]:
    """Return the templates of a configuration: one text, or a list of named ones."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {_DEFAULT: entry}
    if isinstance(entry, list) and all(isinstance(one, dict) and {"name", "template"} <= set(one) for one in entry):
        return {str(one["name"]): str(one["template"]) for one in entry}
    raise InputError(f"{folder}: chat_template must be a text, or a list of records with name and template")


class _Answers(jinja2.ext.Extension):
    """The tag {% generation %} around what the model wrote, which does not change the text."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace of a template, closed to names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
