"""Make the pictures of the README and of the site from the run of `make demo`: python docs/make_pictures.py RUN.

Each picture holds the digest of the files that determine it, as a PNG text or an SVG comment. A test compares the
digests, so that no page shows a picture of an older program.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, PngImagePlugin
from playwright.sync_api import sync_playwright
from torch import Tensor

import clearhead as ch

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
EXPLORER = "clearhead/interpret/view/explorer/page"
SOURCES: dict[str, tuple[str, ...]] = {"learning-to-align.svg": (), "explorer.png": (EXPLORER,)}
"""The files and folders that determine a picture, in addition to this script."""
ARCHITECTURE = "architecture-transformer.svg"
"""Picture without a digest: a test draws it again and compares."""
RECORDED = {"compare-families.png": "clearhead compare"}
"""Pictures of long runs, and the command that the page with the picture must name."""
KEY = "digest of the sources"

DRAWN = "() => document.documentElement.dataset.drawn === document.documentElement.dataset.update"
SCREEN = {"width": 1200, "height": 780}
TEXT, WRITTEN = "Montag, 5. Januar 1998", "1998-01-05"
LAYER, HEAD = 0, 2
CELL, THUMB = 21, 6
"""Pixels of an attention weight in the large map and in a thumbnail."""
LEFT, TOP = 60, 106
"""Position of the large map in pixels."""
SECONDS, LAST_SECONDS = 1.2, 5.0
"""Duration of a frame, and of the last one."""
STYLE = """svg{background:#fff} text{font:13px system-ui,sans-serif;fill:#57606a} image{image-rendering:pixelated}
.t{font:13px ui-monospace,monospace} .h{font-size:18px;fill:#1f2328} .h tspan{font-family:ui-monospace,monospace}
.good{fill:#1a7f37;font-weight:600} .b{fill:#f6f8fa;stroke:#d0d7de} .c{stroke:#bc4c00;stroke-width:2}
@media (prefers-color-scheme:dark){svg{background:#0d1117} text{fill:#9198a1} .h{fill:#f0f6fc}
.good{fill:#3fb950} .b{fill:#151b23;stroke:#3d444d} .c{stroke:#f0883e}}"""


def digest(name: str, root: Path = ROOT) -> str:
    """Return the SHA-256 of the sources of a picture, as hexadecimal digits.

    Args:
        name: the file name of the picture in docs/images.
        root: the root of the repository.
    """
    total = hashlib.sha256()
    for source in (Path(__file__).relative_to(ROOT).as_posix(), *SOURCES[name]):
        path = root / source
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            if file.suffix != ".pyc":
                total.update(file.read_bytes())
    return total.hexdigest()


def read_digest(path: Path) -> str:
    """Return the digest in a picture, or an empty text if it has none."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return str(image.info.get(KEY, ""))
    match = re.search(rf"<!-- {KEY}: (\w+) -->", path.read_text("utf-8"))
    return match[1] if match else ""


def write_svg(name: str, text: str) -> None:
    """Write an SVG with its digest."""
    (IMAGES / name).write_text(f"{text.rstrip()}\n<!-- {KEY}: {digest(name)} -->\n", encoding="utf-8", newline="\n")


class Frame(NamedTuple):
    """The model at one step of its training.

    Args:
        step: the step.
        written: the text that the model writes by itself.
        weights_LHQK: cross-attention weights of each layer and head while it writes the right date, in [0, 1].
    """

    step: int
    written: str
    weights_LHQK: Tensor


def read_frames(run: Path) -> tuple[list[Frame], list[str], list[str]]:
    """Return a frame for each snapshot of a run, the tokens that it writes, and those that it reads."""
    folder = run / "checkpoints" / "snapshots"
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())
    frames = []
    for step in steps:
        model = ch.load(f"{run}@step-{step}")
        maps = model.attention(TEXT, target=WRITTEN)
        weights = torch.stack([maps.weights("decoder.memory", layer) for layer in maps.layers("decoder.memory")])
        frames.append(Frame(step, model.translate([TEXT], beam_size=1)[0], weights))
    return frames, maps.written_tokens, maps.tokens


def _heat_map(weights_QK: Tensor, x: int, y: int, cell: int) -> str:
    """Return an image with a pixel per weight: opaque for 1 and transparent for 0, so that every background works."""
    alpha = (255 * weights_QK.clamp(0, 1) ** 0.7).round().to(torch.uint8)
    pixels = torch.stack([torch.full_like(alpha, value) for value in (47, 129, 247)] + [alpha], dim=-1)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy(), "RGBA").save(file, "PNG", optimize=True)
    encoded = base64.b64encode(file.getvalue()).decode("ascii")
    rows, columns = weights_QK.shape
    return (
        f'<image x="{x}" y="{y}" width="{columns * cell}" height="{rows * cell}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{encoded}"/>'
    )


def _timing(count: int) -> str:
    """Return the style that shows one frame after the other; without motion, the last one stays."""
    total = SECONDS * (count - 1) + LAST_SECONDS
    rules = []
    for index in range(count):
        start = 100 * SECONDS * index / total
        end = 100 if index == count - 1 else 100 * SECONDS * (index + 1) / total
        before = f"0%,{start - 0.01:.2f}%{{opacity:0}}" if index else ""
        after = "" if index == count - 1 else f"{end + 0.01:.2f}%,100%{{opacity:0}}"
        rules.append(f"@keyframes k{index}{{{before}{start:.2f}%,{end:.2f}%{{opacity:1}}{after}}}")
        rules.append(f"#f{index}{{animation:k{index} {total:.1f}s linear infinite}}")
    return "\n".join(rules) + f"\n.f{{opacity:0}}#f{count - 1}{{opacity:1}}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; `kind` is its class in the style."""
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: int, y: int, size: tuple[int, int], kind: str = "b") -> str:
    """Return the frame of a map."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{size[0]}" height="{size[1]}"/>'


def _label(token: str) -> str:
    """Return the text of a token at the border of a map."""
    return {" ": "␣", "</s>": "end"}.get(token, token)


def _frame_group(index: int, frame: Frame, places: Sequence[tuple[int, int, int, int]]) -> str:
    """Return the content of a frame: the text that the model writes, the large map and the thumbnails.

    Args:
        index: the index of the frame.
        frame: the model at this step.
        places: layer, head, x and y of each thumbnail.
    """
    maps = [_heat_map(frame.weights_LHQK[LAYER, HEAD], LEFT, TOP, CELL)]
    maps += [_heat_map(frame.weights_LHQK[layer, head], x, y, THUMB) for layer, head, x, y in places]
    written = frame.written if len(frame.written) <= 14 else frame.written[:13] + "…"
    mark = ' class="good"' if frame.written == WRITTEN else ""
    text = f"step {frame.step:,}: it writes <tspan{mark}>{escape(written)}</tspan>"
    caption = f'<text class="h" x="{LEFT}" y="46">{text}</text>'
    return f'<g class="f" id="f{index}">{caption}{"".join(maps)}</g>'


def draw_training(frames: Sequence[Frame], queries: Sequence[str], keys: Sequence[str]) -> str:
    """Return an animated SVG: every head of the cross-attention, from the first step of the training to the last.

    Args:
        frames: the model at some steps.
        queries: the tokens that the decoder writes, one per row.
        keys: the tokens that the encoder reads, one per column.
    """
    layers, heads = frames[0].weights_LHQK.shape[:2]
    large = (len(keys) * CELL, len(queries) * CELL)
    thumb = (len(keys) * THUMB, len(queries) * THUMB)
    first = LEFT + large[0] + 44
    thumbs = [
        (layer, head, first + layer * (thumb[0] + 22), 58 + head * (thumb[1] + 14))
        for layer in range(layers)
        for head in range(heads)
    ]
    width, height = thumbs[-1][2] + thumb[0] + 24, TOP + large[1] + 58
    chosen = {True: "b c", False: "b"}
    drawn = [_box(LEFT, TOP, large)]
    drawn += [_box(x, y, thumb, chosen[(layer, head) == (LAYER, HEAD)]) for layer, head, x, y in thumbs]
    drawn += [_text(thumbs[layer * heads][2], 46, f"layer {layer}, heads 0 to {heads - 1}") for layer in range(layers)]
    drawn.append(_text(LEFT, 70, f"layer {LAYER}, head {HEAD} of the cross-attention"))
    drawn += [
        _text(LEFT + (index + 0.5) * CELL, TOP - 8, _label(token), "t", "middle") for index, token in enumerate(keys)
    ]
    drawn += [
        _text(LEFT - 8, TOP + (index + 0.72) * CELL, _label(token), "t", "end") for index, token in enumerate(queries)
    ]
    drawn.append(
        _text(LEFT, TOP + large[1] + 24, "Each row is a character that the model writes; filled cells are the")
    )
    drawn.append(_text(LEFT, TOP + large[1] + 42, "characters of the source that this head attends to meanwhile."))
    drawn += [_frame_group(index, frame, thumbs) for index, frame in enumerate(frames)]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">
<title>Every head of the cross-attention while a small Transformer learns to read dates</title>
<style>
{STYLE}
{_timing(len(frames))}
@media (prefers-reduced-motion:reduce){{.f{{animation:none!important}}}}
</style>
{chr(10).join(drawn)}
</svg>"""


def draw_architecture() -> str:
    """Return the picture of the original Transformer, as `clearhead inspect transformer --svg` draws it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "transformer.svg"
        subprocess.run([sys.executable, "-m", "clearhead", "inspect", "transformer", "--svg", path], check=True)
        return path.read_text("utf-8")


def photograph_explorer(run: Path) -> None:
    """Write a screenshot of every head of the demo's model in the explorer."""
    model = ch.load(run)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "heads.html"
        model.attention(TEXT).save_html(path)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SCREEN, color_scheme="light")
        page.goto(f"{path.as_uri()}#view=overview&layer={LAYER}&head={HEAD}")
        page.wait_for_function(DRAWN)
        # Thumbnails are painted a few at a time afterwards.
        page.wait_for_timeout(2000)
        shot = page.screenshot()
        browser.close()
    with Image.open(io.BytesIO(shot)) as image:
        facts = PngImagePlugin.PngInfo()
        facts.add_text(KEY, digest("explorer.png"))
        # A palette of 64 colors is a third of the size, and looks the same.
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
            IMAGES / "explorer.png", pnginfo=facts, optimize=True
        )


def main(run: Path) -> None:
    """Make every picture from a run of `clearhead demo`."""
    write_svg("learning-to-align.svg", draw_training(*read_frames(run)))
    (IMAGES / ARCHITECTURE).write_text(draw_architecture(), encoding="utf-8", newline="\n")
    photograph_explorer(run)
    for name in (*SOURCES, ARCHITECTURE):
        print(f"{(IMAGES / name).relative_to(ROOT)}: {(IMAGES / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
