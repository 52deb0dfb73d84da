"""Write an explanation as one HTML file without scripts, with one collapsible element per step.

Legend: T rows (tokens), C columns.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import replacing
from clearhead.interpret.explain.explanation import Explanation
from clearhead.interpret.explain.score import NonlinearNorm, ScoreTerms
from clearhead.interpret.explain.values import Code, ExplanationSection, Value
from clearhead.interpret.view.explorer.write import digest

COMPONENTS, TOKENS, WRITERS = 8, 24, 8
"""Most components of a vector, tokens of an axis and writers of a score that are shown."""
MOST_CELLS = 400_000
"""Most numbers on a page; if all heads would need more, the page shows only the selected head."""


def write_explanation(explanation: Explanation, path: Path) -> None:
    """Write an explanation as one HTML file.

    Args:
        explanation: explanation to write.
        path: file to write, atomically; missing folders are created.

    Raises:
        InputError: the file cannot be written.
    """
    write_pieces(_document(explanation), path)


def write_pieces(pieces: Iterable[str], path: Path) -> None:
    """Write the pieces of an HTML page to a file, atomically; missing folders are created.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)
    except OSError as error:
        raise InputError(f"the page {path} cannot be written: {error.strerror}") from None


def start_page(title: str, more_style: str = "") -> str:
    """Return the beginning of an HTML page without scripts: its head and its heading.

    Args:
        title: title and heading, as plain text.
        more_style: CSS rules in addition to those of `page.css`.
    """
    style = (files("clearhead.interpret.explain") / "page.css").read_text("utf-8") + more_style
    # The content security policy forbids style attributes, so eleven classes hold the shades.
    style += "".join(f".share-{tenth} {{ background: rgb(var(--heat) / {tenth / 16}); }}\n" for tenth in range(11))
    policy = f"default-src 'none'; style-src '{digest(style)}'; base-uri 'none'; form-action 'none'"
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{style}</style></head><body>\n<h1>{title}</h1>\n"
    )


def _document(explanation: Explanation) -> Iterator[str]:
    yield start_page(explanation.title)
    yield from _introduction(explanation)
    stacks = {"encoder": "Encoder", "decoder": "Decoder", "head": "Head"}
    last = ""
    all_heads = _cells(explanation) <= MOST_CELLS
    for section in explanation.sections:
        if section.stack != last:
            last = section.stack
            yield f"<h2>{stacks[last]}</h2>\n"
        yield from _section(explanation, section, all_heads)
    yield "</body></html>\n"


def _introduction(explanation: Explanation) -> Iterator[str]:
    selection, forward = explanation.selection, explanation.forward
    yield (
        f"<p>Selected: layer {selection.layer} of the {selection.stack}, head {selection.head}, token "
        f"{html.escape(explanation.token)}; marked below. Each row of a table is a token that the stack reads; in "
        "cross-attention, the token that the decoder writes. Vectors show their first "
        f"{COMPONENTS} components and their length; click a step to open it.</p>\n"
    )
    for name, tokens in forward.tokens.items():
        yield f'<h3>Tokens that the {name} reads: {_chip("position token", "id")}</h3>\n<ol class="tokens">'
        for position, (token, index) in enumerate(zip(tokens, forward.ids(name).tolist(), strict=True)):
            mark = ' class="chosen"' if (name, position) == (selection.stack, selection.token) else ""
            yield f"<li{mark}>{_chip(token, str(index))}</li>"
        yield "</ol>\n"
    if forward.written:
        written = "".join(f"<li>{_chip(token)}</li>" for token in forward.written)
        yield f'<h3>Tokens that the decoder writes: {_chip("step token")}</h3>\n<ol class="tokens">{written}</ol>\n'


def _chip(numbered: str, index: str = "") -> str:
    """Return a token with its position and its id in the vocabulary; the legend has the same format."""
    number, _, token = numbered.partition(" ")
    after = f' <span class="faint">{index}</span>' if index else ""
    return f'<span class="faint">{number}</span> <b>{html.escape(token)}</b>{after}'


def _section(explanation: Explanation, section: ExplanationSection, all_heads: bool) -> Iterator[str]:
    is_chosen = section in explanation.chosen
    marks = ' class="chosen" open' if is_chosen else ""
    output = section.values[-1]
    yield (
        f"<details{marks}><summary><b>{html.escape(section.title)}</b>"
        f'<span class="faint">{section.address}</span><span class="shape">{_shape(output)}</span></summary>\n'
    )
    for value in section.values:
        yield from _value(explanation, section, value, all_heads)
    if section.address in explanation.scores and is_chosen:
        key, terms = explanation.scores[section.address]
        keys = explanation.forward.tokens[section.keys or section.stack]
        yield from _score(section.rows[explanation.selection.token], keys[key], terms)
    yield "</details>\n"


def _value(explanation: Explanation, section: ExplanationSection, value: Value, all_heads: bool) -> Iterator[str]:
    is_open = " open" if value.name == "weights" and section in explanation.chosen else ""
    yield (
        f"<details{is_open}><summary><b>{html.escape(value.name)}</b>"
        f'<span class="formula">{html.escape(value.formula)}</span>'
        f'<span class="shape">{_shape(value)}</span></summary><div class="body">\n'
    )
    chosen = explanation.selection.head
    if not value.has_heads:
        yield from _table(explanation, section, value, value.numbers)
    else:
        heads = range(len(value.numbers)) if all_heads else [chosen]
        for head in heads:
            marks = ' class="chosen" open' if head == chosen else ""
            yield f'<details{marks}><summary>head {head}</summary><div class="body">'
            yield from _table(explanation, section, value, value.numbers[head])
            yield "</div></details>\n"
        if not all_heads:
            yield '<p class="faint">The text is long, so this page shows only the selected head.</p>'
    if value.address:
        yield f'<p class="faint">address: {html.escape(value.address)}</p>'
    if value.code is not None:
        yield from _code(value.code)
    yield "</div></details>\n"


def _code(code: Code) -> Iterator[str]:
    yield f'<p class="faint">{html.escape(code.location)}</p><pre>{html.escape(chr(10).join(code.lines))}</pre>'


def _table(explanation: Explanation, section: ExplanationSection, value: Value, numbers_TC: Tensor) -> Iterator[str]:
    tokens, chosen = explanation.rows(section, value)
    rows = _window(len(numbers_TC), chosen)
    columns = range(min(COMPONENTS, numbers_TC.shape[1]))
    if value.columns is not None:
        columns = _window(numbers_TC.shape[1], chosen)
    yield f"<table>{_header(value, columns)}\n"
    for row in rows:
        marks = ' class="chosen"' if section in explanation.chosen and row == chosen else ""
        yield f"<tr{marks}><th>{html.escape(tokens[row])}</th>"
        yield f'<td class="text">{html.escape(value.notes[row])}</td>' if value.notes else ""
        yield from [] if value.notes else _cells_of(value, numbers_TC[row], columns)
        yield "</tr>\n"
    yield "</table>"
    if len(rows) < len(numbers_TC):
        yield f'<p class="faint">{len(rows)} of {len(numbers_TC)} tokens are shown.</p>'
    if len(columns) < numbers_TC.shape[1] and not value.notes:
        what = "components" if value.columns is None else "columns"
        yield f'<p class="faint">{len(columns)} of {numbers_TC.shape[1]} {what} are shown.</p>'


def _header(value: Value, columns: range) -> str:
    if value.notes:
        names = ["the most probable"]
    elif value.columns is None:
        names = [*map(str, columns), "length"]
    else:
        names = [html.escape(value.columns[column]) for column in columns]
    return f"<tr><th></th>{''.join(f'<th>{name}</th>' for name in names)}</tr>"


def _cells_of(value: Value, numbers_C: Tensor, columns: range) -> Iterator[str]:
    is_share = value.name in ("weights", "shares")
    for number in numbers_C[columns.start : columns.stop].tolist():
        shade = f' class="share-{round(10 * number)}"' if is_share else ""
        yield f"<td{shade}>{_format_number(number, value)}</td>"
    if value.columns is None:
        yield f"<td>{float(numbers_C.double().norm()):.4g}</td>"


def _format_number(number: float, value: Value) -> str:
    if number == float("-inf"):
        return "−∞"
    return f"{number:.0f}" if value.name == "mask" else f"{number:.4f}".replace("-", "−")


def _score(query: str, key: str, terms: ScoreTerms | NonlinearNorm) -> Iterator[str]:
    if isinstance(terms, NonlinearNorm):
        yield f"<p>Why {html.escape(query)} looks at {html.escape(key)} (its largest weight) {terms.sentence}</p>"
        return
    yield (
        f'<details class="chosen" open><summary><b>why {html.escape(query)} looks at {html.escape(key)}</b>'
        f"<span>its largest weight</span></summary><div class=body><p>The score {terms.score:.4f} is the sum of the "
        "terms of all pairs of writers, with the mean and variance of norms fixed at their values in this run"
        + (f", plus {terms.position_bias:.4f} for the distance" if terms.position_bias else "")
        + '.</p><div class="columns">'
    )
    for title, rows in terms.tables(WRITERS).items():
        lines = "".join(f"<tr><th>{html.escape(name)}</th><td>{value:.4f}</td></tr>" for name, value in rows)
        yield f"<div><h3>{title}</h3><table>{lines}</table></div>\n"
    yield "</div></div></details>\n"


def _shape(value: Value) -> str:
    return value.shape.replace(" x ", " × ")


def _window(count: int, around: int) -> range:
    """Return the token positions to show: at most TOKENS of `count`, with the position `around` near the middle."""
    first = max(0, min(around - TOKENS // 2, count - TOKENS))
    return range(first, min(count, first + TOKENS))


def _cells(explanation: Explanation) -> int:
    count = 0
    for section in explanation.sections:
        for value in section.values:
            *heads, rows, columns = value.numbers.shape
            shown = COMPONENTS if value.columns is None else min(TOKENS, columns)
            count += (heads[0] if heads else 1) * min(TOKENS, rows) * shown
    return count
