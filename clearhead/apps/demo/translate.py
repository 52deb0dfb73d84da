"""`clearhead demo translate`: dates of many languages become ISO dates."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clearhead.apps.demo.common import DemoOutcome, DemoPlan, load_trained, train_recipe, write_heads_page, write_tables
from clearhead.apps.demo.data.cldr import language_name
from clearhead.apps.demo.data.dates import LOCALES, DatePair, DateSets, date_styles, make_date_sets
from clearhead.base.commands import make_command, quote
from clearhead.base.progress import message

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.interpret.maps.attention_maps import AttentionMaps
    from clearhead.model.facade import Model

SAMPLE = "Montag, 5. Januar 1998"
SHOWN = ("de", "ar_EG", "ru", "ja", "bn", "el", "ko", "my", "th", "fr")
PICTURED = ("de", "el", "hu", "ru")
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
keep = 6                        # for clearhead view --checkpoints: how its heads formed
"""


@dataclass(frozen=True)
class TranslateSizes:
    """How much is made.

    Args:
        locales: the languages, as CLDR names.
        train_size: pairs to learn from.
        valid_per_locale: validation pairs of each locale.
        test_per_locale: test pairs of each locale.
    """

    locales: Sequence[str] = LOCALES
    train_size: int = 100_000
    valid_per_locale: int = 20
    test_per_locale: int = 100


FULL = TranslateSizes()


def run_translate(plan: DemoPlan, sizes: TranslateSizes = FULL) -> DemoOutcome:
    """Make the data, train, show samples, score the test pairs once and draw the alignment picture.

    Args:
        plan: the options of every demo.
        sizes: how much is made.

    Returns:
        The share of test dates that were written exactly right, in all and for each locale.
    """
    console = plan.console
    sets = make_date_sets(
        seed=plan.seed,
        train_size=sizes.train_size,
        valid_per_locale=sizes.valid_per_locale,
        test_per_locale=sizes.test_per_locale,
        locales=sizes.locales,
    )
    _introduce(plan, sets, sizes.locales)
    files = write_tables(plan, {"train": sets.train, "valid": sets.valid, "test": sets.test})
    train_recipe(RECIPE, plan, files)
    model = load_trained(plan)
    console.print("\nDates that were in no training pair:")
    for pair in _samples(sets.test, sizes.locales):
        _show_sample(console, pair, model.translate([pair.source], beam_size=1)[0])
    written = model.translate([pair.source for pair in sets.test], beam_size=1, batch_size=plan.batch_size or 512)
    exact = exact_match(sets.test, written)
    console.print(score_table(exact, len(sets.test)))
    draw_attention(model, sets.test[0], plan, sizes.locales)
    write_heads_page(model, SAMPLE, plan)
    return DemoOutcome(
        record={"exact_match": sum(exact.values()) / len(exact), "per_locale": exact},
        pictures={"Attention": "plots/alignment.png"},
        commands={"Try your own date": f"echo '{SAMPLE}' | {make_command(f'translate {quote(str(plan.run))}')}"},
    )


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


def _introduce(plan: DemoPlan, sets: DateSets, locales: Sequence[str]) -> None:
    sizes = (
        f"{len(sets.train):,} pairs to learn from, {len(sets.valid):,} for validation, {len(sets.test):,} for the test"
    )
    plan.console.print(f"Dates in {len(locales)} languages, to be written as year-month-day: {sizes}.")
    for pair in _samples(sets.train, locales)[:4]:
        plan.console.print(f"  {pair.locale:6} {pair.target}  {escape(pair.source)}")
    for (locale, style), reason in sets.dropped.items():
        message(f"left out the {style} format of {locale}: {reason}")


def _samples(pairs: Sequence[DatePair], locales: Sequence[str]) -> list[DatePair]:
    """Return a long text of each of some locales with different scripts and digits."""
    chosen = [locale for locale in SHOWN if locale in locales] or locales[:5]
    few = ([pair for pair in pairs if pair.locale == locale][:10] for locale in chosen)
    return [max(own, key=lambda pair: len(pair.source)) for own in few]


def _show_sample(console: Console, pair: DatePair, text: str) -> None:
    mark = "[green]✓[/green]" if text == pair.target else f"[red]✗ not {pair.target}[/red]"
    console.print(f"  {pair.locale:6} [bold]{escape(text):10}[/bold] {mark}  {escape(pair.source)}")


def _mean_over_heads(maps: AttentionMaps) -> Tensor:
    """Return the attention of a decoder to the memory, [layers, queries, keys]."""
    import torch

    layers = maps.layers("decoder.memory")
    return torch.stack([maps.weights("decoder.memory", layer) for layer in layers]).mean(1)


def draw_attention(model: Model, pair: DatePair, plan: DemoPlan, locales: Sequence[str]) -> None:
    """Draw where the decoder looks while it writes one unseen date, in up to four languages that the font can write."""
    import torch

    from clearhead.base.figures import drawable, shown_label
    from clearhead.interpret.maps.token_texts import label_tokens
    from clearhead.interpret.view.alignment import AlignmentHeatMap, draw_alignments

    when = datetime.date.fromisoformat(pair.target)
    styles, _ = date_styles([locale for locale in locales if locale in PICTURED] or locales[:1])
    texts = list(filter(drawable, (style.write(when) for style in styles if style.style == "full")))
    if not texts:
        return
    runs = list(map(model.attention, texts))
    weights = list(map(_mean_over_heads, runs))
    # One layer for all: the one whose heads, averaged, look most sharply.
    layer = int(torch.stack([layers_QK.amax(-1).mean(-1) for layers_QK in weights]).mean(0).argmax())
    alignments = []
    for text, maps, layers_QK in zip(texts, runs, weights, strict=True):
        source, target = model.tokenizers.source, model.tokenizers.target
        read, labels = maps.reading.source.ids[0].tolist(), maps.reading.labels
        columns, written = (
            [shown_label(token, longest=12) for token in label_tokens(tokenizer, ids)]
            for tokenizer, ids in ((source, read), (target, labels))
        )
        name = f"{text} → {target.decode(labels)}"
        alignments.append(AlignmentHeatMap(layers_QK[layer].numpy(), columns, written, name))
    where = f"layer {layer}, mean of {runs[0].num_heads('decoder.memory', layer)} heads"
    title = f"Where the decoder looks while it writes a date ({where})"
    draw_alignments(alignments, plan.run / "plots" / "alignment.png", title=title)
