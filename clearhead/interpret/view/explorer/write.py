"""Write a page as one HTML file with its scripts, styles and data; the file loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.base.files import replacing
from clearhead.interpret.view.explorer.data import Page
from clearhead.interpret.view.explorer.encode import Encoder

FIRST_MODULE, LIVE_MODULE = "app.js", "live.js"
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)
DATA = "<!-- data -->"
# Texts of the user are inserted as text only. If that ever failed, this policy would block all other scripts and loads.
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
# A live page may also request data from the program that serves it.
LIVE_POLICY = POLICY + "; connect-src 'self'"


def write_page(page: Page, path: Path) -> None:
    """Write a page as one HTML file, with one layer of weights in memory at a time.

    Args:
        page: content of the page.
        path: file to write, atomically; missing folders are created.

    Raises:
        InputError: the page is too large for a browser, or the file cannot be written.
    """
    parts = page_parts(page)
    first = next(parts)  # checks the input before any file is created
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(first)
            file.writelines(parts)
    except OSError as error:
        raise InputError(f"the page {path} cannot be written: {error.strerror}") from None


def page_html(page: Page) -> str:
    """Return a page as the text of one HTML document.

    Args:
        page: content of the page.

    Raises:
        InputError: the page is too large for a browser.
    """
    return "".join(page_parts(page))


def frame_html(page: Page, *, height: int) -> str:
    """Return a page in an iframe, for the output of a notebook cell.

    Args:
        page: content of the page.
        height: height of the iframe, in pixels.

    Raises:
        InputError: the page is too large for a browser.
    """
    document = html.escape(page_html(page))
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe title="attention explorer" style="{style}" srcdoc="{document}"></iframe>'


def page_parts(page: Page) -> Iterator[str]:
    """Yield the HTML document piece by piece; the input is checked before the first piece."""
    encoder = Encoder()
    data = escaped_json(encoder.page(page))
    before, after = template().split(DATA)
    yield f"{before}{json_element('data', data)}"
    for number, text in enumerate(encoder.texts()):
        yield f'<script type="text/plain" id="blob-{number}">{text}</script>\n'
    yield after


def live_html(title: str, facts: object) -> str:
    """Return the HTML document of a live page, which requests its data from the program that serves it.

    Args:
        title: heading of the page.
        facts: first request of the page, and facts about the model, as JSON values.
    """
    empty = {"title": title, "facts": [], "timeline": False, "samples": [], "spans": []}
    elements = {"data": empty, "model": facts}
    return template(is_live=True).replace(
        DATA, "".join(json_element(name, escaped_json(content)) for name, content in elements.items())
    )


def json_element(name: str, data: str) -> str:
    """Return an HTML element with JSON data from `escaped_json`."""
    return f'<script type="application/json" id="{name}">{data}</script>\n'


def escaped_json(content: object) -> str:
    """Return JSON in ASCII without characters that HTML treats as markup."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def template(*, is_live: bool = False) -> str:
    """Return the HTML of the explorer without data: markup, security policy, styles and scripts."""
    if is_live:
        return document(LIVE_MODULE, ("style.css", "live.css"), policy=LIVE_POLICY)
    return document(FIRST_MODULE, ("style.css",))


def document(
    first: str, styles: Sequence[str], *, policy: str = POLICY, read: Callable[[str], str] | None = None
) -> str:
    """Return an HTML document without its data.

    Args:
        first: JavaScript module to run.
        styles: style sheets, in order.
        policy: content security policy.
        read: function that returns the text of a module or a style sheet by its name. None means the files of the
            explorer.
    """
    read = read or source_text
    style, script = "".join(map(read, styles)), bundle(first, read)
    places = {"policy": policy.format(script=digest(script), style=digest(style)), "style": style, "script": script}
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: places[match[1]], source_text("index.html"))


def bundle(first: str = FIRST_MODULE, read: Callable[[str], str] | None = None) -> str:
    """Join a JavaScript module and its imports to one script; each has a separate scope and follows its imports."""
    read = read or source_text
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = read(name)
        for _, imported in IMPORT.findall(text):
            if imported not in texts:
                add(imported)
        exported = ", ".join(EXPORT.findall(text))
        body = EXPORT.sub(
            lambda match: match[0].removeprefix("export "), IMPORT.sub(r'const {\1} = modules["\2"];\n', text)
        )
        texts[name] = f'modules["{name}"] = (() => {{\n{body}return {{ {exported} }};\n}})();\n'

    add(first)
    return "const modules = {};\n" + "".join(texts.values())


def source_text(name: str) -> str:
    """Return the text of a script, a style sheet or the markup of the explorer."""
    return (files("clearhead.interpret.view.explorer") / "page" / name).read_text("utf-8")


def digest(text: str) -> str:
    """Return the hash with which the security policy allows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
