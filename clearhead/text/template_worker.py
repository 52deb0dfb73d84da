"""Child process that renders untrusted chat templates in jinja2's sandbox.

`chat.py` starts it with the limits of `child_process.py`. It imports only jinja2 and the standard library.

Source: the chat templates of the transformers library, with the same environment and extensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.parser import Parser

LONGEST_FORMAT = 256


class _GenerationTag(jinja2.ext.Extension):
    """Jinja2 tag {% generation %} around the text of the model; it does not change the output."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the template nodes between the tags {% generation %} and {% endgeneration %}."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Namespace of a template; it refuses names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
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
    """Convert a value to JSON without escaping for HTML, unlike jinja2's built-in filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    # The C library allocates up to 256 times the length of the format.
    if len(form) > LONGEST_FORMAT:
        raise jinja2.TemplateError(f"a date format must have at most {LONGEST_FORMAT} characters")
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def _compile_template(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def answer(request: list[Any]) -> dict[str, str]:
    """Render the template of a request, whose items are the arguments of `render`."""
    return render(*request)


def render(template: str, values: Mapping[str, Any], longest: int) -> dict[str, str]:
    """Render a template; return {"text": ...}, or {"fault": ...} with the end of an error message.

    Args:
        template: source of the template.
        values: variables of the template.
        longest: maximum number of characters of the rendered text.
    """
    try:
        text = _compile_template(template).render(**values)
    except jinja2.TemplateSyntaxError as error:
        return {"fault": f"has a syntax error in line {error.lineno}: {error.message}"}
    except jinja2.TemplateError as error:
        return {"fault": f"refuses this chat: {error.message or error}"}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 a template can make its evaluator raise anything
        return {"fault": f"cannot be run on this chat: {error}"}
    if len(text) > longest:
        return {"fault": f"makes {len(text):,} characters of this chat, but at most {longest:,} are allowed"}
    return {"text": text}
