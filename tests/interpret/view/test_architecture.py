"""The drawing of an architecture, for every kind of model: nothing overlaps, nothing is missing, any name is safe."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from clearhead import presets, spec
from clearhead.interpret.view.architecture import architecture_shapes, draw_architecture
from clearhead.interpret.view.architecture_blocks import LayerGroup, layer_groups
from clearhead.interpret.view.svg import Bounds, Box, Circle, Polyline, Shape, Text
from clearhead.spec.presets.task_heads import label_head, vector_head, with_head
from tests.hf_specs import hf_specs
from tests.laws.hf_parts import HF_PARTS
from tests.laws.tiny import FAMILIES, POSITIONS, STYLES, hparams, resolve_spec

NAMESPACE = "{http://www.w3.org/2000/svg}"
CASES = ("albert/groups", "deberta/shared", "falcon/two", "gpt_oss/options", "opt/after", "modernbert/mean")
TAGS = {"svg", "title", "style", "rect", "g", "text", "polyline", "polygon", "circle", "path"}


@cache
def models() -> dict[str, spec.Model]:
    """Every family and style of the laws, every rare part, every checkpoint family, and other heads."""
    pairs = zip(itertools.product(FAMILIES, STYLES), itertools.cycle(POSITIONS), strict=False)
    names = [f"{family}/{style}/{position}" for (family, style), position in pairs]
    bert = presets.bert_base()
    return {
        **{name: resolve_spec(hparams(name)) for name in names},
        **{name: build() for name, build in HF_PARTS.items()},
        **{name: model for name, model in hf_specs().items() if "/" not in name or name in CASES},
        "classifier": with_head(bert, label_head(768, 3, pool="first")),
        "embedder": with_head(bert, vector_head(pool="mean")),
        "transformer": presets.transformer_base(),
    }


@cache
def shapes(name: str) -> list[Shape]:
    return architecture_shapes(models()[name])


def boxes(name: str, *, frames: bool = False) -> list[Box]:
    return [shape for shape in shapes(name) if isinstance(shape, Box) and (shape.kind == "frame") == frames]


def overlap(first: Bounds, second: Bounds) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


def within(inner: Bounds, outer: Bounds) -> bool:
    return (
        outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]
    )  # fmt: skip


@cache
def measured_width(content: str, size: float, is_bold: bool) -> float:
    """The width in DejaVu Sans, wider than the fonts of systems are."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if is_bold else "normal")
    return float(TextPath((0, 0), content, prop=font).get_extents().width)


def drawn_layers(stack: spec.Stack) -> list[int]:
    return [run.layer for group in layer_groups(stack) for run in group.runs]


def expected_paths(model: spec.Model, kinds: tuple[type[spec.Node], ...]) -> set[str]:
    """The paths of all nodes of some kinds, those of repeated layers once."""
    paths = set()
    for path, node in spec.walk(model):
        parts = path.split(".")
        is_in_layer = parts[1:2] == ["layers"] and parts[0] != "head"
        is_drawn = not is_in_layer or int(parts[2]) in drawn_layers(getattr(model, parts[0]))
        if isinstance(node, kinds) and is_drawn:
            paths.add(path)
    return paths


def test_texts_fit_their_boxes() -> None:
    for name in models():
        for box in boxes(name):
            for text in box.texts:
                assert within(text.bounds, box.bounds), (name, text.content)
                assert measured_width(text.content, text.size, text.is_bold) <= box.width - 4, (name, text.content)


def test_boxes_do_not_overlap() -> None:
    for name in models():
        for first, second in itertools.combinations([box.bounds for box in boxes(name)], 2):
            assert not overlap(first, second), (name, first, second)
        for frame in boxes(name, frames=True):
            for box in [*boxes(name), *boxes(name, frames=True)]:
                disjoint = not overlap(frame.bounds, box.bounds)
                assert disjoint or within(box.bounds, frame.bounds) or within(frame.bounds, box.bounds), name


def test_texts_beside_the_stream_are_free() -> None:
    for name in models():
        texts = [shape for shape in shapes(name) if isinstance(shape, Text)]
        for first, second in itertools.combinations(texts, 2):
            assert not overlap(first.bounds, second.bounds), (name, first.content, second.content)
        for text, box in itertools.product(texts, boxes(name)):
            assert not overlap(text.bounds, box.bounds), (name, text.content, box.texts[0].content)


def test_lines_pass_around_boxes_and_texts() -> None:
    for name in models():
        lines = [shape for shape in shapes(name) if isinstance(shape, Polyline)]
        texts = [shape.bounds for shape in shapes(name) if isinstance(shape, Text)]
        for line in lines:
            for (x0, y0), (x1, y1) in itertools.pairwise(line.points):
                assert x0 == x1 or y0 == y1, name
                bounds = (min(x0, x1) - 0.1, min(y0, y1) - 0.1, max(x0, x1) + 0.1, max(y0, y1) + 0.1)
                for left, top, right, bottom in [*(box.bounds for box in boxes(name)), *texts]:
                    assert not overlap(bounds, (left + 0.2, top + 0.2, right - 0.2, bottom - 0.2)), (name, bounds)


def test_every_norm_stands_where_the_spec_has_it() -> None:
    for name, model in models().items():
        counts = Counter(box.address for box in boxes(name) if box.kind == "norm")
        counts.update(norm for box in boxes(name) for norm in box.norms)
        assert set(counts) == expected_paths(model, (spec.LayerNorm, spec.RMSNorm)), name
        assert set(counts.values()) <= {1}, name


def test_every_part_is_drawn_once() -> None:
    kinds = (spec.Attention, spec.FeedForward, spec.MixtureOfExperts, spec.Table, spec.Learned, spec.Projection)
    for name, model in models().items():
        counts = Counter(box.address for box in boxes(name))
        wanted = {path for path in expected_paths(model, kinds) if not path.endswith(".expert")}
        assert all(counts[path] == 1 for path in wanted), (name, wanted - set(counts))
        memory = [node for path, node in spec.walk(model) if path in wanted and getattr(node, "source", "") == "memory"]
        entering = [
            shape
            for shape in shapes(name)
            if isinstance(shape, Polyline) and shape.has_arrow and len(shape.points) == 6
        ]
        assert len(entering) == len(memory), name


def test_every_step_has_a_sum() -> None:
    for name, model in models().items():
        steps = [model_step for stack in (model.encoder, model.decoder) if stack for index in drawn_layers(stack)
                 for model_step in stack.layers[index].steps]  # fmt: skip
        added = [stack.embedding for stack in (model.encoder, model.decoder) if stack]
        wanted = len(steps) + sum(len(step.branches) > 1 for step in steps)
        wanted += sum((embedding.num_segments > 0) + (embedding.position is not None) for embedding in added)
        assert wanted == sum(isinstance(shape, Circle) and shape.mark == "plus" for shape in shapes(name)), name


def test_what_is_shared_is_said() -> None:
    def texts(model: spec.Model) -> str:
        return " | ".join(re.findall(r"<text[^>]*>([^<]*)<", draw_architecture(model, "t")))

    tied, untied = (presets.gpt2(), hf_specs()["mixtral"])
    assert "tied to the embedding" in texts(tied) and "tied" not in texts(untied)
    assert "the encoder's table" in texts(presets.t5_small()) and "Position buckets" in texts(presets.t5_small())
    assert "1 shared layer" in texts(hf_specs()["albert"]) and "shared layer" not in texts(tied)
    assert all(words in texts(tied) for words in ("12 ×", "layers 0 to 11", "12 heads of 64", "causal mask"))
    assert "experts" in texts(untied)
    assert all(
        words in texts(presets.transformer_base()) for words in ("source × 512", "target × 37,000", "times √512")
    )


@pytest.mark.parametrize("name", ["transformer", "gemma2", "classifier", "deberta/shared"])
def test_the_picture_holds_everything(name: str) -> None:
    root = ElementTree.fromstring(draw_architecture(models()[name], "a title " * 9, ["one note", "another"]))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert (width, height) == (float(root.attrib["width"]), float(root.attrib["height"]))
    for rectangle in root.iter(f"{NAMESPACE}rect"):
        if "x" in rectangle.attrib:
            x, y, wide, high = (float(rectangle.attrib[key]) for key in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + wide <= width and y + high <= height
    for line in root.iter(f"{NAMESPACE}polyline"):
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    for text in root.iter(f"{NAMESPACE}text"):
        measured = Text(
            float(text.attrib["x"]), 0.0, text.text or "", float(text.attrib["font-size"]), text.attrib["text-anchor"]
        )
        assert measured.bounds[0] >= 0 and measured.bounds[2] <= width


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=90))
def test_any_name_is_safe(name: str) -> None:
    text = draw_architecture(presets.llama_tiny(), f"</text><script>{name}", [name])
    root = ElementTree.fromstring(text)
    assert {element.tag.removeprefix(NAMESPACE) for element in root.iter()} <= TAGS
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace(name, "") and "@import" not in text


def expand_groups(stack: spec.Stack, groups: list[LayerGroup]) -> list[spec.Layer]:
    layers = []
    for group in groups:
        unit = [stack.layers[run.layer] for run in group.runs for _ in range(run.count)]
        assert (group.first, group.last) == (len(layers), len(layers) + len(unit) * group.repeats - 1)
        layers += unit * group.repeats
    return layers


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=13), st.integers(1, 5))
def test_repeated_layers_expand_to_all(kinds: list[int], repeats: int) -> None:
    stack = presets.llama_tiny().decoder
    (step, other) = stack.layers[0].steps
    layers = [spec.Layer(steps=steps) for steps in ((step,), (step, other), (other, step))]
    chosen = stack.model_copy(update={"layers": tuple(layers[kind] for kind in kinds * repeats)})
    groups = layer_groups(chosen)
    assert tuple(expand_groups(chosen, groups)) == chosen.layers
    drawn, runs = sum(len(group.runs) for group in groups), len(list(itertools.groupby(kinds)))
    assert drawn <= max(1, runs) if kinds else not groups


def test_the_repeating_units_of_known_models() -> None:
    def counts(model: spec.Model) -> list[tuple[int, list[int]]]:
        stack = model.decoder or model.encoder
        return [(group.repeats, [run.count for run in group.runs]) for group in layer_groups(stack)]

    assert counts(presets.gpt2()) == [(12, [1])]
    alternating = spec_of_window_pattern([1, 0] * 13)
    assert counts(alternating) == [(13, [1, 1])]
    assert counts(spec_of_window_pattern(([1] * 5 + [0]) * 4 + [1, 1])) == [(4, [5, 1]), (2, [1])]


def spec_of_window_pattern(windowed: list[int]) -> spec.Model:
    """A decoder whose layers see a window where the pattern has a one."""
    model = presets.llama_tiny()
    layer = model.decoder.layers[0]
    attention = layer.steps[0].branches[0]
    seen = attention.function.model_copy(update={"mask": spec.Window(before=7, after=0)})
    step = layer.steps[0].model_copy(update={"branches": (attention.model_copy(update={"function": seen}),)})
    local = layer.model_copy(update={"steps": (step, *layer.steps[1:])})
    layers = tuple(local if has_window else layer for has_window in windowed)
    return model.model_copy(update={"decoder": model.decoder.model_copy(update={"layers": layers})})
