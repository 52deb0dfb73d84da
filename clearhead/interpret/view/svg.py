"""Shapes of a drawing, and their SVG text: one self-contained file for light and dark colour schemes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from xml.etree import ElementTree

from clearhead.base.errors import escape_unsafe
from clearhead.base.figures import EDGE, FAINT, FONT, GRID, INK, drawable, text_width

Point = tuple[float, float]
Bounds = tuple[float, float, float, float]
_ARROW, _HALF_ARROW = 6.0, 3.2
_BOLD = 1.14  # most width of bold text, relative to regular text
# Characters that XML 1.0 does not allow, in addition to those that `visible` escapes.
_NOT_XML = re.compile("[\ufffe\uffff]")
# System fonts; the last one is the font that widths are measured with.
_FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# No CSS variables: programs that convert SVG do not support them.
_LIGHT = {
    "page": "#ffffff", "inside": "#fafbfc", "ink": INK, "faint": "#5c6873", "edge": FAINT, "frame": EDGE,
    "embedding": "#fbe1e3", "attention": "#fde8cd", "feed_forward": "#d9eaf7", "norm": "#f4f3cf", "linear": "#dfe1f4",
    "position": "#ddf0e0",
}  # fmt: skip
_DARK = {
    "page": "#14181c", "inside": "#1a1f24", "ink": GRID, "faint": "#9aa5b0", "edge": "#6b7682", "frame": "#3a434c",
    "embedding": "#5a2f36", "attention": "#5c431f", "feed_forward": "#1f445f", "norm": "#4a4920", "linear": "#383c66",
    "position": "#274a30",
}  # fmt: skip


def _colour_rules(colours: dict[str, str]) -> str:
    kinds = ("embedding", "attention", "feed_forward", "norm", "linear", "position")
    return "\n".join([
        *(f".{kind} {{ fill: {colours[kind]}; }}" for kind in kinds),
        f".page, .plus {{ fill: {colours['page']}; }}",
        f".frame {{ fill: {colours['inside']}; stroke: {colours['frame']}; }}",
        f".box {{ stroke: {colours['edge']}; }}",
        f".line, .plus {{ stroke: {colours['ink']}; }}",
        f".dashed {{ stroke: {colours['edge']}; }}",
        f".arrow, text {{ fill: {colours['ink']}; }}",
        f".faint {{ fill: {colours['faint']}; }}",
    ])  # fmt: skip


_STYLE = f"""
text {{ font-family: {_FAMILY}; }}
.line {{ fill: none; stroke-width: 1.1; stroke-linejoin: round; }}
.dashed {{ stroke-dasharray: 3 3; }}
.frame, .box, .plus {{ stroke-width: 1; }}
.bold {{ font-weight: 600; }}
{_colour_rules(_LIGHT)}
@media (prefers-color-scheme: dark) {{
{_colour_rules(_DARK)}
}}
"""


@dataclass(frozen=True)
class Text:
    """Line of text in a drawing.

    Args:
        x, y: position in pixels; y is the middle of the line.
        content: the text.
        size: font size, in pixels.
        anchor: part of the text that is at x: "start", "middle" or "end".
        is_bold, is_faint: style of the text.
    """

    x: float
    y: float
    content: str
    size: float = 11.0
    anchor: str = "middle"
    is_bold: bool = False
    is_faint: bool = False

    @property
    def bounds(self) -> Bounds:
        """Smallest x and y, and largest x and y, of the shape, in pixels."""
        width = estimated_width(self.content, self.size, is_bold=self.is_bold)
        left = self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * width
        return left, self.y - 0.6 * self.size, left + width, self.y + 0.6 * self.size

    def shift(self, x: float, y: float) -> Text:
        """Return a copy of the shape, shifted by x and y pixels."""
        return replace(self, x=self.x + x, y=self.y + y)

    def element(self) -> ElementTree.Element:
        """Return the SVG element of the shape."""
        looks = [name for name, has in (("bold", self.is_bold), ("faint", self.is_faint)) if has]
        attributes = {"x": _px(self.x), "y": _px(self.y + 0.35 * self.size), "font-size": _px(self.size)}
        element = ElementTree.Element("text", attributes | {"text-anchor": self.anchor})
        if looks:
            element.set("class", " ".join(looks))
        element.text = self.content
        return element


@dataclass(frozen=True)
class Box:
    """Rectangle in a drawing, with text inside.

    Args:
        left, top, width, height: position and size, in pixels.
        kind: class of its colour; "frame" for a rectangle around other boxes.
        texts: lines of text inside.
        address: address of the node that it shows; empty if it shows none.
        norms: addresses of the norms that its texts mention.
    """

    left: float
    top: float
    width: float
    height: float
    kind: str
    texts: tuple[Text, ...] = ()
    address: str = ""
    norms: tuple[str, ...] = ()

    @property
    def bounds(self) -> Bounds:
        """Smallest x and y, and largest x and y, of the shape, in pixels."""
        return self.left, self.top, self.left + self.width, self.top + self.height

    def shift(self, x: float, y: float) -> Box:
        """Return a copy of the shape, shifted by x and y pixels."""
        texts = tuple(text.shift(x, y) for text in self.texts)
        return replace(self, left=self.left + x, top=self.top + y, texts=texts)

    def element(self) -> ElementTree.Element:
        """Return the SVG element of the shape."""
        element = ElementTree.Element("g")
        if self.address:
            element.set("data-address", self.address)
        if self.norms:
            element.set("data-norms", " ".join(self.norms))
        radius = 10.0 if self.kind == "frame" else 4.0
        geometry = {"x": self.left, "y": self.top, "width": self.width, "height": self.height, "rx": radius}
        rectangle = {name: _px(value) for name, value in geometry.items()}
        looks = {"class": "frame" if self.kind == "frame" else f"box {self.kind}"}
        ElementTree.SubElement(element, "rect", rectangle | looks)
        element.extend(text.element() for text in self.texts)
        return element


@dataclass(frozen=True)
class Polyline:
    """Line through points, with an optional arrow at its end."""

    points: tuple[Point, ...]
    has_arrow: bool = False
    is_dashed: bool = False

    @property
    def bounds(self) -> Bounds:
        """Smallest x and y, and largest x and y, of the shape, in pixels."""
        x, y = zip(*self.points, strict=True)
        return min(x), min(y), max(x), max(y)

    def shift(self, x: float, y: float) -> Polyline:
        """Return a copy of the shape, shifted by x and y pixels."""
        return replace(self, points=tuple((own_x + x, own_y + y) for own_x, own_y in self.points))

    def element(self) -> ElementTree.Element:
        """Return the SVG element of the shape."""
        element = ElementTree.Element("g")
        (x0, y0), (x1, y1) = self.points[-2:]
        length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
        along, across = ((x1 - x0) / length, (y1 - y0) / length), ((y0 - y1) / length, (x1 - x0) / length)
        back = (x1 - _ARROW * along[0], y1 - _ARROW * along[1])
        points = [*self.points[:-1], back] if self.has_arrow else self.points
        looks = "line dashed" if self.is_dashed else "line"
        ElementTree.SubElement(element, "polyline", {"points": _path(points), "class": looks})
        if self.has_arrow:
            corners = [
                (x1, y1),
                (back[0] + _HALF_ARROW * across[0], back[1] + _HALF_ARROW * across[1]),
                (back[0] - _HALF_ARROW * across[0], back[1] - _HALF_ARROW * across[1]),
            ]
            ElementTree.SubElement(element, "polygon", {"points": _path(corners), "class": "arrow"})
        return element


@dataclass(frozen=True)
class Circle:
    """Circle that contains a plus sign (a sum of vectors) or a wave (sinusoidal positions)."""

    x: float
    y: float
    radius: float
    mark: str = "plus"

    @property
    def bounds(self) -> Bounds:
        """Smallest x and y, and largest x and y, of the shape, in pixels."""
        return self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius

    def shift(self, x: float, y: float) -> Circle:
        """Return a copy of the shape, shifted by x and y pixels."""
        return replace(self, x=self.x + x, y=self.y + y)

    def element(self) -> ElementTree.Element:
        """Return the SVG element of the shape."""
        element = ElementTree.Element("g")
        geometry = {"cx": _px(self.x), "cy": _px(self.y), "r": _px(self.radius)}
        ElementTree.SubElement(element, "circle", geometry | {"class": "plus"})
        x, y, r = self.x, self.y, self.radius
        if self.mark == "plus":
            arm = 0.55 * r
            path = f"M{_px(x - arm)} {_px(y)}H{_px(x + arm)}M{_px(x)} {_px(y - arm)}V{_px(y + arm)}"
        else:
            reach = 0.7 * r
            left, middle, right, up = _px(x - reach), _px(x), _px(x + reach), _px(0.9 * r)
            path = f"M{left} {_px(y)}q{_px(reach / 2)} -{up} {_px(reach)} 0T{right} {_px(y)}M{middle} {_px(y)}"
        ElementTree.SubElement(element, "path", {"d": path, "class": "line"})
        return element


Shape = Text | Box | Polyline | Circle


def escape_text(text: str) -> str:
    """Replace characters that XML does not allow, and escape control and direction characters."""
    return _NOT_XML.sub("�", escape_unsafe(text))


@cache
def estimated_width(text: str, size: float, *, is_bold: bool = False) -> float:
    """Return an upper bound of the width of a text in pixels, in the fonts that a browser may use.

    Args:
        text: one line of text.
        size: font size, in pixels.
        is_bold: True for bold text.
    """
    # A character that the measuring font lacks counts as a square.
    regular = text if drawable(text) else "".join(filter(drawable, text))
    width = text_width(regular) * 72 / FONT.get_size() + (len(text) - len(regular))
    return width * size * (_BOLD if is_bold else 1.0)


def bounds_of(shapes: Iterable[Shape]) -> Bounds:
    """Return the smallest x and y, and the largest x and y, of all shapes."""
    left, top, right, bottom = zip(*(shape.bounds for shape in shapes), strict=True)
    return min(left), min(top), max(right), max(bottom)


def svg_text(shapes: Sequence[Shape], width: float, height: float, title: str) -> str:
    """Return a drawing as the text of an SVG file.

    Args:
        shapes: shapes in drawing order.
        width, height: size of the picture, in pixels.
        title: title for screen readers.
    """
    size = {"width": _px(width), "height": _px(height), "viewBox": f"0 0 {_px(width)} {_px(height)}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img"})
    ElementTree.SubElement(root, "title").text = escape_text(title)
    ElementTree.SubElement(root, "style").text = _STYLE
    ElementTree.SubElement(root, "rect", {"width": "100%", "height": "100%", "class": "page"})
    root.extend(shape.element() for shape in shapes)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _path(points: Iterable[Point]) -> str:
    return " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
