"""Print an explanation as text in 80 columns: one layer, one head and one token."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from torch import Tensor

from clearhead.interpret.explain.explanation import Explanation
from clearhead.interpret.explain.score import NonlinearNorm, ScoreTerms
from clearhead.interpret.explain.values import ExplanationSection, Value

WIDTH = 80
NUMBERS, KEYS, WRITERS = 5, 12, 5
"""Most components of a vector, keys and writers of a score that are shown."""
BAR = 20


def text_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation: tokens, embedding, selected layer, final norm and head.

    Args:
        explanation: explanation to print.
    """
    forward, selection = explanation.forward, explanation.selection
    yield from textwrap.wrap(explanation.title, WIDTH)
    for name, tokens in forward.tokens.items():
        ids = forward.ids(name).tolist()
        yield ""
        yield f"the {name} reads (position, token, id)"
        yield from _wrap_items([f"{token} ({index})" for token, index in zip(tokens, ids, strict=True)])
    if forward.written:
        yield ""
        yield "the decoder writes (position, token)"
        yield from _wrap_items(list(forward.written))
    yield ""
    yield (
        f"selected: layer {selection.layer} of the {selection.stack}, head {selection.head}, token {explanation.token}"
    )
    for section in explanation.sections:
        is_below_or_chosen = section.stack == selection.stack and section.layer in (None, selection.layer)
        if is_below_or_chosen or section.stack == "head":
            yield from _section(explanation, section)


def _section(explanation: Explanation, section: ExplanationSection) -> Iterator[str]:
    selection = explanation.selection
    yield ""
    yield f"{section.title} {'─' * max(2, WIDTH - 1 - len(section.title))}"
    for value in section.values:
        rows, row = explanation.rows(section, value)
        head = f", head {selection.head}" if value.has_heads else ""
        if value.is_of_keys:
            head += f", {rows[row]}"
        yield from textwrap.wrap(f"{value.name}{head}: {value.formula}", WIDTH, subsequent_indent="    ")
        location = "" if value.code is None else f"  {value.code.location}"
        yield f"    [{value.shape}]{location}"
        yield from _numbers(value, value.of_head(selection.head)[row], row)
    if section.address in explanation.scores:
        key, terms = explanation.scores[section.address]
        keys = explanation.forward.tokens[section.keys or section.stack]
        yield ""
        yield from _score(section.rows[selection.token], keys[key], terms)


def _numbers(value: Value, numbers: Tensor, row: int) -> Iterator[str]:
    """Yield the text lines for one row of a value: named numbers, or first components and length of a vector."""
    if value.notes:
        yield from textwrap.wrap(value.notes[row], WIDTH, initial_indent="    ", subsequent_indent="    ")
        return
    if value.columns is None:
        first = "  ".join(f"{number:9.4f}" for number in numbers[:NUMBERS].tolist())
        more = "  ..." if len(numbers) > NUMBERS else ""
        yield f"    {first}{more}  |x| {float(numbers.double().norm()):.4g}"
        return
    shown = list(zip(value.columns, numbers.tolist(), strict=True))
    if len(shown) > KEYS:
        shown = sorted(shown, key=_number, reverse=True)[:KEYS]
    width = min(24, max(len(name) for name, _ in shown))
    if value.name in ("weights", "shares"):
        for name, number in shown:
            yield f"    {name[:width]:<{width}}  {number:7.4f}  {'█' * round(BAR * number)}".rstrip()
    else:
        digits = 0 if value.name == "mask" else 4
        yield from _wrap_items([f"{name[:width]} {number:.{digits}f}" for name, number in shown])
    if len(numbers) > KEYS:
        yield f"    the largest {KEYS} of {len(numbers)}"


def _number(pair: tuple[str, float]) -> float:
    return pair[1]


def _score(query: str, key: str, terms: ScoreTerms | NonlinearNorm) -> Iterator[str]:
    if isinstance(terms, NonlinearNorm):
        yield from textwrap.wrap(f"why {query} looks at {key} (its largest weight) {terms.sentence}", WIDTH)
        return
    yield f"why {query} looks at {key}, its largest weight: the score {terms.score:.4f} is the sum of"
    for title, rows in terms.tables(WRITERS).items():
        yield f"  {title}"
        for name, value in rows:
            yield from textwrap.wrap(
                f"{value:10.4f}  {name}", WIDTH - 4, initial_indent=" " * 4, subsequent_indent=" " * 16
            )
    if terms.position_bias:
        yield f"  and the bias of the distance\n    {terms.position_bias:10.4f}"


def _wrap_items(items: list[str]) -> Iterator[str]:
    """Yield text lines that hold the items side by side; no item is split across lines."""
    line = "   "
    for item in items:
        if len(line) + 1 + len(item) > WIDTH and line.strip():
            yield line
            line = "   "
        line += f" {item} "
    yield line.rstrip()
