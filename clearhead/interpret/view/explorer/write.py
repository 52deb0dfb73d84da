"""The page as one file: its modules, its style and its data in one HTML document that loads nothing else."""

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
# Names that a text gives become text only. Should that ever fail, the browser still runs and loads nothing but these.
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
# A live page asks the program that it came from.
LIVE_POLICY = POLICY + "; connect-src 'self'"


def write_page(page: Page, path: Path) -> None:
    """Write a page as one HTML file, a layer of weights in memory at a time.

    Args:
        page: what it shows.
        path: the file, replaced as a whole or not at all; missing folders are created.

    Raises:
        InputError: the page is too large for a browser, or the file cannot be written.
    """
    parts = page_parts(page)
    first = next(parts)  # a fault of the input is found before any file exists
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
        page: what it shows.

    Raises:
        InputError: the page is too large for a browser.
    """
    return "".join(page_parts(page))


def frame_html(page: Page, *, height: int) -> str:
    """Return a page in a frame, for the output of a notebook's cell.

    Args:
        page: what it shows.
        height: of the frame, in pixels.

    Raises:
        InputError: the page is too large for a browser.
    """
    document = html.escape(page_html(page))
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe title="attention explorer" style="{style}" srcdoc="{document}"></iframe>'


def page_parts(page: Page) -> Iterator[str]:
    """Give the document in pieces; the first one comes after the input was checked."""
    encoder = Encoder()
    data = escaped_json(encoder.page(page))
    before, after = template().split(DATA)
    yield f"{before}{json_element('data', data)}"
    for number, text in enumerate(encoder.texts()):
        yield f'<script type="text/plain" id="blob-{number}">{text}</script>\n'
    yield after


def live_html(title: str, facts: object) -> str:
    """Return the document of a live page, which asks the program that it came from for all that it shows.

    Args:
        title: the heading.
        facts: what the page asks for first, and what it knows of the model, as JSON.
    """
    empty = {"title": title, "facts": [], "timeline": False, "samples": [], "spans": []}
    elements = {"data": empty, "model": facts}
    return template(is_live=True).replace(
        DATA, "".join(json_element(name, escaped_json(content)) for name, content in elements.items())
    )


def json_element(name: str, data: str) -> str:
    """Return an element that holds JSON; see `escaped_json`."""
    return f'<script type="application/json" id="{name}">{data}</script>\n'


def escaped_json(content: object) -> str:
    """Return JSON in ASCII without any character that HTML reads as markup."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def template(*, is_live: bool = False) -> str:
    """Return the document without its data: markup, policy, style and modules."""
    if is_live:
        return document(LIVE_MODULE, ("style.css", "live.css"), policy=LIVE_POLICY)
    return document(FIRST_MODULE, ("style.css",))


def document(
    first: str, styles: Sequence[str], *, policy: str = POLICY, read: Callable[[str], str] | None = None
) -> str:
    """Return a document without its data.

    Args:
        first: the module that it runs.
        styles: its sheets, in order.
        policy: what the browser may run and load.
        read: returns the text of a module or a sheet by its name; None: that of the explorer.
    """
    read = read or source_text
    style, script = "".join(map(read, styles)), bundle(first, read)
    places = {"policy": policy.format(script=digest(script), style=digest(style)), "style": style, "script": script}
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: places[match[1]], source_text("index.html"))


def bundle(first: str = FIRST_MODULE, read: Callable[[str], str] | None = None) -> str:
    """Return all modules as one script, each in a scope of its own and after those that it imports."""
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
    """Return the text of a module, a sheet or the markup of the explorer."""
    return (files("clearhead.interpret.view.explorer") / "page" / name).read_text("utf-8")


def digest(text: str) -> str:
    """Return the hash by which the policy admits an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
