"""Write the difference between two models as one HTML file without scripts, in the style of the explorer."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import groupby

from clearhead.interpret.difference.outputs import TextChanges, TokenChange
from clearhead.interpret.difference.weights import Change, WeightChanges
from clearhead.interpret.explain.page import start_page

MOST_LISTED = 40
"""Number of tensors, heads and rows in the list of the largest changes."""
MOST_TOKENS = 5000
"""Most tokens of texts that a page shows."""


def write_percent(share: float | None) -> str:
    """Return a relative weight change in percent with three digits; a dash for None (the weight of model A is zero)."""
    return "–" if share is None else f"{100 * share:.3g} %"


def write_rank(change: Change) -> str:
    """Return the rank of a weight change and the largest possible rank, such as "4 of 64"; empty if there is none."""
    if change.rank is None:
        return ""
    return f"{'≥ ' if change.is_rank_at_least else ''}{change.rank} of {min(change.shape)}"


def write_address(change: Change) -> str:
    """Return the address of a changed tensor; for a head or a row also its number, and the token of the row."""
    if change.index is None:
        return change.address
    token = "" if change.token is None else f" '{change.token}'"
    return f"{change.address} {change.kind} {change.index}{token}"


def describe_weights(weights: WeightChanges) -> str:
    """Return a sentence with the numbers of tensors that were compared, are equal, or could not be compared."""
    tensors = [change for change in weights.changes if change.kind == "tensor"]
    equal = sum(change.relative == 0.0 for change in tensors)
    parts = [f"{len(tensors)} tensors compared, {equal} of them equal"]
    for name, addresses in (("only in A", weights.only_in_a), ("only in B", weights.only_in_b)):
        parts += [f"{len(addresses)} {name}"] if addresses else []
    if weights.other_shape:
        parts.append(f"{len(weights.other_shape)} of another shape")
    return "; ".join(parts)


def describe_texts(texts: TextChanges) -> str:
    """Return a sentence with the number of predictions that differ and the mean KL divergence per token."""
    if texts.divergence is None:
        return texts.reason
    return (
        f"{texts.num_different} of {len(texts.tokens)} predictions differ; "
        f"KL(A || B) is {texts.divergence:.4g} nats per token"
    )


def difference_page(title: str, weights: WeightChanges, texts: TextChanges | None) -> Iterator[str]:
    """Yield the HTML of the page about the difference between two models, piece by piece.

    Args:
        title: heading of the page.
        weights: changes of the weights.
        texts: changes on texts. None means that no text was read.
    """
    yield start_page(title, (files("clearhead.interpret.difference") / "page.css").read_text("utf-8"))
    yield f"<p>{html.escape(describe_weights(weights))}.</p>\n"
    if texts is not None:
        yield f"<p>{html.escape(describe_texts(texts))}.</p>\n"
    yield from _heads(weights.changes)
    yield "<h2>Tensors, heads and rows that changed most</h2>\n"
    yield (
        "<p>The change is ||B − A|| divided by ||A|| (Frobenius norms), or by the typical norm of such a tensor, head "
        "or row if that is larger. The rank counts the singular values of B − A above 1 % of the largest.</p>\n"
    )
    yield from _table([change for change in weights.changes if change.score][:MOST_LISTED])
    tensors = [change for change in weights.changes if change.kind == "tensor"]
    yield f"<details><summary><b>All {len(tensors)} tensors</b></summary>"
    yield from _table(tensors)
    yield "</details>\n"
    yield from _missing(weights)
    if texts is not None and texts.tokens:
        yield from _tokens(texts)
    yield "</body></html>\n"


def _heads(changes: Iterable[Change]) -> Iterator[str]:
    """Yield HTML grids of heads coloured by weight change and, if texts were read, by attention divergence."""
    heads = [change for change in changes if change.kind == "head"]
    yield from _grids("change of the weights, in percent", heads, [100 * head.score for head in heads])
    read = [head for head in heads if head.divergence is not None]
    name = "mean Jensen-Shannon divergence of the attention rows, in nats"
    yield from _grids(name, read, [head.divergence or 0.0 for head in read])


def _grids(name: str, heads: Sequence[Change], values: Sequence[float]) -> Iterator[str]:
    """Yield an HTML grid of layers and heads for each kind of attention; `values` colour the heads."""
    if not heads:
        return
    largest = max(values)
    yield f"<h2>Heads: {name}</h2>\n{_legend(largest)}"
    grids: dict[str, dict[int, dict[int, float]]] = {}
    for head, value in zip(heads, values, strict=True):
        pattern, layer = _split(head.address)
        grids.setdefault(pattern, {}).setdefault(layer, {})[head.index or 0] = value
    for pattern, layers in sorted(grids.items()):
        yield f'<div class="grid"><h3><code>{html.escape(pattern)}</code></h3><table><tr><th>layer</th>'
        yield "".join(f"<th>head {index}</th>" for index in range(max(map(len, layers.values())))) + "</tr>\n"
        for layer, row in sorted(layers.items()):
            cells = "".join(f'<td class="{_shade(row[index], largest)}">{row[index]:.2g}</td>' for index in sorted(row))
            yield f"<tr><th>{layer}</th>{cells}</tr>\n"
        yield "</table></div>\n"


def _split(address: str) -> tuple[str, int]:
    """Return a module address with a star in place of the layer number, and the layer number."""
    match = re.search(r"(?<=\blayers\.)\d+", address)
    return (address, 0) if match is None else (f"{address[: match.start()]}*{address[match.end() :]}", int(match[0]))


def _shade(value: float, largest: float) -> str:
    return f"share-{round(10 * value / largest) if largest else 0}"


def _legend(largest: float) -> str:
    shades = "".join(f'<i class="share-{tenth}"></i>' for tenth in range(2, 11, 2))
    return f'<p class="legend"><span>0</span>{shades}<span>{largest:.3g}</span></p>\n'


def _table(changes: Sequence[Change]) -> Iterator[str]:
    has_texts = any(change.divergence is not None for change in changes)
    names = ["part", "shape", "change", "||B − A|| / ||A||", "rank", *(["attention, nats"] if has_texts else [])]
    yield f'<div class="list"><table><tr>{"".join(f"<th>{name}</th>" for name in names)}</tr>\n'
    largest = max((change.score for change in changes), default=0.0)
    for change in changes:
        shape = " × ".join(map(str, change.shape))
        # A narrow screen may break an address after a dot.
        address = html.escape(write_address(change)).replace(".", ".<wbr>")
        yield f"<tr><td>{address}</td><td>{shape}</td>"
        yield f'<td class="{_shade(change.score, largest)}">{write_percent(change.score)}</td>'
        yield f"<td>{write_percent(change.relative)}</td><td>{write_rank(change)}</td>"
        if has_texts:
            yield f"<td>{'' if change.divergence is None else f'{change.divergence:.3g}'}</td>"
        yield "</tr>\n"
    yield "</table></div>\n"


def _missing(weights: WeightChanges) -> Iterator[str]:
    """Yield HTML lists of the weights that only one model has, or that have different shapes."""
    shapes = [
        f"{weight.address}: {list(weight.a)} in A, {list(weight.b)} in B, "
        + ("not compared" if weight.common_rows is None else f"{weight.common_rows} common rows compared")
        for weight in weights.other_shape
    ]
    lists = {"Only in A": weights.only_in_a, "Only in B": weights.only_in_b, "Other shape": shapes}
    for name, lines in lists.items():
        if lines:
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            yield f"<details><summary><b>{name}</b>{len(lines)}</summary><ul>{items}</ul></details>\n"


def _tokens(texts: TextChanges) -> Iterator[str]:
    """Yield HTML with the tokens of each text, coloured by the KL divergence of the predictions at each token."""
    largest = max(token.divergence for token in texts.tokens)
    yield f"<h2>Tokens: KL divergence of the predictions, in nats</h2>\n{_legend(largest)}"
    yield '<p class="faint">A border marks a token at which A and B predict different outputs.</p>\n'
    for number, group in groupby(texts.tokens[:MOST_TOKENS], key=lambda token: token.text):
        yield f'<h3>Text {number + 1}</h3><ol class="tokens">'
        yield "".join(_token(token, largest) for token in group) + "</ol>\n"
    if len(texts.tokens) > MOST_TOKENS:
        yield f'<p class="faint">{MOST_TOKENS} of {len(texts.tokens)} tokens are shown.</p>\n'


def _token(token: TokenChange, largest: float) -> str:
    marks = _shade(token.divergence, largest) + (" differs" if token.a != token.b else "")
    changed = f' <span class="faint">{html.escape(f"{token.a} → {token.b}")}</span>' if token.a != token.b else ""
    shown = html.escape(token.token or "the whole text")
    return f'<li class="{marks}">{shown} <span class="faint">{token.divergence:.2g}</span>{changed}</li>'
