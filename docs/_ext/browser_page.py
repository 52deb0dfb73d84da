"""Page that runs a translator of dates in the reader's browser, in plain JavaScript, with the explorer of its heads.

The site has it as start/browser.html; docs/browser has its JavaScript. The page alone, from the run of `make demo`:
python docs/_ext/browser_page.py RUN FILE.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import clearhead
from clearhead import spec
from clearhead.apps.demo.translate import make_date_sets
from clearhead.interpret.view.explorer.write import DATA, document, escaped_json, json_element, source_text

if TYPE_CHECKING:
    from sphinx.application import Sphinx

BROWSER = Path(__file__).resolve().parents[1] / "browser"
TITLE = "Dates, translated in your browser"
FIRST = "Montag, 5. Januar 1998"
LARGEST = 2_000_000


def page_source(name: str) -> str:
    """Return the text of a script or style sheet of this page, or else of the explorer."""
    path = BROWSER / name
    return path.read_text("utf-8") if path.exists() else source_text(name)


def refuse_other_specs(model: spec.Model) -> None:
    """Refuse a model that model.js cannot compute.

    Raises:
        ValueError: the model has another architecture.
    """
    stacks = [model.encoder, model.decoder]
    attentions = [
        branch.function
        for stack in stacks
        if stack is not None
        for layer in stack.layers
        for step in layer.steps
        for branch in step.branches
        if isinstance(branch.function, spec.Attention)
    ]
    known = [(attention.num_heads, attention.num_kv_heads, attention.head_size) for attention in attentions]
    if None in stacks or set(known) != {(4, 4, 16)} or model.head is None:
        raise ValueError("model.js computes two stacks of four heads of size 16")


def page_html(model: clearhead.Model, examples: Sequence[str], home: str = "") -> str:
    """Return the page of a model as one document.

    Args:
        model: a translator of the spec of `clearhead demo translate`.
        examples: texts that the page offers.
        home: the link to the site. "" means a page alone, without a link.

    Raises:
        ValueError: the model has another architecture, or the page would be larger than two megabytes.
    """
    refuse_other_specs(model.spec)
    index, start, weights = [], 0, []
    for name, parameter in model.module.named_parameters():
        index.append({"name": name, "shape": list(parameter.shape), "start": start})
        start += parameter.numel()
        weights.append(parameter.detach().float().cpu().numpy().astype("<f4").tobytes())
    tokenizers = model.tokenizers
    facts = {
        "index": index,
        "examples": list(examples),
        "source": tokenizers.source.entries(),
        "target": tokenizers.target.entries(),
        "layers": 2,
        "home": home,
    }
    empty = {
        "title": TITLE,
        "facts": [["parameters", f"{start:,}"], ["computed", "here, by plain JavaScript"]],
        "timeline": False,
        "samples": [],
        "spans": [],
    }
    elements = json_element("data", escaped_json(empty)) + json_element("model", escaped_json(facts))
    packed = base64.b64encode(b"".join(weights)).decode("ascii")
    elements += f'<script type="text/plain" id="weights">{packed}</script>\n'
    page = document("page.js", ("style.css", "live.css", "page.css"), read=page_source).replace(DATA, elements)
    if len(page.encode()) > LARGEST:
        raise ValueError(f"the page has {len(page.encode()):,} bytes, more than {LARGEST:,}")
    return page


def write_page(model: clearhead.Model, path: Path, home: str = "") -> None:
    """Write the page of a model, with a date of each language as an example."""
    offered = make_date_sets(seed=11, train_size=0, valid_per_locale=0, test_per_locale=1).test
    page = page_html(model, [FIRST, *(pair.source for pair in offered)], home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def add_to_site(app: Sphinx, error: Exception | None) -> None:
    """Write the page after the other pages of the site."""
    if error is None and app.builder.name == "html":
        import shared  # of the lessons, which are on the path of a build only

        write_page(shared.dates_model(), Path(app.outdir) / "start" / "browser.html", "../index.html")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the page when everything else is built."""
    app.connect("build-finished", add_to_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    write_page(clearhead.load(sys.argv[1]), Path(sys.argv[2]))
    print(f"written: open {sys.argv[2]} in a browser")
