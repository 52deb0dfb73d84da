"""`clearhead demo`: real data made on this machine, a model trained on it, and pictures of what it learned."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.cli.console import BatchSize, Device, Json, Precision, Seed, Threads, say, show_json
from clearhead.data.dates import LOCALES, DatePair, DateSets, date_styles, language_name, make_date_sets
from clearhead.errors import InputError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.model import Model
    from clearhead.train.settings import TrainResult

SAMPLE = "Montag, 5. Januar 1998"
SHOWN = ("de", "ar_EG", "ru", "ja", "bn", "el", "ko", "my", "th", "fr")
PICTURED = ("de", "el", "hu", "ru")
KINDS = ("translate", "generate", "classify", "fill")
RECIPE = """
[task]
kind = "translate"
[data]
train = {{ tsv = {train} }}
valid = {{ tsv = {valid} }}
max_length = 64
[tokenizer]
kind = "character"
joint = false
[model]
layers = 2
width = 64
heads = 4
feedforward = 128
norm_place = "pre"
positions = "rotary"
dropout = 0.0
tie = "none"
[train]
run = {run}
steps = 1000
batch_tokens = 2600
optimizer = "muon"
learning_rate = 0.012
schedule = "cosine"
warmup = 100
clip = 1.0
validate_every = 200
bleu_sentences = 0
keep = 1
"""


@dataclass(frozen=True)
class DemoPlan:
    """What the demo makes and trains.

    Args:
        run: the run directory, new.
        seed: of the data and of the training.
        locales: the languages, as CLDR names.
        train_size: pairs to learn from.
        valid_per_locale: validation pairs of each locale.
        test_per_locale: test pairs of each locale.
        overrides: changes to the run file, such as "train.steps=500".
    """

    run: Path
    seed: int
    locales: Sequence[str] = LOCALES
    train_size: int = 100_000
    valid_per_locale: int = 20
    test_per_locale: int = 100
    overrides: Sequence[str] = ()


def demo(
    kind: Annotated[str, typer.Argument(metavar="[KIND]", help=f"Which demo: {' or '.join(KINDS[:1])}.")] = KINDS[0],
    out: Annotated[
        Path | None, typer.Option("--out", help="The run directory, new; by default runs/demo, or the next free name.")
    ] = None,
    as_json: Json = False,
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
) -> None:
    """Make real data here, train on it in about a minute and a half, and show what was learned. Nothing is downloaded.

    \b
    Example:
      clearhead demo
      clearhead demo translate --out runs/dates --seed 7

    translate: dates as people of many languages write them ("Montag, 5. Januar 1998") become ISO dates (1998-01-05).
    The dates of the test are in no training pair, in no language. The result is an ordinary run directory: translate
    with it, evaluate it, look into it. --json ends with {"exact_match", "per_locale", "seconds", "run"}.
    """
    if kind not in KINDS:
        raise InputError(f"there is no demo '{kind}'{nearest(kind, KINDS)}; there is: {KINDS[0]}")
    if kind != KINDS[0]:
        raise InputError(f"the demo '{kind}' is not there yet; there is: {KINDS[0]}")
    began = time.monotonic()
    options = {"device": device, "precision": precision, "threads": threads}
    overrides = [f"train.{key}={value}" for key, value in options.items() if value not in (None, "auto")]
    plan = DemoPlan(run=free_folder(out), seed=1 if seed is None else seed, overrides=overrides)
    exact = run_demo(plan, device=device, precision=precision, batch_size=batch_size)
    overall = sum(exact.values()) / len(exact)
    seconds = round(time.monotonic() - began, 1)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"\n{seconds:.0f} seconds. Loss: {plan.run}/plots/loss.png   Attention: {plan.run}/plots/alignment.png"
    )
    console.print(f"Try your own date: echo '{SAMPLE}' | clearhead translate {plan.run}")
    if as_json:
        show_json({"exact_match": overall, "per_locale": exact, "seconds": seconds, "run": str(plan.run)})


def run_demo(
    plan: DemoPlan, *, device: str = "auto", precision: str = "auto", batch_size: int | None = None
) -> dict[str, float]:
    """Make the data, train, show samples, score the test pairs once and draw the alignment picture.

    Args:
        plan: what to make and train.
        device: where the trained model runs.
        precision: of the trained model.
        batch_size: sentences translated together.

    Returns:
        The share of test dates that were written exactly right, for each locale.
    """
    import clearhead

    console = Console(highlight=False, soft_wrap=True)
    sets = make_date_sets(
        seed=plan.seed,
        train_size=plan.train_size,
        valid_per_locale=plan.valid_per_locale,
        test_per_locale=plan.test_per_locale,
        locales=plan.locales,
    )
    _introduce(console, sets, plan)
    train_on(sets, plan)
    model = clearhead.load(str(plan.run), device=device, precision=precision)
    console.print("\nDates that were in no training pair:")
    for pair in _samples(sets.test, plan.locales):
        _show_sample(console, pair, model.translate([pair.source], beam_size=1)[0])
    written = model.translate([pair.source for pair in sets.test], beam_size=1, batch_size=batch_size or 512)
    exact = exact_match(sets.test, written)
    console.print(score_table(exact, len(sets.test)))
    draw_attention(model, sets.test[0], plan)
    return exact


def train_on(sets: DateSets, plan: DemoPlan) -> TrainResult:
    """Write the pairs beside the run and train through an ordinary run file."""
    from clearhead.train.assemble import train_run
    from clearhead.train.progress import progress_for
    from clearhead.train.runfile import parse_run_file

    # The run directory may hold these two before its run begins: see clearhead.train.run_directory.
    (plan.run / "plots").mkdir(parents=True)
    files = {name: plan.run / "data" / f"{name}.tsv" for name in ("train", "valid", "test")}
    files["train"].parent.mkdir()
    for name, path in files.items():
        pairs: list[DatePair] = getattr(sets, name)
        path.write_text("".join("\t".join(pair) + "\n" for pair in pairs), encoding="utf-8")
    quoted = {name: json.dumps(str(path)) for name, path in files.items()}
    text = RECIPE.format(run=json.dumps(str(plan.run)), train=quoted["train"], valid=quoted["valid"])
    run_file = parse_run_file(text, "the demo's run file", [f"train.seed={plan.seed}", *plan.overrides])
    return train_run(run_file, resume=False, progress=progress_for())


def exact_match(pairs: Sequence[DatePair], written: Sequence[str]) -> dict[str, float]:
    """Return the share of pairs whose text equals the target, for each locale in the order of their names."""
    right: dict[str, list[bool]] = {locale: [] for locale in sorted({pair.locale for pair in pairs})}
    for pair, text in zip(pairs, written, strict=True):
        right[pair.locale].append(text == pair.target)
    return {locale: sum(marks) / len(marks) for locale, marks in right.items()}


def score_table(exact: Mapping[str, float], count: int) -> Table:
    """Return a table of the exact matches, two locales in a row."""
    table = Table(
        title=f"\nExact match on {count:,} unseen dates", box=SIMPLE_HEAD, title_justify="left", caption_justify="left"
    )
    for _ in range(2):
        table.add_column("locale")
        table.add_column("language")
        table.add_column("exact", justify="right")
    cells = [(locale, language_name(locale), f"{100 * share:.1f} %") for locale, share in exact.items()]
    half = (len(cells) + 1) // 2
    for left, right in zip(cells[:half], [*cells[half:], ("", "", "")], strict=False):
        table.add_row(*left, *right)
    lowest = min(exact, key=lambda locale: exact[locale])
    below = f"; lowest: {lowest} {100 * exact[lowest]:.1f} %" if exact[lowest] < 1 else ""
    table.caption = f"all locales: {100 * sum(exact.values()) / len(exact):.2f} %{below}"
    return table


def free_folder(out: Path | None) -> Path:
    """Return the folder for the run: the one asked for, or the first free name.

    Raises:
        InputError: the folder asked for is not empty.
    """
    if out is None:
        return next(path for path in _names(Path("runs/demo")) if not path.exists())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already and is not an empty folder; name a new one with --out")
    return out


def _names(first: Path) -> Iterator[Path]:
    yield first
    number = 2
    while True:
        yield first.with_name(f"{first.name}-{number}")
        number += 1


def _introduce(console: Console, sets: DateSets, plan: DemoPlan) -> None:
    sizes = (
        f"{len(sets.train):,} pairs to learn from, {len(sets.valid):,} for validation, {len(sets.test):,} for the test"
    )
    console.print(f"Dates in {len(plan.locales)} languages, to be written as year-month-day: {sizes}.")
    for pair in _samples(sets.train, plan.locales)[:4]:
        console.print(f"  {pair.locale:6} {pair.target}  {escape(pair.source)}")
    for (locale, style), reason in sets.dropped.items():
        say(f"left out the {style} format of {locale}: {reason}")


def _samples(pairs: Sequence[DatePair], locales: Sequence[str]) -> list[DatePair]:
    """Return a long text of each of some locales with different scripts and digits."""
    chosen = [locale for locale in SHOWN if locale in locales] or locales[:5]
    few = ([pair for pair in pairs if pair.locale == locale][:10] for locale in chosen)
    return [max(own, key=lambda pair: len(pair.source)) for own in few]


def _show_sample(console: Console, pair: DatePair, text: str) -> None:
    mark = "[green]✓[/green]" if text == pair.target else f"[red]✗ not {pair.target}[/red]"
    console.print(f"  {pair.locale:6} [bold]{escape(text):10}[/bold] {mark}  {escape(pair.source)}")


def draw_attention(model: Model, pair: DatePair, plan: DemoPlan) -> None:
    """Draw where the decoder looks while it writes one unseen date, in up to four languages that the font can write."""
    import torch

    from clearhead.view.pictures import Alignment, draw_alignments, drawable

    when = datetime.date.fromisoformat(pair.target)
    styles, _ = date_styles([locale for locale in plan.locales if locale in PICTURED] or plan.locales[:1])
    texts = [text for style in styles if style.style == "full" and drawable(text := style.write(when))]
    seen = [_attention(model, text) for text in texts]
    if not seen:
        return
    # One layer for all: the one whose heads, averaged, look most sharply.
    sharpness_NL = torch.stack([weights.mean(1).amax(-1).mean(-1) for weights, _, _ in seen])
    layer = int(sharpness_NL.mean(0).argmax())
    layers, heads = seen[0][0].shape[:2]
    alignments = [
        Alignment(weights[layer].mean(0).numpy(), columns, rows, f"{text} → {''.join(rows[:-1])}")
        for text, (weights, columns, rows) in zip(texts, seen, strict=True)
    ]
    title = f"Where the decoder looks while it writes a date (layer {layer + 1} of {layers}, mean of {heads} heads)"
    draw_alignments(alignments, plan.run / "plots" / "alignment.png", title=title)


def _attention(model: Model, text: str) -> tuple[Tensor, list[str], list[str]]:
    """Translate a text; return the attention [layers, heads, target, source] over it and the labels of its two axes."""
    import torch

    from clearhead.view.alignment import alignment

    written = model.translate([text], beam_size=1)[0]
    source, target = model.tokenizers.source, model.tokenizers.target
    device = next(model.module.parameters()).device
    ids = torch.tensor([[*source.encode(text), source.eos_id]], device=device)
    labels = [*target.encode(written), target.eos_id]
    read = torch.tensor([[target.bos_id, *labels[:-1]]], device=device)
    weights = alignment(model.module, ids, torch.ones_like(ids, dtype=torch.bool), read)[0].float().cpu()
    columns = ["␣" if token.isspace() else token for token in source.tokens(ids[0].tolist())]
    return weights, columns, target.tokens(labels)
